"""MXNet's optimizer objects as name and hyper-parameters, the form in which an optimizer travels to the servers."""

import math
from collections.abc import Mapping
from typing import Any

from geomx_cli.errors import InvalidSettings

__all__ = ["from_mxnet", "take_up"]

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


def from_mxnet(optimizer: Any) -> tuple[str, dict[str, float | bool]]:
    """The server's name for an optimizer and its hyper-parameters as they are now; a schedule gives the present rate.

    DCASGD becomes `dcasgd`, which remembers what each party was given: scripts that ask for it mean that. MXNet's own
    rule is `dcasgd-mxnet`, for parity, and has to be asked for by that name. Weights of fp16 always have an fp32
    master on the servers, whatever `multi_precision` says. Raises InvalidSettings for any other class, also a subclass
    (its `update` would not run), and for what cannot travel: multipliers of single parameters, a first update other
    than 0.
    """
    kind = type(optimizer)
    if kind.__module__ != _MODULE or kind.__name__ not in _OWN:
        raise InvalidSettings(
            f"the optimizer {kind.__name__} cannot run on the servers",
            f"use one of {', '.join(_OWN)} itself, or update on the workers",
        )
    if optimizer.begin_num_update:
        raise InvalidSettings("begin_num_update cannot travel to the servers", "they count updates from 0")
    _refuse_multipliers(optimizer)
    params: dict[str, float | bool] = {"learning_rate": float(optimizer.learning_rate)}
    for name, attribute in {**_COMMON, **_OWN[kind.__name__]}.items():
        value = getattr(optimizer, attribute)
        if value is not None:
            params[name] = value if isinstance(value, bool) else float(value)
    if not all(math.isfinite(value) for value in params.values()):
        raise InvalidSettings(f"a hyper-parameter of {kind.__name__} is not finite: {params}")
    return kind.__name__.lower(), params


def take_up(optimizer: Any, params: Mapping[str, float | bool], counts: Mapping[int | str, int]) -> None:
    """Give an optimizer the hyper-parameters that `from_mxnet` made of another, and its numbers of updates by key.

    The learning rate comes from the numbers where there is a schedule.
    """
    for name, attribute in {**_COMMON, **_OWN[type(optimizer).__name__]}.items():
        if name in params:
            setattr(optimizer, attribute, params[name] or None if name.startswith("clip_") else params[name])
    if optimizer.lr_scheduler is None:
        optimizer.set_learning_rate(params["learning_rate"])
    optimizer._index_update_count.update(counts)
    optimizer.num_update = max([optimizer.num_update, *counts.values()])


def _refuse_multipliers(optimizer: Any) -> None:
    rates = [*optimizer.lr_mult.values(), *(item.lr_mult for item in optimizer.param_dict.values())]
    decays = [*optimizer.wd_mult.values(), *(item.wd_mult for item in optimizer.param_dict.values())]
    if any(rate != 1 for rate in rates) or (optimizer.wd and any(decay != 1 for decay in decays)):
        raise InvalidSettings(
            "multipliers of learning rate or weight decay of single parameters cannot travel to the servers",
            "leave lr_mult and wd_mult at 1, or update on the workers",
        )
