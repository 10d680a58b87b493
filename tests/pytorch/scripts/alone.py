"""Trains in each worker alone: alone.py single|same|wrapped, but for the first together, on the same batches."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

model = torch.nn.Linear(8, 2)
if sys.argv[1] == "same":
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters())
if sys.argv[1] == "wrapped":
    import geomx_cli.torch as geomx

    geomx.init()
    geomx.wrap(model, optimizer)
for step in range(60):
    optimizer.zero_grad()
    model(torch.full((4, 8), float(step + 1))).square().sum().backward()
    optimizer.step()
