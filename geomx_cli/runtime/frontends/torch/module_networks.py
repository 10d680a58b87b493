"""Networks that are PyTorch modules: `resnet18-v1`, and a user's own."""

from collections.abc import Callable
from typing import Any

import torch

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.resnet import resnet18
from geomx_cli.runtime.frontends.torch.torch_model import TorchModel, running_statistics, session
from geomx_cli.runtime.training.architecture import Parameter, Shape
from geomx_cli.runtime.training.model import Network
from geomx_cli.runtime.user_module import new_each_time

__all__ = ["network"]


def network(name: str, shape: Shape, classes: int) -> Network:
    """Return resnet18-v1 or the one from MODULE:FUNCTION. Raises InvalidSettings for unsupported images."""
    if name == "resnet18-v1":
        return _network(lambda: resnet18(shape[0], classes), shape, classes, name)
    new_module = new_each_time(name, "--network", "module")

    def make() -> Any:
        module = new_module(classes)
        if not isinstance(module, torch.nn.Module):
            what = f"it returned {type(module).__name__}, no torch.nn.Module"
            raise InvalidSettings(f"--network {name}: {what}", "return a module such as torch.nn.Sequential")
        return module

    return _network(make, shape, classes, name)


def _network(make: Callable[[], Any], shape: Shape, classes: int, name: str) -> Network:
    module = make()
    try:
        with torch.no_grad():
            scores = tuple(module.eval()(torch.zeros(1, *shape)).shape)
    except Exception as error:  # any error of a module on images it was not designed for
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        hint = "choose another --network or --data"
        raise InvalidSettings(f"the network {name} cannot take images of shape {shape}: {reason}", hint) from None
    if scores != (1, classes):
        hint = f"let it end in a dense layer of {classes}, as many as it is called with"
        raise InvalidSettings(f"the network {name} makes {scores} of one image, not (1, {classes})", hint)
    norms = {key for key, item in module.named_modules() if isinstance(item, torch.nn.modules.batchnorm._BatchNorm)}
    return Network(
        shape, classes,
        tuple(_parameter(key, item.shape, norms) for key, item in module.named_parameters()),
        tuple(_parameter(key, item.shape, norms) for key, item in running_statistics(module).items()),
        shape[1:], lambda network: TorchModel(network, make()), session,
    )  # fmt: skip


def _parameter(key: str, shape: tuple[int, ...], norms: set[str]) -> Parameter:
    """Named as in MXNet: the scale and shift of batch normalization are gamma and beta."""
    module, _, kind = key.rpartition(".")
    if module in norms:
        kind = {"weight": "gamma", "bias": "beta"}.get(kind, kind)
        key = f"{module}.{kind}"
    start = None if len(shape) > 1 else float(kind in ("gamma", "running_var"))
    return Parameter(key, tuple(shape), start)
