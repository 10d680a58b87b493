"""Two optimizers on the global servers, compared in one party with torch.optim on all batches: server_steps.py KIND
STEPS...
"""

import copy
import sys
from typing import Any

import torch
from common import batches, linear, save
from torch import nn

import geomx_cli.torch as geomx

geomx.init()
RANK, COUNT = geomx.global_rank(), geomx.num_all_workers()
KIND, STEPS = sys.argv[1], int(sys.argv[2:][min(RANK, len(sys.argv) - 3)])
loss_of = nn.CrossEntropyLoss()
one_party = len(sys.argv) == 3


def groups(model: Any) -> list[dict[str, Any]]:
    return [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.03, "weight_decay": 0.0}]


def sgd(model: Any) -> Any:
    return torch.optim.SGD(groups(model), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def plainer_sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.5, nesterov=True)


def adamw(model: Any) -> Any:
    return torch.optim.AdamW(groups(model), lr=0.01, betas=(0.8, 0.95))


def adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=0.01)


class Pair:
    """A model whose optimizer runs on the servers, and its like, which torch trains on all batches."""

    def __init__(self, make: Any) -> None:
        self.model = linear(seed=RANK)
        with torch.device("meta"):  # what geomx itself creates is where it has to be
            self._optimizer = geomx.wrap(self.model, make(self.model))
        self._alone = copy.deepcopy(self.model)
        self._optimizer_alone = make(self._alone)
        self._schedules = [
            torch.optim.lr_scheduler.ExponentialLR(item, 0.9) for item in (self._optimizer, self._optimizer_alone)
        ]

    def step(self, step: Any) -> None:
        self._optimizer.zero_grad()
        loss_of(self.model(step[RANK][0]), step[RANK][1]).backward()
        before = self.model.weight.grad.clone()
        self._optimizer.step()
        assert torch.equal(self.model.weight.grad, before) and not self._optimizer.state
        self._optimizer_alone.zero_grad()
        images, labels = (torch.cat(parts) for parts in zip(*step, strict=True))
        loss_of(self._alone(images), labels).backward()
        self._optimizer_alone.step()
        for schedule in self._schedules:
            schedule.step()

    def check(self) -> None:
        torch.testing.assert_close(self.model.weight, self._alone.weight, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(self.model.bias, self._alone.bias, rtol=1e-4, atol=1e-6)


found = {}
makers = (sgd, plainer_sgd) if KIND == "sgd" else (adamw, adam)
pairs = [Pair(make) for make in makers]
for step in zip(*(batches(rank, STEPS) for rank in range(COUNT)), strict=True):
    for pair in pairs:
        pair.step(step)
for make, pair in zip(makers, pairs, strict=True):
    if one_party:
        pair.check()
    found[make.__name__] = pair.model
other = torch.optim.Adam if KIND == "sgd" else torch.optim.SGD
for refused, why in (
    (other(linear().parameters()), "a second optimizer of another kind"),
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
