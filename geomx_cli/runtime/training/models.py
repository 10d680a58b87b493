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

__all__ = ["Parameter", "build", "initial_weights", "parameters"]


@dataclass(frozen=True)
class Parameter:
    """One tensor of a network, float32. Weights are laid out as MXNet has them: outputs first."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


# 28 x 28 images: two convolutions of 5 x 5 without padding, each halved by pooling, leave 32 channels of 4 x
# 4.
_NETWORKS: Mapping[str, tuple[Parameter, ...]] = {
    "cnn": (
        Parameter("conv1.weight", (16, 1, 5, 5)),
        Parameter("conv1.bias", (16,)),
        Parameter("conv2.weight", (32, 16, 5, 5)),
        Parameter("conv2.bias", (32,)),
        Parameter("dense1.weight", (256, 512)),
        Parameter("dense1.bias", (256,)),
        Parameter("dense2.weight", (128, 256)),
        Parameter("dense2.bias", (128,)),
        Parameter("dense3.weight", (10, 128)),
        Parameter("dense3.bias", (10,)),
    )
}


def parameters(network: str) -> tuple[Parameter, ...]:
    """The tensors of a network, from the input to the output. Raises InvalidSettings for an unknown one."""
    if network not in _NETWORKS:
        raise InvalidSettings(f"there is no network {network!r}", f"choose one of {', '.join(_NETWORKS)}")
    return _NETWORKS[network]


def initial_weights(network: str, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Weights to start from, the same for the same seed in every process; biases are zero.

    Uniform in ±sqrt(6 / fan in), which keeps the variance through ReLUs: He, Zhang, Ren and Sun, "Delving
    deep into rectifiers", ICCV 2015, equation 10.
    """
    random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed)))
    weights = {}
    for parameter in parameters(network):
        shape = parameter.shape
        if len(shape) == 1:
            weights[parameter.name] = np.zeros(shape, np.float32)
            continue
        bound = math.sqrt(6 / math.prod(shape[1:]))
        weights[parameter.name] = random.uniform(-bound, bound, shape).astype(np.float32)
    return weights


def build(mx: Any, network: str) -> tuple[Any, list[Any]]:
    """The MXNet block of a network, hybridised, and its gluon parameters in the order of `parameters`, all
    zero.

    `mx` is the module mxnet. The block takes float32 of shape (b, 1, 28, 28) and gives logits of shape (b,
    10).
    """
    table, nn = parameters(network), mx.gluon.nn
    shapes = [parameter.shape for parameter in table if parameter.name.endswith(".weight")]
    convolutions = [shape for shape in shapes if len(shape) == 4]
    dense = [shape for shape in shapes if len(shape) == 2]
    block, layers = nn.HybridSequential(), []
    for channels, inputs, *kernel in convolutions:
        layers.append(nn.Conv2D(channels, tuple(kernel), in_channels=inputs, activation="relu"))
        block.add(layers[-1], nn.MaxPool2D(2, 2))
    block.add(nn.Flatten())
    for index, (outputs, inputs) in enumerate(dense):
        activation = None if index == len(dense) - 1 else "relu"
        layers.append(nn.Dense(outputs, in_units=inputs, activation=activation))
        block.add(layers[-1])
    block.initialize(mx.init.Zero())
    block.hybridize(static_alloc=True, static_shape=True)
    return block, [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
