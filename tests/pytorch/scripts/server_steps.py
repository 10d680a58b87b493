"""Optimizers on the global servers, compared in one party with torch.optim on all batches: server_steps.py STEPS..."""

import copy
import sys
from typing import Any

import torch
from common import batches, linear, save
from torch import nn

import geomx_cli.torch as geomx

geomx.init()
RANK, COUNT = geomx.global_rank(), geomx.num_all_workers()
STEPS = int(sys.argv[1:][min(RANK, len(sys.argv) - 2)])
loss_of = nn.CrossEntropyLoss()
one_party = len(sys.argv) == 2


def groups(model: Any) -> list[dict[str, Any]]:
    return [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.03, "weight_decay": 0.0}]


def sgd(model: Any) -> Any:
    return torch.optim.SGD(groups(model), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def adamw(model: Any) -> Any:
    return torch.optim.AdamW(groups(model), lr=0.01, betas=(0.8, 0.95))


def adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=0.01)


found = {}
for make in (sgd, adamw, adam):
    model = linear(seed=RANK)
    optimizer = geomx.wrap(model, make(model))
    alone = copy.deepcopy(model)
    optimizer_alone = make(alone)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(item, 0.9) for item in (optimizer, optimizer_alone)]
    for step in zip(*(batches(rank, STEPS) for rank in range(COUNT)), strict=True):
        optimizer.zero_grad()
        loss_of(model(step[RANK][0]), step[RANK][1]).backward()
        before = model.weight.grad.clone()
        optimizer.step()
        assert torch.equal(model.weight.grad, before) and not optimizer.state
        optimizer_alone.zero_grad()
        images, labels = (torch.cat(parts) for parts in zip(*step, strict=True))
        loss_of(alone(images), labels).backward()
        optimizer_alone.step()
        for schedule in schedules:
            schedule.step()
    if one_party:
        torch.testing.assert_close(model.weight, alone.weight, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(model.bias, alone.bias, rtol=1e-4, atol=1e-6)
    found[make.__name__] = model
for refused, why in (
    (torch.optim.RMSprop(linear().parameters()), "cannot run RMSprop"),
    (torch.optim.Adam(linear().parameters(), weight_decay=0.1), "weight_decay as a part of the gradient"),
    (torch.optim.AdamW(linear().parameters(), amsgrad=True), "amsgrad"),
):
    model = linear()
    refused.param_groups[0]["params"] = list(model.parameters())
    try:
        geomx.wrap(model, refused)
    except geomx.InvalidSettings as error:
        assert why in error.message and error.hint
    else:
        raise AssertionError(why)
geomx.finish()
save(nn.Module(), **{f"{name}-{key}": value.numpy() for name, model in found.items()
                     for key, value in model.state_dict().items()})  # fmt: skip
