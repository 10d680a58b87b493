"""One copy of a network with its weights and gradients, independent of the framework."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, SupportsFloat

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Floats
from geomx_cli.runtime.training.architecture import Architecture
from geomx_cli.runtime.training.flat_views import flat_views
from geomx_cli.runtime.training.local_steps import LocalSteps, OptimizerSteps
from geomx_cli.runtime.training.samples import Batch

if TYPE_CHECKING:
    from geomx_cli.ps.operation_queue import PendingExchange
    from geomx_cli.runtime.training.train_config import TrainConfig

__all__ = ["ModelAdapter", "ModelWeights"]


class ModelWeights(ABC):
    """The interface of a model for algorithms: its weights, and the steps between two exchanges of them.

    Tensors are passed as float32 numpy arrays: all of a model's as one vector, of shape (n,), in the order of `names`,
    or a single one by its index, as 1-D. A framework may compute asynchronously: a method that does not return values
    may return before the work is done, and later calls see its effect. For the training thread only.

    names: the keys of the trained tensors, from the input to the output. sizes: their numbers of elements.
    """

    def __init__(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        self.names, self.sizes = tuple(names), tuple(sizes)

    @property
    def size(self) -> int:
        """Number of elements of all trained tensors."""
        return sum(self.sizes)

    @abstractmethod
    def local_steps(self, config: "TrainConfig") -> LocalSteps:
        """Return the steps of this worker's own optimizer."""

    @abstractmethod
    def read_weights(self, out: Floats) -> None:
        """Copy all weights."""

    @abstractmethod
    def write_weights(self, vector: Floats) -> None:
        """Set all weights; `vector` may be modified once this returns."""

    @abstractmethod
    def write_weight(self, index: int, value: Floats) -> None:
        """Set the weights of one tensor; `value` may be modified once this returns."""

    def write_late(self, index: int, result: "PendingExchange") -> None:
        """Set the weights of one tensor to an exchange's result once it has come. May return before, if what uses the
        weights waits; raises the job's failure, or lets that raise it. This one waits.
        """
        result.done.result()
        value = np.empty(self.sizes[index], np.float32)
        result.copy_to(value)
        self.write_weight(index, value)

    @abstractmethod
    def read_gradient(self, index: int, out: Floats) -> None:
        """Copy one tensor's gradient; waits for that one only."""

    def read_statistics(self) -> dict[str, Floats]:
        """Return copies of the running means and variances of batch normalization, which have no gradients, by name."""
        return {}

    def write_statistics(self, values: Mapping[str, Floats]) -> None:  # noqa: B027 - not all networks have them
        """Set the running means and variances."""


class ModelAdapter(ModelWeights):
    """The interface of a model for the bundled training loop; each framework derives a class from it. Weights start at
    zero.
    """

    def __init__(self, network: Architecture) -> None:
        super().__init__([item.name for item in network.parameters], [item.size for item in network.parameters])
        self.network = network

    def local_steps(self, config: "TrainConfig") -> LocalSteps:
        """See ModelWeights: those of the servers' implementation of the optimizer."""
        return OptimizerSteps(self, config)

    def warm_up(self, samples: int) -> None:
        """Prepare for batches of `samples` samples, if the first step would take longer than others."""

    @abstractmethod
    def forward_backward(self, batch: Batch, scale: float) -> SupportsFloat:
        """Run both passes: gradients become `scale` times those of the batch's mean loss, which is returned."""

    @abstractmethod
    def wait_for_gradients(self) -> None:
        """Wait for the backward pass."""

    @abstractmethod
    def count_correct(self, batch: Batch) -> int:
        """Return the number of the batch's samples that are classified correctly."""

    def mean_loss(self, batch: Batch) -> float:
        """Return the mean loss of a batch, without training on it. Raises InvalidSettings for networks of images."""
        raise InvalidSettings(f"{type(self).__name__} is not evaluated by its loss", "train a text with --network gpt")

    def named_weights(self) -> dict[str, Floats]:
        """Return a copy of each trained tensor, in its shape, by name."""
        vector = np.empty(self.size, np.float32)
        self.read_weights(vector)
        parts = zip(self.network.parameters, flat_views(vector, self.sizes), strict=True)
        return {parameter.name: part.reshape(parameter.shape) for parameter, part in parts}

    def copy_weights_from(self, other: "ModelAdapter") -> None:
        """Copy the other model's current weights and statistics."""
        vector = np.empty(self.size, np.float32)
        other.read_weights(vector)
        self.write_weights(vector)
        self.write_statistics(other.read_statistics())

    def digest(self) -> str:
        """Return the hexadecimal SHA-256 over the names and bytes of all weights: equal only if bit-identical."""
        digest = hashlib.sha256()
        for name, weight in self.named_weights().items():
            digest.update(name.encode())
            digest.update(weight.tobytes())
        return digest.hexdigest()
