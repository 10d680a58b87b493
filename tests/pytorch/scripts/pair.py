"""Two models, trained in turn for numbers of steps that differ between the workers: pair.py BUFFERS STEPS..."""

import sys

import torch
from common import CLASSES, FEATURES, batches, linear, save
from torch import nn

import geomx_cli.torch as geomx

geomx.init()
rank = geomx.global_rank()
steps = int(sys.argv[2:][min(rank, len(sys.argv) - 3)])
torch.manual_seed(rank)
first = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES))
second = linear(seed=rank)
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
geomx.wrap(first, optimizers[0], buffers=sys.argv[1])
geomx.wrap(second, optimizers[1])
loss_of = nn.CrossEntropyLoss()
for number, (images, labels) in enumerate(batches(rank, steps)):
    for model, optimizer in zip((first, second), optimizers, strict=True):
        if model is first or number % 2 == 0:
            optimizer.zero_grad()
            loss_of(model(images), labels).backward()
            optimizer.step()
geomx.finish()
try:
    optimizers[0].step()
except geomx.InvalidSettings as error:
    assert "has finished" in error.message
else:
    raise AssertionError("a step after the end")
save(nn.ModuleList([first, second]))
