"""A network's architecture, independent of the framework: its tensors and their initial values."""

import math
from dataclasses import dataclass

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Floats

__all__ = ["Architecture", "HEAD", "Parameter", "Shape", "cnn", "gpt"]

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Parameter:
    """A float32 tensor of a network. Weights have MXNet's layout: outputs first.

    start: the initial value of all elements; None for weights, which are random.
    deviation: the standard deviation of weights with a normal distribution; 0 for the uniform one of `initial_weights`.
    """

    name: str
    shape: tuple[int, ...]
    start: float | None = 0.0
    deviation: float = 0.0

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Architecture:
    """The architecture of a network for a given image shape and number of classes.

    parameters: trained tensors, from the input to the output.
    statistics: running means and variances of its batch normalization.
    resized: height and width to which it resizes images.
    """

    shape: Shape
    classes: int
    parameters: tuple[Parameter, ...]
    statistics: tuple[Parameter, ...]
    resized: tuple[int, int]

    def initial_weights(self, seed: int) -> dict[str, Floats]:
        """Return initial weights, the same for the same seed in every process; biases are zero, scales are one.

        Unless they have a `deviation`, uniform in ±sqrt(6 / fan in), which preserves the variance through ReLUs: He,
        Zhang, Ren and Sun, "Delving deep into rectifiers", ICCV 2015, equation 10.
        """
        random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed)))
        weights = {}
        for item in self.parameters:
            if item.start is not None:
                weights[item.name] = np.full(item.shape, item.start, np.float32)
                continue
            if item.deviation:
                weights[item.name] = random.normal(0, item.deviation, item.shape).astype(np.float32)
                continue
            bound = math.sqrt(6 / math.prod(item.shape[1:]))
            weights[item.name] = random.uniform(-bound, bound, item.shape).astype(np.float32)
        return weights

    def initial_statistics(self) -> dict[str, Floats]:
        """Return means of 0 and variances of 1."""
        return {item.name: np.full(item.shape, item.start, np.float32) for item in self.statistics}


# The architecture of the small network `cnn`, and of `cnn-bn`, the same with batch normalization.

CHANNELS = (16, 32)
HIDDEN = (256, 128)
KERNEL = 5


def cnn(shape: Shape, classes: int, *, normalised: bool) -> Architecture:
    """Two unpadded 5 x 5 convolutions, each followed by ReLU and pooling that halves the size, then three dense layers.

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
    return Architecture(shape, classes, parameters, statistics, (height, width))


def _left(extent: int) -> int:
    for _ in CHANNELS:
        extent = (extent - KERNEL + 1) // 2
    return extent


def _layer(name: str, shape: tuple[int, ...]) -> tuple[Parameter, Parameter]:
    return Parameter(f"{name}.weight", shape, None), Parameter(f"{name}.bias", shape[:1])


# The architecture of the network `gpt`: a small GPT-2 over characters.

HEAD = 64
"""Width of an attention head."""
_DEVIATION = 0.02


def gpt(shape: Shape, classes: int, layers: int, width: int) -> Architecture:
    """A decoder of `layers` blocks, each of causal self-attention and an MLP of four times the width, both after layer
    normalization; learned positions; the embedding also makes the scores. shape: (1, 1, context).

    Radford et al., "Language models are unsupervised multitask learners", 2019: weights are normal with a standard
    deviation of 0.02, and of 0.02 / sqrt(2 layers) where a block adds to the residual. Without dropout.
    Raises InvalidSettings for a width that heads of 64 cannot share.
    """
    if width % HEAD:
        hint = f"write {-(-width // HEAD) * HEAD}: each attention head has {HEAD}"
        raise InvalidSettings(f"--width {width} is no multiple of {HEAD}", hint)
    found = [
        Parameter("embedding.weight", (classes, width), None, _DEVIATION),
        Parameter("positions.weight", (shape[2], width), None, _DEVIATION),
    ]
    last = _DEVIATION / math.sqrt(2 * layers)
    for number in range(1, layers + 1):
        block = f"block{number}"
        found += [
            *_norm(f"{block}.norm1", width),
            *_gpt_layer(f"{block}.attention", (3 * width, width), _DEVIATION),
            *_gpt_layer(f"{block}.projection", (width, width), last),
            *_norm(f"{block}.norm2", width),
            *_gpt_layer(f"{block}.dense1", (4 * width, width), _DEVIATION),
            *_gpt_layer(f"{block}.dense2", (width, 4 * width), last),
        ]
    return Architecture(shape, classes, (*found, *_norm("norm", width)), (), (1, shape[2]))


def _norm(name: str, width: int) -> tuple[Parameter, Parameter]:
    return Parameter(f"{name}.gamma", (width,), 1.0), Parameter(f"{name}.beta", (width,))


def _gpt_layer(name: str, shape: tuple[int, int], deviation: float) -> tuple[Parameter, Parameter]:
    return Parameter(f"{name}.weight", shape, None, deviation), Parameter(f"{name}.bias", shape[:1])
