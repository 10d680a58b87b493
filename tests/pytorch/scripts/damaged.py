"""Worker 1 has a sample with nan in its fifth step."""

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
    optimizer.step()
geomx.finish()
save(model)
