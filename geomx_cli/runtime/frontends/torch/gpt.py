"""The network `gpt`; see training/gpt.py."""

from typing import TYPE_CHECKING, Any

from geomx_cli.runtime.frontends.torch.load import load_torch
from geomx_cli.runtime.training.architecture import Shape, gpt
from geomx_cli.runtime.training.model import Network

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from geomx_cli.runtime.frontends.torch.torch_model import TorchModel

__all__ = ["network"]


def network(shape: Shape, classes: int, layers: int, width: int) -> Network:
    """See training/gpt.py."""
    found = gpt(shape, classes, layers, width)
    return Network(shape, classes, found.parameters, found.statistics, found.resized, _build, _session)


def _session(device: str, seed: int) -> "AbstractContextManager[None]":
    load_torch()  # the master worker needs no framework
    from geomx_cli.runtime.frontends.torch import torch_model

    return torch_model.session(device, seed)


def _build(network: Network) -> "TorchModel":
    load_torch()
    from geomx_cli.runtime.frontends.torch import gpt_module
    from geomx_cli.runtime.frontends.torch.torch_model import TorchModel

    classes, width = network.parameters[0].shape
    layers = sum(parameter.name.endswith("attention.weight") for parameter in network.parameters)
    module: Any = gpt_module.Gpt(classes, network.shape[2], layers, width)
    return TorchModel(network, module)
