"""Workers that do not make the same collective calls: unlike.py HOW [caught]. Each prints the error that it gets, and
ends with it unless it is caught.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import geomx_cli.torch as geomx

how = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(8, 4)
parallel = DistributedDataParallel(model)
tensor = torch.ones(5)


def train() -> None:
    parallel(torch.ones(2, 8)).sum().backward()


for _ in range(2):  # after the first DistributedDataParallel makes calls of its own
    train()
try:
    if how == "size":
        dist.all_reduce(torch.ones(5 + rank))
    elif how == "dtype":
        dist.all_reduce(torch.ones(5, dtype=torch.float64 if rank else torch.float32))
    elif how == "operation":
        dist.all_reduce(tensor, dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
    elif how == "source":
        dist.broadcast(tensor, rank)
    elif how == "parts":
        sizes = (3, 2) if rank else (2, 3)
        dist.reduce_scatter(torch.zeros(sizes[rank]), [torch.ones(part) for part in sizes])
    elif how == "gathered":
        dist.all_gather([torch.zeros(3) for _ in range(2)], torch.ones(3 + rank))
    elif how == "call":
        dist.broadcast(tensor, 0) if rank else dist.all_reduce(tensor)
    elif rank:
        train()
    else:
        dist.barrier()
except geomx.GeomxError as error:
    print(f"{type(error).__name__}: {error.message} | {error.hint}", flush=True)
    if sys.argv[2:] != ["caught"]:
        raise
else:
    raise AssertionError("nothing was noticed")
