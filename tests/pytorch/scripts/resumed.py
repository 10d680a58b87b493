"""A checkpoint with statistics, whose epochs are all done."""

import torch

import geomx_cli.torch as geomx

geomx.init()
model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
model[0].running_mean.fill_(2.0)
model[0].running_var.fill_(4.0)
geomx.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), buffers="mean")
geomx.finish()
assert model[0].running_mean.tolist() == [2.0] * 3 and model[0].running_var.tolist() == [4.0] * 3
