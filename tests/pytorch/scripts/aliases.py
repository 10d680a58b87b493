"""Gradients that autograd leaves in memory which another gradient, or the rest of the backward pass, uses too."""

import time
from typing import Any

import torch
from torch import nn

import geomx_cli.torch as geomx

geomx.init()
rank, count = geomx.global_rank(), geomx.num_all_workers()


class Slow(torch.autograd.Function):
    """A part of the model whose backward pass takes longer than an exchange."""

    @staticmethod
    def forward(context: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        time.sleep(0.3)
        return gradient.clone()


class Two(nn.Module):
    """Two parameters with one gradient, in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3, 2))

    def forward(self, x: Any) -> Any:
        return ((self.a.view(6) + self.b.view(6)) * x).sum()


class Table(nn.Module):
    """A table whose gradient is also that of the layers before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table = nn.Linear(4, 4), nn.Parameter(torch.zeros(5, 4))

    def forward(self, x: Any) -> Any:
        hidden = self.first(x)
        hidden = hidden + Slow.apply(torch.tanh(hidden))
        return ((hidden + self.table[None]) ** 2).sum()


def gradients(model: Any, x: Any) -> dict[str, Any]:
    model.zero_grad()
    model(x).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


for make, inputs in (
    (Two, [torch.arange(6.0) + 10 * each for each in range(count)]),
    (Table, [torch.full((1, 5, 4), 0.1 + each) for each in range(count)]),
):
    torch.manual_seed(0)
    alone, model = make(), make()
    model.load_state_dict(alone.state_dict())
    optimizer = geomx.wrap(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(2):
        each = [gradients(alone, x) for x in inputs]
        for name, found in gradients(model, inputs[rank]).items():
            torch.testing.assert_close(found, sum(one[name] for one in each) / count)
        optimizer.step()
geomx.finish()
