"""What a network consists of, whatever framework computes it: its tensors, and what they start from."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Architecture", "Parameter", "Shape"]

Floats = npt.NDArray[np.float32]
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Parameter:
    """One tensor of a network, float32. Weights are laid out as MXNet has them: outputs first.

    start: the value of all its elements at first; None for weights, which are random.
    """

    name: str
    shape: tuple[int, ...]
    start: float | None = 0.0

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Architecture:
    """That of a network for images of one shape and so many classes.

    parameters: what is trained, from the input to the output; statistics: the running means and variances of its batch
    normalisation. resized: height and width to which it enlarges images.
    """

    shape: Shape
    classes: int
    parameters: tuple[Parameter, ...]
    statistics: tuple[Parameter, ...]
    resized: tuple[int, int]

    def initial_weights(self, seed: int) -> dict[str, Floats]:
        """Weights to start from, the same for the same seed in every process; biases are zero, scales are one.

        Uniform in ±sqrt(6 / fan in), which keeps the variance through ReLUs: He, Zhang, Ren and Sun, "Delving
        deep into rectifiers", ICCV 2015, equation 10.
        """
        random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed)))
        weights = {}
        for item in self.parameters:
            if item.start is not None:
                weights[item.name] = np.full(item.shape, item.start, np.float32)
                continue
            bound = math.sqrt(6 / math.prod(item.shape[1:]))
            weights[item.name] = random.uniform(-bound, bound, item.shape).astype(np.float32)
        return weights

    def initial_statistics(self) -> dict[str, Floats]:
        """Means of 0 and variances of 1."""
        return {item.name: np.full(item.shape, item.start, np.float32) for item in self.statistics}
