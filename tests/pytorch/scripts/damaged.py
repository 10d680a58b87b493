"""Worker 1 has a sample with nan in its fifth step, which "skip" leaves out if the gradients show it."""

import sys

import torch
from common import batches, linear, save

import geomx_cli.torch as geomx

geomx.init()
rank = geomx.global_rank()
model = linear(seed=rank)
optimizer = geomx.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step, (images, labels) in enumerate(batches(rank, 10), 1):
    if (rank, step) == (1, 5):
        images[:] = float("nan")
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    if "skip" not in sys.argv or all(bool(each.grad.isfinite().all()) for each in model.parameters()):
        optimizer.step()
geomx.finish()
save(model)
