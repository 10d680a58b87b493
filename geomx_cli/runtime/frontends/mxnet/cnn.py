"""The small network `cnn`, and `cnn-bn`, the same with batch normalization."""

from typing import TYPE_CHECKING, Any

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.training.architecture import Parameter, Shape
from geomx_cli.runtime.training.network import Network

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from geomx_cli.runtime.frontends.mxnet.gluon_model import GluonModel

__all__ = ["network"]

CHANNELS = (16, 32)
HIDDEN = (256, 128)
KERNEL = 5


def network(shape: Shape, classes: int, *, normalised: bool) -> Network:
    """Two unpadded 5 x 5 convolutions, each followed by pooling that halves the size, then three dense layers.

    28 x 28 images yield 32 channels of 4 x 4 before the dense layers. Raises InvalidSettings for images that are too
    small.
    """
    channels, height, width = shape
    left = [_left(extent) for extent in (height, width)]
    if min(left) < 1:
        hint = "give images of 16 x 16 or larger, or choose another --network"
        raise InvalidSettings(f"the network cnn cannot take images of {height} x {width}", hint)
    layers: list[tuple[Parameter, ...]] = []
    norms: list[tuple[Parameter, ...]] = []
    for number, (outputs, inputs) in enumerate(zip(CHANNELS, (channels, *CHANNELS), strict=False), 1):
        layers += [_layer(f"conv{number}", (outputs, inputs, KERNEL, KERNEL))]
        if normalised:
            layers += [(Parameter(f"norm{number}.gamma", (outputs,), 1.0), Parameter(f"norm{number}.beta", (outputs,)))]
            norms += [
                (Parameter(f"norm{number}.mean", (outputs,)), Parameter(f"norm{number}.variance", (outputs,), 1.0))
            ]
    inputs = CHANNELS[-1] * left[0] * left[1]
    for number, outputs in enumerate((*HIDDEN, classes), 1):
        layers += [_layer(f"dense{number}", (outputs, inputs))]
        inputs = outputs
    parameters, statistics = (tuple(item for pair in pairs for item in pair) for pairs in (layers, norms))

    def build(network: Network) -> "GluonModel":
        return _build(network, [first.shape for first, _ in layers], normalised=normalised)

    return Network(shape, classes, parameters, statistics, (height, width), build, _session)


def _session(device: str, seed: int) -> "AbstractContextManager[None]":
    from geomx_cli.runtime.frontends.mxnet import gluon_model  # the master worker needs no framework

    return gluon_model.session(device, seed)


def _left(extent: int) -> int:
    for _ in CHANNELS:
        extent = (extent - KERNEL + 1) // 2
    return extent


def _layer(name: str, shape: tuple[int, ...]) -> tuple[Parameter, Parameter]:
    return Parameter(f"{name}.weight", shape, None), Parameter(f"{name}.bias", shape[:1])


def _build(network: Network, shapes: list[tuple[int, ...]], *, normalised: bool) -> "GluonModel":
    from geomx_cli.runtime.frontends.mxnet.gluon_model import Built, GluonModel
    from geomx_cli.runtime.frontends.mxnet.load import load_mxnet

    mx = load_mxnet()
    nn = mx.gluon.nn
    block: Any = nn.HybridSequential()
    trained: list[Any] = []
    running: list[Any] = []
    for channels, inputs, *kernel in (shape for shape in shapes if len(shape) == 4):
        layer = nn.Conv2D(channels, tuple(kernel), in_channels=inputs)
        block.add(layer)
        trained += [layer.weight, layer.bias]
        if normalised:
            norm = nn.BatchNorm(in_channels=channels)
            block.add(norm)
            trained += [norm.gamma, norm.beta]
            running += [norm.running_mean, norm.running_var]
        block.add(nn.Activation("relu"), nn.MaxPool2D(2, 2))
    block.add(nn.Flatten())
    dense = [shape for shape in shapes if len(shape) == 2]
    for index, (outputs, inputs) in enumerate(dense):
        activation = None if index == len(dense) - 1 else "relu"
        layer = nn.Dense(outputs, in_units=inputs, activation=activation)
        block.add(layer)
        trained += [layer.weight, layer.bias]
    block.initialize(mx.init.Zero())
    block.hybridize(static_alloc=True, static_shape=True)
    return GluonModel(network, Built(block, trained, running))
