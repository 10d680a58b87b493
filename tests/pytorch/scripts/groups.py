"""Rates that change, also after the optimizer has loaded a state."""

import copy

import torch

import geomx_cli.torch as geomx

geomx.init()
model = torch.nn.Linear(1, 1, bias=False)
optimizer = geomx.wrap(model, torch.optim.SGD(model.parameters(), lr=0.5))
for rate in (0.5, 0.25, 0.125):
    optimizer.param_groups[0]["lr"] = rate
    before = model.weight.item()
    optimizer.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert abs(before - model.weight.item() - rate) < 1e-6, rate
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
geomx.finish()
