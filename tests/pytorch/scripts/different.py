"""Worker 1 does something else than the others: different.py rate|weights (with `wrap`) | nan|call (with
DistributedDataParallel).
"""

import sys

import torch
import torch.distributed as dist
from common import batches, linear
from torch.nn.parallel import DistributedDataParallel

import geomx_cli.torch as geomx

(how,) = sys.argv[1:]
if how in ("rate", "weights"):
    geomx.init()
    rank, model = geomx.global_rank(), linear()
    rate = 0.1 if (how, rank) != ("rate", 1) else 0.05
    optimizer = geomx.wrap(model, torch.optim.SGD(model.parameters(), lr=rate))
else:
    dist.init_process_group()
    rank, model = dist.get_rank(), linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = DistributedDataParallel(model)


def one_waits(_: torch.Tensor) -> None:
    """Of the two workers."""
    dist.all_reduce(torch.ones(2), async_op=not rank)


for step, (images, labels) in enumerate(batches(rank, 40), 1):
    if (how, rank, step) == ("weights", 1, 3):
        model.weight.data *= 2
    if (how, rank, step) == ("nan", 1, 32):  # in a step in which models are not compared
        model.module.bias.data[0] = float("nan")
    optimizer.zero_grad()
    output = model(images)
    if (how, step) == ("call", 2):  # only one waits within the pass: that is no difference
        output.register_hook(one_waits)
    if (how, rank, step) == ("call", 1, 5):
        output.register_hook(lambda _: dist.all_reduce(torch.ones(3)))
    torch.nn.functional.cross_entropy(output, labels).backward()
    optimizer.step()
if how in ("rate", "weights"):
    geomx.finish()
