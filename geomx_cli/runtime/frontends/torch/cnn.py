"""The networks `cnn` and `cnn-bn`, with the tensors of MXNet's."""

from typing import TYPE_CHECKING, Any

from geomx_cli.runtime.frontends.torch.load import load_torch
from geomx_cli.runtime.training.architecture import Shape, cnn
from geomx_cli.runtime.training.model import Network

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from geomx_cli.runtime.frontends.torch.torch_model import TorchModel

__all__ = ["network"]


def network(shape: Shape, classes: int, *, normalised: bool) -> Network:
    """See training/cnn.py."""
    found = cnn(shape, classes, normalised=normalised)
    return Network(shape, classes, found.parameters, found.statistics, found.resized, _build, _session)


def _session(device: str, seed: int) -> "AbstractContextManager[None]":
    load_torch()  # the master worker needs no framework
    from geomx_cli.runtime.frontends.torch import torch_model

    return torch_model.session(device, seed)


def _build(network: Network) -> "TorchModel":
    nn = load_torch().nn
    from geomx_cli.runtime.frontends.torch.torch_model import TorchModel

    shapes = [parameter.shape for parameter in network.parameters]
    layers: list[Any] = []
    for channels, inputs, *kernel in (shape for shape in shapes if len(shape) == 4):
        layers += [nn.Conv2d(inputs, channels, tuple(kernel))]
        layers += [nn.BatchNorm2d(channels)] if network.statistics else []
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten()]
    for outputs, inputs in (shape for shape in shapes if len(shape) == 2):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return TorchModel(network, nn.Sequential(*layers[:-1]))
