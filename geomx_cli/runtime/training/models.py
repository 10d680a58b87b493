"""The networks of the bundled training job: their tensors, their initial weights, and the MXNet block.

Shapes and initial weights come from numpy, so that the master worker, which only hands them to the global
servers, needs no training framework, and no framework's random numbers decide where a job starts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from geomx_cli.errors import InvalidSettings

__all__ = ["Parameter", "build", "initial_statistics", "initial_weights", "parameters", "statistics"]


@dataclass(frozen=True)
class Parameter:
    """One tensor of a network, float32. Weights are laid out as MXNet has them: outputs first."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def _cnn(*, normalised: bool) -> tuple[Parameter, ...]:
    """28 x 28 images: two convolutions of 5 x 5 without padding, each halved by pooling, leave 32 channels of 4 x 4."""
    table = []
    for number, (channels, inputs) in enumerate(((16, 1), (32, 16)), 1):
        table += [Parameter(f"conv{number}.weight", (channels, inputs, 5, 5))]
        table += [Parameter(f"conv{number}.bias", (channels,))]
        if normalised:
            table += [Parameter(f"norm{number}.{what}", (channels,)) for what in ("gamma", "beta")]
    for number, (outputs, inputs) in enumerate(((256, 512), (128, 256), (10, 128)), 1):
        table += [Parameter(f"dense{number}.weight", (outputs, inputs)), Parameter(f"dense{number}.bias", (outputs,))]
    return tuple(table)


_NETWORKS: Mapping[str, tuple[Parameter, ...]] = {"cnn": _cnn(normalised=False), "cnn-bn": _cnn(normalised=True)}


def parameters(network: str) -> tuple[Parameter, ...]:
    """The tensors of a network, from the input to the output. Raises InvalidSettings for an unknown one."""
    if network not in _NETWORKS:
        raise InvalidSettings(f"there is no network {network!r}", f"choose one of {', '.join(_NETWORKS)}")
    return _NETWORKS[network]


def statistics(network: str) -> tuple[Parameter, ...]:
    """The running means and variances of a network's batch normalisation, in the order of its layers."""
    norms = [item for item in parameters(network) if item.name.endswith(".gamma")]
    return tuple(
        Parameter(item.name.replace("gamma", what), item.shape) for item in norms for what in ("mean", "variance")
    )


def initial_statistics(network: str) -> dict[str, npt.NDArray[np.float32]]:
    """Means of 0 and variances of 1."""
    start = {"mean": 0.0, "variance": 1.0}
    return {
        item.name: np.full(item.shape, start[item.name.rpartition(".")[2]], np.float32) for item in statistics(network)
    }


def initial_weights(network: str, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Weights to start from, the same for the same seed in every process; biases are zero, scales are one.

    Uniform in ±sqrt(6 / fan in), which keeps the variance through ReLUs: He, Zhang, Ren and Sun, "Delving
    deep into rectifiers", ICCV 2015, equation 10.
    """
    random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed)))
    weights = {}
    for parameter in parameters(network):
        shape = parameter.shape
        if len(shape) == 1:
            weights[parameter.name] = np.full(shape, float(parameter.name.endswith(".gamma")), np.float32)
            continue
        bound = math.sqrt(6 / math.prod(shape[1:]))
        weights[parameter.name] = random.uniform(-bound, bound, shape).astype(np.float32)
    return weights


def build(mx: Any, network: str) -> tuple[Any, list[Any], list[Any]]:
    """The MXNet block of a network, hybridised, and its gluon parameters in the orders of `parameters` and of
    `statistics`; what is trained is zero.

    `mx` is the module mxnet. The block takes float32 of shape (b, 1, 28, 28) and gives logits of shape (b,
    10).
    """
    table, nn = parameters(network), mx.gluon.nn
    shapes = [parameter.shape for parameter in table if parameter.name.endswith(".weight")]
    normalised = any(parameter.name.endswith(".gamma") for parameter in table)
    block, trained, running = nn.HybridSequential(), [], []
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
    return block, trained, running
