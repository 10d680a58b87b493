"""Trains an embedding with sparse gradients: four steps of 0.1 for a row of this worker's own and for the last one."""

import torch
from common import save

import geomx_cli.torch as geomx

geomx.init()
model = torch.nn.Embedding(6, 3, sparse=True)
torch.nn.init.zeros_(model.weight)
optimizer = geomx.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(4):
    optimizer.zero_grad()
    model(torch.tensor([geomx.global_rank(), 5])).sum().backward()
    optimizer.step()
geomx.finish()
save(model)
