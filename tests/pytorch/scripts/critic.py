"""A loss that is linear in the outputs, so the last bias has the same gradient whatever the batch; without finish."""

import torch

import geomx_cli.torch as geomx

geomx.init()
model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
optimizer = geomx.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
torch.manual_seed(geomx.global_rank())
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).mean().backward()
    optimizer.step()
