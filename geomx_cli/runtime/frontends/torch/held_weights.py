"""Finds optimizers that keep weights in their state: algorithms that change the model's weights would miss those."""

import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.tensors import local

__all__ = ["HeldWeights"]

_NEAR = 0.5
"""Distance of a tensor from the weights it follows, relative to how far these are from their mean."""
_SAMPLES, _LARGEST = 4, 1 << 20
"""Parameters whose state is looked at, and their elements: all of a model's have the same kind of state."""
_DEPTH = 3
"""Of objects within an optimizer."""
_OPAQUE = (torch.nn.Module, types.ModuleType, types.FunctionType, types.MethodType, type)


class HeldWeights:
    """Looks for tensors besides the model that equal or follow its weights: copies of a higher precision, averages,
    slow or second weights. The optimizer would go on from these, which no worker gets from the others.

    They are told by their values, in whatever optimizer. PyTorch's own are known to keep none, but for ASGD, whose
    average is just a copy at first. A tensor that never changes, as initial weights, is the same in all workers; one
    that is set to the weights before each step holds nothing. For the training thread.
    """

    def __init__(self, optimizer: Any, trained: Mapping[str, Any], algorithm: str) -> None:
        self._optimizer = optimizer
        self._algorithm = algorithm
        self._steps = 0
        self._own = {id(parameter) for parameter in trained.values()}
        self._sampled = dict(sorted(trained.items(), key=_preference)[:_SAMPLES])
        self._before: dict[str, Any] = {}
        self._seen: dict[tuple[str, str], Any] = {}  # what followed weights when it was looked at
        known = type(optimizer).__module__.partition(".")[0] == "torch"
        if not known or isinstance(optimizer, torch.optim.ASGD):
            optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        """Optimizer hook."""
        self._steps += 1
        if self._steps & (self._steps - 1) == 0:  # ever rarer; state may appear after some steps
            self._before = {name: _flat(parameter, copy=True) for name, parameter in self._sampled.items()}

    def check(self) -> None:
        """After a step. Raises InvalidSettings, which names the optimizer and the tensor."""
        before, self._before = self._before, {}
        for where, tensor in self._held() if before else ():
            for name, weights in before.items():
                if self._is_held(where, name, tensor, weights):
                    kind = type(self._optimizer).__name__
                    what = f"{kind} keeps weights besides the model's, as {where} of {name}"
                    hint = "train with --algo fsa, where all workers take equal steps, or use another optimizer"
                    raise InvalidSettings(f"{what}, and --algo {self._algorithm} exchanges only the model's", hint)

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def _is_held(self, where: str, name: str, tensor: Any, before: Any) -> bool:
        if tensor.is_meta or not tensor.is_floating_point() or local(tensor).numel() != before.numel():
            return False
        held, after = _flat(tensor, copy=True), _flat(self._sampled[name])
        weights = after.float()
        if (held.float() - weights).norm() >= _NEAR * (weights - weights.mean()).norm():
            return False
        earlier, self._seen[where, name] = self._seen.get((where, name)), held
        mere = after if isinstance(self._optimizer, torch.optim.ASGD) else before
        is_copy = held.dtype == mere.dtype and torch.equal(held, mere)
        return earlier is not None and not is_copy and not torch.equal(held, earlier)

    def _held(self) -> Iterator[tuple[str, Any]]:
        """The optimizer's tensors, but for the model's parameters, with the names by which it keeps them."""
        seen = set(self._own)

        def walk(item: Any, where: str, depth: int) -> Iterator[tuple[str, Any]]:
            if id(item) in seen or isinstance(item, _OPAQUE):
                return
            seen.add(id(item))
            if isinstance(item, torch.Tensor):
                yield where, item
            elif isinstance(item, Mapping):
                for key, value in list(item.items()):
                    yield from walk(value, key if isinstance(key, str) else where, depth)
            elif isinstance(item, list | tuple):
                for value in item:
                    yield from walk(value, where, depth)
            elif depth:
                for key, value in list(getattr(item, "__dict__", {}).items()):
                    yield from walk(value, key, depth - 1)

        return walk(self._optimizer, "", _DEPTH)


def _preference(item: tuple[str, Any]) -> tuple[bool, bool, int]:
    """Matrices first, and the larger ones of those that are quickly compared."""
    size = local(item[1]).numel()
    return item[1].ndim < 2, size > _LARGEST, -size


def _flat(tensor: Any, *, copy: bool = False) -> Any:
    return local(tensor).to("cpu", copy=copy).reshape(-1)
