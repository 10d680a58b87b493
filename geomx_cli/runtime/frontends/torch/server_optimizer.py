"""A torch.optim optimizer as one that the global servers run: name and hyper-parameters."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from geomx_cli.core.errors import InvalidSettings

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client

__all__ = ["ServersOptimizer", "check_no_state", "hyper_parameters", "index_of_group", "server_optimizer"]

Hyper = dict[str, float]


def _sgd(group: Mapping[str, Any]) -> tuple[str, Hyper]:
    names = {"momentum": "momentum", "dampening": "dampening", "nesterov": "nesterov", "weight_decay": "wd"}
    return "torch-sgd", {name: group[key] for key, name in names.items()}


def _adam(group: Mapping[str, Any]) -> tuple[str, Hyper]:
    if group["weight_decay"] and not group.get("decoupled_weight_decay"):
        hint = "use torch.optim.AdamW, or weight_decay=0"
        raise InvalidSettings("the global servers have no Adam with weight_decay as a part of the gradient", hint)
    return _adamw(group)


def _adamw(group: Mapping[str, Any]) -> tuple[str, Hyper]:
    if group["amsgrad"]:
        raise InvalidSettings("the global servers have no Adam with amsgrad", "use amsgrad=False")
    beta1, beta2 = group["betas"]
    return "adamw", {"wd": group["weight_decay"], "beta1": beta1, "beta2": beta2, "epsilon": group["eps"]}


_KINDS: Mapping[type, Callable[[Mapping[str, Any]], tuple[str, Hyper]]] = {
    torch.optim.SGD: _sgd, torch.optim.Adam: _adam, torch.optim.AdamW: _adamw,
}  # fmt: skip
_HINT = "use SGD, Adam or AdamW of torch.optim, or an algorithm whose workers run the optimizer, as --algo hfa"


def server_optimizer(optimizer: Any) -> tuple[str, dict[str, float | bool]]:
    """Return its name (see ps/optim/optimizers.py) and the hyper-parameters of its first group.

    Raises InvalidSettings for an optimizer that the servers do not compute alike.
    """
    kind = type(optimizer)
    if kind not in _KINDS:
        raise InvalidSettings(f"the global servers cannot run {kind.__name__}", _HINT)
    check_no_state(optimizer)
    for group in optimizer.param_groups:
        for setting in ("maximize", "fused", "differentiable"):
            if group.get(setting):
                raise InvalidSettings(f"the global servers cannot run {kind.__name__} with {setting}=True", _HINT)
        if group.get("nesterov") != optimizer.param_groups[0].get("nesterov"):
            raise InvalidSettings("the groups differ in nesterov", "use the same in all")
    name, params = _KINDS[kind](optimizer.param_groups[0])
    return name, {"learning_rate": float(optimizer.param_groups[0]["lr"]), **params}


def check_no_state(optimizer: Any) -> None:
    """Raise InvalidSettings for an optimizer that has state: that of the servers starts without."""
    if optimizer.state:
        what = f"this {type(optimizer).__name__} has state, and the global servers, which hold its state, have none"
        raise InvalidSettings(what, "create it anew, or train with an algorithm whose workers run the optimizer")


class ServersOptimizer:
    """The one optimizer of the global servers, for all optimizers that a script wraps. Each key's pushes carry the
    numbers of its own group, so these differ only in numbers.
    """

    def __init__(self) -> None:
        self._kind: dict[str, Any] = {}

    def take(self, client: "Client", optimizer: Any) -> None:
        """Have the servers run an optimizer like this. Raises InvalidSettings as `server_optimizer`, and if they run
        another kind already.
        """
        name, params = server_optimizer(optimizer)
        kind = {"name": name, **{key: value for key, value in params.items() if isinstance(value, bool)}}
        if self._kind and kind != self._kind:
            what = f"a second optimizer of another kind with --algo {client.settings.text('algo')}: the global servers"
            hint = "use the same class and the same nesterov for all, or an algorithm whose workers run the optimizer"
            raise InvalidSettings(f"{what} run one, here {_of_kind(self._kind)}, and not {_of_kind(kind)}", hint)
        if not self._kind and client.global_rank == 0:
            client.control.set_optimizer(name, params)
        self._kind = kind


def _of_kind(kind: Mapping[str, Any]) -> str:
    name, *switches = kind.items()
    return " with ".join([str(name[1]), *(f"{key}={value}" for key, value in switches)])


def hyper_parameters(optimizer: Any, group: Mapping[str, Any]) -> Hyper:
    """Return a group's current hyper-parameters, which contributions carry."""
    _, params = _KINDS[type(optimizer)](group)
    numbers = {name: float(value) for name, value in params.items() if not isinstance(value, bool)}
    return {"learning_rate": float(group["lr"]), **numbers}


def index_of_group(optimizer: Any, parameter: Any) -> int:
    """Return the index of the group that has a parameter; `load_state_dict` replaces the groups themselves."""
    return next(
        index
        for index, group in enumerate(optimizer.param_groups)
        if any(item is parameter for item in group["params"])
    )
