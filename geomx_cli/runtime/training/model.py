"""One copy of a network with its weights and gradients, whatever framework computes it."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import SupportsFloat

import numpy as np
import numpy.typing as npt

from geomx_cli.runtime.training.architecture import Architecture
from geomx_cli.runtime.training.samples import Batch

__all__ = ["ModelAdapter", "flat_views"]

Floats = npt.NDArray[np.float32]


def flat_views(vector: Floats, sizes: Sequence[int]) -> list[Floats]:
    """The parts of these sizes of a 1-D array, one after the other; they share its memory."""
    return np.split(vector, np.cumsum(sizes)[:-1])


class ModelAdapter(ABC):
    """What algorithms and the training loop need of a model; a framework's own class derives from it.

    Tensors cross as numpy arrays of float32: all of a model's as one vector, of shape (n,), in the order of `names`, or
    a single one by its index, as 1-D. Weights start at zero. A framework may compute behind its back: a method that
    does not return values may return before the work is done, and later calls see its effect.
    For the training thread only.

    names: the trained tensors, from the input to the output. sizes: their elements.
    """

    def __init__(self, network: Architecture) -> None:
        self.network = network
        self.names = tuple(parameter.name for parameter in network.parameters)
        self.sizes = tuple(parameter.size for parameter in network.parameters)

    @property
    def size(self) -> int:
        """Elements of all trained tensors."""
        return sum(self.sizes)

    def warm_up(self, samples: int) -> None:  # noqa: B027 - not all frameworks need to
        """Make ready for batches of so many samples, where the first step would take longer than others."""

    @abstractmethod
    def forward_backward(self, batch: Batch, scale: float) -> SupportsFloat:
        """Both passes: gradients become `scale` times those of the batch's mean loss, which is returned."""

    @abstractmethod
    def wait_for_gradients(self) -> None:
        """Return when the backward pass is done."""

    @abstractmethod
    def read_gradient(self, index: int, out: Floats) -> None:
        """Copy one tensor's gradient; waits for that one only."""

    @abstractmethod
    def read_weights(self, out: Floats) -> None:
        """Copy all weights."""

    @abstractmethod
    def write_weights(self, vector: Floats) -> None:
        """Set all weights; `vector` may change as soon as this returns."""

    @abstractmethod
    def write_weight(self, index: int, value: Floats) -> None:
        """Set the weights of one tensor; `value` may change as soon as this returns."""

    def read_statistics(self) -> dict[str, Floats]:
        """Copies of the running means and variances of batch normalisation, which no gradient changes, by name."""
        return {}

    def write_statistics(self, values: Mapping[str, Floats]) -> None:  # noqa: B027 - not all networks have them
        """Set them."""

    @abstractmethod
    def count_correct(self, batch: Batch) -> int:
        """How many of the batch's samples the network classifies rightly."""

    def named_weights(self) -> dict[str, Floats]:
        """A copy of each trained tensor, in its shape, by name."""
        vector = np.empty(self.size, np.float32)
        self.read_weights(vector)
        parts = zip(self.network.parameters, flat_views(vector, self.sizes), strict=True)
        return {parameter.name: part.reshape(parameter.shape) for parameter, part in parts}

    def copy_weights_from(self, other: "ModelAdapter") -> None:
        """Set weights and statistics to what the other's are now."""
        vector = np.empty(self.size, np.float32)
        other.read_weights(vector)
        self.write_weights(vector)
        self.write_statistics(other.read_statistics())

    def digest(self) -> str:
        """SHA-256, in hexadecimal, over the names and bytes of all weights: equal only if every bit is."""
        digest = hashlib.sha256()
        for name, weight in self.named_weights().items():
            digest.update(name.encode())
            digest.update(weight.tobytes())
        return digest.hexdigest()
