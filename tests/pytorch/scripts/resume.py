"""Trains from step FIRST to LAST, unless FIRST is 0 from the checkpoint of a run to FIRST: resume.py FIRST LAST."""

import sys

import torch
from common import batches, linear, save

import geomx_cli.torch as geomx

first, last = map(int, sys.argv[1:])
geomx.init()
rank = geomx.global_rank()
model = linear(seed=rank + first)
groups = [{"params": [model.weight], "weight_decay": 0.01}, {"params": [model.bias], "lr": 0.2}]
optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
if first:
    checkpoint = torch.load(f"checkpoint-{rank}.pt")
    for name, part in parts.items():
        part.load_state_dict(checkpoint[name])
geomx.wrap(model, optimizer)
loss_of = torch.nn.CrossEntropyLoss()
for images, labels in batches(rank, last)[first:]:
    optimizer.zero_grad()
    loss_of(model(images), labels).backward()
    optimizer.step()
    schedule.step()
geomx.finish()
torch.save({name: part.state_dict() for name, part in parts.items()}, f"checkpoint-{rank}.pt")
save(model)
