"""Worker 1 has a sample with nan in its fifth step, which "skip" leaves out if the gradients show it; "divided", by
fully_shard; "weights", in its weights instead.
"""

import sys

import torch
from common import batches, divide, linear, save

import geomx_cli.torch as geomx

geomx.init()
rank = geomx.global_rank()
model = linear(seed=rank)
if "divided" in sys.argv:
    divide(model)
optimizer = geomx.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step, (images, labels) in enumerate(batches(rank, 10), 1):
    if (rank, step) == (1, 5):
        (model.weight.data if "weights" in sys.argv else images)[:] = float("nan")
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    if "skip" not in sys.argv or all(bool(each.grad.isfinite().all()) for each in model.parameters()):
        optimizer.step()
geomx.finish()
if "divided" not in sys.argv:
    save(model)
