"""Optimizers that keep weights besides the model's, which algorithms with local steps would not exchange."""

from typing import Any

import pytest
import torch
from torch import nn

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.checks import HeldWeights


class Own(torch.optim.Optimizer):
    """Gradient descent of a class that nobody knows; `held` says what it does besides."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.parameters(), {"lr": 0.05})
        self.parameters = list(model.parameters())
        self.count = 0

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:
        self.count += 1
        for parameter in self.parameters:
            self.begin(parameter, self.state[parameter])
            parameter.sub_(parameter.grad, alpha=0.05)
            self.end(parameter, self.state[parameter])

    def begin(self, parameter: Any, state: dict[str, Any]) -> None:
        """Before a step."""

    def end(self, parameter: Any, state: dict[str, Any]) -> None:
        """After it."""


class ScheduleFree(Own):
    def end(self, parameter: Any, state: dict[str, Any]) -> None:
        z = state.setdefault("z", parameter.clone())
        z.sub_(parameter.grad, alpha=0.05)
        parameter.lerp_(z, 0.1)


class Masters(Own):
    def end(self, parameter: Any, state: dict[str, Any]) -> None:
        master = state.setdefault("master", parameter.float().clone())
        master.sub_(parameter.grad.float(), alpha=0.05)
        parameter.copy_(master)


class Lookahead(Own):
    """Its slow weights are no state of parameters, and come late."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.slow = [[parameter.detach().clone() for parameter in self.parameters]]

    def end(self, parameter: Any, state: dict[str, Any]) -> None:
        slow = next(s for s, own in zip(self.slow[0], self.parameters, strict=True) if own is parameter)
        if self.count % 5 == 0:
            slow.lerp_(parameter, 0.5)
            parameter.copy_(slow)


class Shadow(Own):
    """An average in an object of its own."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.average = type("Average", (), {})()
        self.average.shadow = {id(parameter): parameter.detach().clone() for parameter in self.parameters}

    def end(self, parameter: Any, state: dict[str, Any]) -> None:
        self.average.shadow[id(parameter)].lerp_(parameter, 0.1)


class Sharpness(Own):
    """Sets weights aside at the beginning of each step."""

    def begin(self, parameter: Any, state: dict[str, Any]) -> None:
        state["old_p"] = parameter.clone()


class FromStart(Own):
    """Keeps the initial weights, to measure the distance."""

    def begin(self, parameter: Any, state: dict[str, Any]) -> None:
        state.setdefault("p0", parameter.flatten().clone())


class Moments(Own):
    def end(self, parameter: Any, state: dict[str, Any]) -> None:
        state.setdefault("exp_avg", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
        state.setdefault("exp_avg_sq", torch.ones_like(parameter)).lerp_(parameter.grad**2, 0.1)


def train(optimizer: Any, model: Any, steps: int = 12) -> None:
    held = HeldWeights(optimizer, dict(model.named_parameters()), "diloco")
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8, dtype=model[0].weight.dtype)).square().mean().backward()
        optimizer.step()
        held.check()


def layers(dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3)).to(dtype)


@pytest.mark.parametrize(
    ("kind", "dtype", "said"),
    [
        (ScheduleFree, torch.float32, "ScheduleFree keeps weights besides the model's, as z of 0.weight"),
        (Masters, torch.bfloat16, "as master of 0.weight, and --algo diloco exchanges only the model's"),
        (Masters, torch.float32, "as master of"),
        (Lookahead, torch.float32, "as slow of"),
        (Shadow, torch.float32, "as shadow of"),
        (lambda model: torch.optim.ASGD(model.parameters(), t0=3), torch.float32, "ASGD keeps weights"),
    ],
    ids=["second", "masters", "equal-masters", "slow", "average", "asgd"],
)
def test_weights_in_an_optimizer_are_refused_by_name(kind: Any, dtype: Any, said: str) -> None:
    """Wherever it has them."""
    model = layers(dtype)
    with pytest.raises(InvalidSettings) as caught:
        train(kind(model), model)
    assert said in caught.value.message


@pytest.mark.parametrize(
    "kind",
    [Own, Sharpness, FromStart, Moments, *(
        (lambda model, kind=kind: kind(model.parameters(), lr=0.01))
        for kind in (torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Rprop, torch.optim.RMSprop, torch.optim.ASGD)
    )],
)  # fmt: skip
def test_other_state_is_none(kind: Any) -> None:
    """Moments, copies that each step makes anew, and weights that never change."""
    model = layers()
    train(kind(model), model)
