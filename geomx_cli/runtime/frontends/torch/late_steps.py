"""An optimizer's step for one parameter at a time, later than the script has asked for it."""

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["LateStep", "late_step"]

_SEPARATE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD,
)  # fmt: skip
"""Optimizers that update each parameter by its own gradient and state."""

LateStep = Callable[[Any, Any], None]
"""Takes the step for a parameter with its gradient."""


def late_step(optimizer: Any, args: Any, kwargs: Any) -> LateStep | None:
    """Return the step that `optimizer.step(*args, **kwargs)` would take now, with the groups' current
    hyper-parameters; None if it cannot be taken later, parameter by parameter.
    """
    if type(optimizer) not in _SEPARATE or args[1:] or kwargs or _has_compiled():
        return None
    if len(optimizer._optimizer_step_pre_hooks) > 1:  # the script's own may read gradients
        return None
    groups = [dict(group) for group in optimizer.param_groups]
    if any(group.get("differentiable") or _in_tensors(group) for group in groups):
        return None
    own = {id(parameter): group for group in groups for parameter in group["params"]}
    view, step = copy.copy(optimizer), inspect.unwrap(type(optimizer).step)  # a copy shares the state, and has no hooks

    def take(parameter: Any, gradient: Any) -> None:
        view.param_groups = [own[id(parameter)] | {"params": [parameter]}]
        before, parameter.grad = parameter.grad, gradient
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(parameter.device.type, enabled=False):
            step(view)
        parameter.grad = before

    return take


def _has_compiled() -> bool:
    """Whether torch.compile has compiled anything: its code reads parameters by itself."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"])


def _in_tensors(group: Mapping[str, Any]) -> bool:
    """Whether a hyper-parameter is a tensor, which the script may change in place."""
    return any(isinstance(value, torch.Tensor) for name, value in group.items() if name != "params")
