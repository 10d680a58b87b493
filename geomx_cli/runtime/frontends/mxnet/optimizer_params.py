"""Converts MXNet's optimizer objects to name and hyper-parameters, the form in which servers receive an optimizer."""

from collections.abc import Mapping
from typing import Any

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.optim import optimizers, schedules
from geomx_cli.ps.optim.schedules import MULTIPLIERS
from geomx_cli.runtime.script.base_store import Key

__all__ = ["can_travel", "from_mxnet", "index_of", "multipliers", "params_of", "schedule_of", "take_up"]

_COMMON = {"wd": "wd", "rescale_grad": "rescale_grad", "clip_gradient": "clip_gradient"}
_OWN: dict[str, dict[str, str]] = {
    "SGD": {"momentum": "momentum", "lazy_update": "lazy_update"},
    "NAG": {"momentum": "momentum"},
    "Adam": {"beta1": "beta1", "beta2": "beta2", "epsilon": "epsilon", "lazy_update": "lazy_update"},
    "AdaGrad": {"eps": "float_stable_eps"},
    "RMSProp": {
        "gamma1": "gamma1", "gamma2": "gamma2", "epsilon": "epsilon", "centered": "centered",
        "clip_weights": "clip_weights",
    },
    "DCASGD": {"momentum": "momentum", "lamda": "lamda"},
}  # fmt: skip
_MODULE = "mxnet.optimizer.optimizer"
_SCHEDULES_MODULE = "mxnet.lr_scheduler"
_WARMUP = ("base_lr", "warmup_steps", "warmup_begin_lr", "warmup_final_lr")
_SCHEDULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "FactorScheduler": ("factor", ("step", "factor", "stop_factor_lr", "count")),
    "MultiFactorScheduler": ("multifactor", ("factor",)),
    "PolyScheduler": ("poly", ("max_update", "base_lr_orig", "final_lr", "power")),
    "CosineScheduler": ("cosine", ("max_update", "base_lr_orig", "final_lr")),
}


def can_travel(optimizer: Any) -> bool:
    """Return whether the servers can run it: exactly one of MXNet's classes, as a subclass's `update` would not run,
    starting at update 0.
    """
    kind = type(optimizer)
    return kind.__module__ == _MODULE and kind.__name__ in _OWN and not optimizer.begin_num_update


def from_mxnet(optimizer: Any) -> tuple[str, dict[str, float | bool]]:
    """Return the server's name for an optimizer and its current hyper-parameters; a schedule gives the current rate.

    DCASGD maps to `dcasgd`, which remembers the weights sent to each party, as scripts that use it expect. MXNet's own
    rule is `dcasgd-mxnet`, for parity, and must be requested by that name. fp16 weights always have an fp32 master copy
    on the servers, whatever `multi_precision` says. Raises InvalidSettings for an optimizer that the servers cannot
    run, and for a hyper-parameter that they reject.
    """
    if not can_travel(optimizer):
        raise InvalidSettings(
            f"the optimizer {type(optimizer).__name__} cannot run on the servers",
            f"use one of {', '.join(_OWN)} itself, with begin_num_update 0, or update on the workers",
        )
    name, params = params_of(optimizer)
    optimizers.create(name, params)
    return name, params


def params_of(optimizer: Any) -> tuple[str, dict[str, float | bool]]:
    """Like `from_mxnet`, without the checks."""
    kind = type(optimizer).__name__
    params: dict[str, float | bool] = {"learning_rate": float(optimizer.learning_rate)}
    for name, attribute in {**_COMMON, **_OWN[kind]}.items():
        value = getattr(optimizer, attribute)
        if value is None:  # no limit now; there may have been one before
            value = 0.0
        params[name] = value if isinstance(value, bool) else float(value)
    return kind.lower(), params


def schedule_of(scheduler: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the server's name for an MXNet scheduler and its current parameters; None for an unsupported one.

    Raises InvalidSettings for parameters that servers reject.
    """
    kind = type(scheduler)
    if kind.__module__ != _SCHEDULES_MODULE or kind.__name__ not in _SCHEDULES:
        return None
    name, own = _SCHEDULES[kind.__name__]
    params: dict[str, Any] = {key: float(getattr(scheduler, key)) for key in (*_WARMUP, *own)}
    params["warmup_constant"] = scheduler.warmup_mode == "constant"
    if name == "multifactor":
        params["steps"] = [float(step) for step in scheduler.step[scheduler.cur_step_ind :]]
    schedules.create(name, params)
    return name, params


def index_of(optimizer: Any, key: Key, number: int) -> Key:
    """Return an optimizer's index for a key: servers number str keys in the order of `init`, local stores do not."""
    names = (optimizer.param_dict, optimizer.lr_mult, optimizer.wd_mult, optimizer.idx2name)
    return number if isinstance(key, str) and any(number in known for known in names) else key


def multipliers(optimizer: Any, index: Key) -> dict[str, float]:
    """Return an optimizer's learning rate and weight decay multipliers for one parameter, as `lr_mult` and `wd_mult`.

    They are looked up as in MXNet: by Parameter, by index, by the index's name. Raises InvalidSettings for non-finite
    values.
    """
    found = {}
    for what, field in MULTIPLIERS.items():
        own = getattr(optimizer, what)
        if index in optimizer.param_dict:
            value = getattr(optimizer.param_dict[index], what)
        else:
            value = own.get(index, own.get(optimizer.idx2name.get(index), 1.0))
        found[what] = float(field.check(f"{what} of parameter {index!r}", value))
    return found


def take_up(optimizer: Any, params: Mapping[str, float | bool], counts: Mapping[int | str, int]) -> None:
    """Apply hyper-parameters from another optimizer's `from_mxnet`, and its update counts by key, to an optimizer.

    With a schedule, the learning rate follows from the counts.
    """
    for name, attribute in {**_COMMON, **_OWN[type(optimizer).__name__]}.items():
        if name in params:
            setattr(optimizer, attribute, params[name] or None if name.startswith("clip_") else params[name])
    if optimizer.lr_scheduler is None:
        optimizer.set_learning_rate(params["learning_rate"])
    optimizer._index_update_count.update(counts)
    optimizer.num_update = max([optimizer.num_update, *counts.values()])
