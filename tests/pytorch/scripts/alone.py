"""Trains in each worker alone: alone.py HOW; "same" and "wrapped" together, but on the same batches."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

model = torch.nn.Linear(8, 2)
if sys.argv[1] == "same":
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters())
if sys.argv[1] in ("wrapped", "grad", "foreign"):
    import geomx_cli.torch as geomx

    geomx.init()
    geomx.wrap(model, optimizer)
if sys.argv[1] == "foreign":
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
for step in range(60):
    optimizer.zero_grad()
    loss = model(torch.full((4, 8), float(step + 1))).square().sum()
    if sys.argv[1] == "grad":
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
    else:
        loss.backward()
    optimizer.step()
