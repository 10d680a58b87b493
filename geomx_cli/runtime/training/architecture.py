"""A network's architecture, independent of the framework: its tensors and their initial values."""

import math
from dataclasses import dataclass

import numpy as np

from geomx_cli.ps.arrays import Floats

__all__ = ["Architecture", "Parameter", "Shape"]

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Parameter:
    """A float32 tensor of a network. Weights have MXNet's layout: outputs first.

    start: the initial value of all elements; None for weights, which are random. deviation: the standard deviation of
    weights with a normal distribution; 0 for the uniform one of `initial_weights`.
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

    parameters: trained tensors, from the input to the output; statistics: running means and variances of its batch
    normalization. resized: height and width to which it resizes images.
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
