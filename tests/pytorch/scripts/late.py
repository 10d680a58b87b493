"""What scripts do with a model and an optimizer between a step and the next forward pass, over a link so slow that
results are then still on their way: saves all values seen, and for each case whether something was late.
"""

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import CLASSES, FEATURES, batches, save
from torch import nn

import geomx_cli.torch as geomx

geomx.init()
RANK = geomx.global_rank()
loss_of = nn.CrossEntropyLoss()
found: dict[str, Any] = {}


class Tied(nn.Module):
    """A parameter in two modules, one used outside of its module, normalisation, and perhaps unused ones, whose rounds
    end with the backward pass.
    """

    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.norm = nn.BatchNorm1d(FEATURES)
        self.again = nn.Linear(FEATURES, FEATURES)
        self.again.weight = self.first.weight
        self.table = nn.Embedding(CLASSES, FEATURES)
        self.shift = Foreign()
        self.unused = nn.ModuleList([nn.Linear(2, 2)] if unused else [])

    def forward(self, values: Any) -> Any:
        hidden = self.again(torch.relu(self.norm(self.first(values))))
        return self.shift(nn.functional.linear(hidden, self.table.weight))


class Foreign(nn.Module):
    """Reads its parameter as an extension does that does not ask the tensor's class."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(CLASSES))

    def forward(self, values: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return values + self.bias


class Scripted(nn.Module):
    """For torch.jit.script, whose methods may be called without calling the module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.first(values)

    @torch.jit.export
    def scores(self, values: torch.Tensor) -> torch.Tensor:
        return self.last(values)


def late(model: nn.Module) -> bool:
    return any(type(item) is not nn.Parameter for item in model.parameters())


def flat(tensors: Any) -> Any:
    return torch.cat([item.detach().double().reshape(-1) for item in tensors]).numpy()


def case(
    name: str, steps: Sequence[tuple[str, Any, Any]], make_optimizer: Callable[[Any], Any], *,
    set_to_none: bool = True, unused: bool = False,
) -> None:  # fmt: skip
    """Train by steps, each with a name, what is called before the optimizer's, or None, and what is called after it and
    returns what the script sees, or None.
    """
    torch.manual_seed(len(found))
    model = Tied(unused)
    optimizer = geomx.wrap(model, make_optimizer(model))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    for (kind, before, after), (images, labels) in zip(steps, batches(RANK, len(steps)), strict=True):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model(images), labels).backward()
        if before is not None:
            before(model)
        optimizer.step()
        schedule.step()
        found[f"{name}, {kind}: late"] = late(model)
        if after is not None:
            found[f"{name}, {kind}: seen"] = after(model, optimizer, images)
    found[f"{name}: model"] = flat(model.parameters())
    state = [own for _, own in sorted(optimizer.state_dict()["state"].items())]  # in the order of the parameters
    found[f"{name}: optimizer"] = flat(item for own in state for item in own.values() if torch.is_tensor(item))


def saved(model: Any, optimizer: Any, images: Any) -> Any:
    file = io.BytesIO()
    torch.save((model, optimizer.state_dict()), file)
    file.seek(0)
    restored, state = torch.load(file, weights_only=False)
    assert not late(restored) and state["param_groups"]
    return flat(restored.parameters())


def evaluated(model: Any, optimizer: Any, images: Any) -> Any:
    model.eval()
    with torch.inference_mode():
        scores = model(images)
    model.train()
    return scores.numpy()


def copied(model: Any, optimizer: Any, images: Any) -> Any:
    other = copy.deepcopy(model)
    assert not late(other)
    return flat(other.parameters())


def gradients(model: Any, optimizer: Any, images: Any) -> Any:
    return flat(item.grad for item in model.parameters() if item.grad is not None)


averages: list[Any] = []


def averaged(model: Any, optimizer: Any, images: Any) -> Any:
    averages[:] = averages or [torch.zeros_like(item) for item in model.parameters()]
    with torch.no_grad():
        torch._foreach_lerp_(averages, list(model.parameters()), 0.3)
    return flat(averages)


def again(model: Any, optimizer: Any, images: Any) -> Any:
    """Steps without a backward pass, with the gradients of the one before, and then with none."""
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    return flat(model.parameters())


def accumulated(model: Any) -> None:
    """A second and a third pass before the step; their gradients are added to those still on their way."""
    images, labels = batches(RANK + 2, 1)[0]
    with geomx.no_sync():
        loss_of(model(images), labels).backward()
    loss_of(model(images), labels).backward()


def clipped(model: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)


USES = (
    ("plain", None, None), ("saved", None, saved), ("evaluated", None, evaluated), ("copied", None, copied),
    ("gradients", None, gradients), ("averaged", None, averaged), ("clipped", clipped, None), ("again", None, again),
    ("accumulated", accumulated, None), ("plain again", None, None),
)  # fmt: skip
case("sgd", USES, lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01))
case("adamw in groups, zeroed in place", USES[:3], lambda model: torch.optim.AdamW(
    [{"params": list(model.first.parameters()), "lr": 0.1, "weight_decay": 0.0},
     {"params": [*model.norm.parameters(), model.again.bias, model.table.weight, *model.shift.parameters()]}], 0.01),
    set_to_none=False)  # fmt: skip
case("unused", USES[:3], lambda model: torch.optim.RMSprop(model.parameters(), 0.01, momentum=0.5), unused=True)
layers = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 20_000))
optimizer = geomx.wrap(layers, torch.optim.SGD(layers.parameters(), 0.1))
values = batches(RANK, 1)[0][0]
layers(values).square().mean().backward()
optimizer.step()
layers[0](values)
found |= {"layers, first: late": late(layers[0]), "layers, last: late": late(layers[1])}
found["layers: model"] = flat(layers.parameters())
script = torch.jit.script(Scripted())
optimizer = geomx.wrap(script, torch.optim.SGD(script.parameters(), 0.1))
for images, labels in batches(RANK, 3):
    optimizer.zero_grad()
    loss_of(script.scores(script.forward(images)), labels).backward()
    optimizer.step()
found["scripted: model"] = flat(script.parameters())
last = geomx.wrap(model := nn.Linear(FEATURES, CLASSES), torch.optim.SGD(model.parameters(), 0.1))
loss_of(model(batches(RANK, 1)[0][0]), batches(RANK, 1)[0][1]).backward()
last.step()
geomx.finish()  # with results on their way
save(model, **found)
