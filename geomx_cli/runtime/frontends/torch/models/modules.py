"""The modules of the bundled job's networks, with the same tensors as MXNet's networks, and a user's own modules."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.models.torch_model import TorchModel, running_statistics, session
from geomx_cli.runtime.plugin_factory import new_each_time
from geomx_cli.runtime.training.architecture import HEAD, Parameter, Shape
from geomx_cli.runtime.training.model import Network

__all__ = ["Gpt", "cnn", "gpt", "network"]


def network(name: str, shape: Shape, classes: int) -> Network:
    """Return resnet18-v1, or the module from MODULE:FUNCTION; see models.network."""
    if name == "resnet18-v1":
        return _network(lambda: _ResNet(shape[0], classes), shape, classes, name)
    new_module = new_each_time(name, "--network", "module")

    def make() -> Any:
        module = new_module(classes)
        if not isinstance(module, nn.Module):
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
    norms = {key for key, item in module.named_modules() if isinstance(item, nn.modules.batchnorm._BatchNorm)}
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


def cnn(network: Network) -> Any:
    """The module of `cnn` or, if the network has statistics, `cnn-bn`."""
    shapes = [parameter.shape for parameter in network.parameters]
    layers: list[Any] = []
    for channels, inputs, *kernel in (shape for shape in shapes if len(shape) == 4):
        layers += [nn.Conv2d(inputs, channels, tuple(kernel))]
        layers += [nn.BatchNorm2d(channels)] if network.statistics else []
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten()]
    for outputs, inputs in (shape for shape in shapes if len(shape) == 2):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def gpt(network: Network) -> "Gpt":
    """The module of `gpt`."""
    classes, width = network.parameters[0].shape
    layers = sum(parameter.name.endswith("attention.weight") for parameter in network.parameters)
    return Gpt(classes, network.shape[2], layers, width)


_WIDTHS = (64, 128, 256, 512)


class _ResNetBlock(nn.Module):  # type: ignore[misc, unused-ignore]
    """Two 3 x 3 convolutions, and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        else:
            self.downsample = None

    def forward(self, images: Any) -> Any:
        shortcut = images if self.downsample is None else self.downsample(images)
        return torch.relu(shortcut + self.body(images))


class _ResNet(nn.Module):  # type: ignore[misc, unused-ignore]
    """ResNet-18 in the form of gluon's model zoo, version 1, with the same names. He et al., CVPR 2016.

    Maps images of any size, float32 of shape (b, channels, height, width), to logits of shape (b, classes). Its first
    layers are the layers for ImageNet.
    """

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        layers: list[Any] = [
            nn.Conv2d(channels, _WIDTHS[0], 7, 2, 3, bias=False), nn.BatchNorm2d(_WIDTHS[0]), nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        ]  # fmt: skip
        for index, width in enumerate(_WIDTHS):
            before = _WIDTHS[max(0, index - 1)]
            layers += [nn.Sequential(_ResNetBlock(before, width, 1 + (index > 0)), _ResNetBlock(width, width, 1))]
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))
        self.output = nn.Linear(_WIDTHS[-1], classes)

    def forward(self, images: Any) -> Any:
        return self.output(self.features(images).flatten(1))


class Gpt(nn.Module):  # type: ignore[misc, unused-ignore]
    """Maps characters to scores of the next characters. Characters have the shape (b, 1, 1, context), and any dtype of
    numbers. Scores have the shape (b, classes, context). The parameters have the order of training/architecture.py.
    """

    def __init__(self, classes: int, context: int, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(_GptBlock(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, characters: Any) -> Any:
        """See the class."""
        state = self.embedding(characters.flatten(1).long()) + self.positions.weight
        for block in self.blocks:
            state = block(state)
        return functional.linear(self.norm(state), self.embedding.weight).transpose(1, 2)


class _GptBlock(nn.Module):  # type: ignore[misc, unused-ignore]
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.dense1, self.dense2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, state: Any) -> Any:
        batch, context, width = state.shape
        heads = self.attention(self.norm1(state)).view(batch, context, 3, width // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        state = state + self.projection(mixed.transpose(1, 2).reshape(batch, context, width))
        return state + self.dense2(functional.gelu(self.dense1(self.norm2(state)), approximate="tanh"))
