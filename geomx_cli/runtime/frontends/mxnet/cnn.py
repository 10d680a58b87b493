"""The small network `cnn`, and `cnn-bn`, the same with batch normalization."""

from typing import TYPE_CHECKING, Any

from geomx_cli.runtime.training.architecture import Shape, cnn
from geomx_cli.runtime.training.network import Network

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from geomx_cli.runtime.frontends.mxnet.gluon_model import GluonModel

__all__ = ["network"]


def network(shape: Shape, classes: int, *, normalised: bool) -> Network:
    """See training/cnn.py."""
    found = cnn(shape, classes, normalised=normalised)
    return Network(shape, classes, found.parameters, found.statistics, found.resized, _build, _session)


def _session(device: str, seed: int) -> "AbstractContextManager[None]":
    from geomx_cli.runtime.frontends.mxnet import gluon_model  # the master worker needs no framework

    return gluon_model.session(device, seed)


def _build(network: Network) -> "GluonModel":
    from geomx_cli.runtime.frontends.mxnet.gluon_model import Built, GluonModel
    from geomx_cli.runtime.frontends.mxnet.load import load_mxnet

    mx = load_mxnet()
    nn = mx.gluon.nn
    block: Any = nn.HybridSequential()
    trained: list[Any] = []
    running: list[Any] = []
    shapes = [parameter.shape for parameter in network.parameters]
    for channels, inputs, *kernel in (shape for shape in shapes if len(shape) == 4):
        layer = nn.Conv2D(channels, tuple(kernel), in_channels=inputs)
        block.add(layer)
        trained += [layer.weight, layer.bias]
        if network.statistics:
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
