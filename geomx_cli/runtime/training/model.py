"""A network with its weights, gradients and local steps, as algorithms and the bundled job use it: independent of the
framework that computes.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsFloat

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Floats
from geomx_cli.ps.optim import optimizers, schedules
from geomx_cli.ps.optim.optimizer import LocalOptimizer
from geomx_cli.runtime.data.samples import Batch
from geomx_cli.runtime.training.architecture import Architecture
from geomx_cli.runtime.training.worker_algorithm import State, Stopwatch

if TYPE_CHECKING:
    from geomx_cli.ps.operation_queue import PendingExchange
    from geomx_cli.runtime.training.train_config import TrainConfig

__all__ = ["LocalSteps", "ModelAdapter", "ModelWeights", "Network", "OptimizerSteps", "flat_views", "seed_of"]


def seed_of(numbers: Sequence[int]) -> int:
    """Return a seed for a framework, of 31 bits, that depends on all of the numbers."""
    return int(np.random.SeedSequence(list(numbers)).generate_state(1)[0]) >> 1


def flat_views(vector: Floats, sizes: Sequence[int]) -> list[Floats]:
    """Return consecutive views of these sizes into a 1-D array."""
    return np.split(vector, np.cumsum(sizes)[:-1])


class LocalSteps(ABC):
    """The steps that one worker takes with its own weights. For the training thread only.

    count: steps since the owner last reset it.
    samples: those of these steps.
    optimizer: the servers' implementation that takes the steps; None if another one does.
    """

    optimizer: LocalOptimizer | None = None

    def __init__(self) -> None:
        self.count = self.samples = 0

    @property
    @abstractmethod
    def weights(self) -> Sequence[Floats]:
        """The current weights: 1-D float32 arrays in the order of the model's tensors, only for reading."""

    @abstractmethod
    def begin(self) -> None:
        """Initialize from the model's weights."""

    def state(self) -> State:
        """Return what is kept besides the model's weights; of an optimizer that is not ours, only the counts."""
        return State({"count": self.count, "samples": self.samples})

    def load(self, state: State) -> None:
        """Continue from a `state`, once the model has its weights."""
        self.begin()
        self.count, self.samples = state.values["count"], state.values["samples"]

    @abstractmethod
    def step(self, samples: int, watch: Stopwatch) -> None:
        """Update once with the model's gradients, of a batch of `samples` samples; waits for them."""

    @abstractmethod
    def put(self, index: int, value: Floats) -> Floats:
        """Replace one tensor by `value`, which may be modified once this returns; return what it now holds, which is
        `value` itself unless the tensor's dtype has rounded it.
        """


class ModelWeights(ABC):
    """The interface of a model for algorithms: its weights, and the steps between two exchanges of them.

    Tensors are passed as float32 numpy arrays: all of a model's as one vector, of shape (n,), in the order of `names`,
    or a single one by its index, as 1-D. A framework may compute asynchronously: a method that does not return values
    may return before the work is done, and later calls see its effect. For the training thread only.

    names: the keys of the trained tensors, from the input to the output.
    sizes: their numbers of elements.
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


class OptimizerSteps(LocalSteps):
    """Steps of one of the servers' optimizers, which gives the same numbers wherever it runs.

    The weights are views of one vector, as optimizers work element-wise; `step` and `put` copy them to the model.
    """

    def __init__(self, model: "ModelAdapter", config: "TrainConfig") -> None:
        super().__init__()
        self._model = model
        schedule = schedules.optional(config.schedule())
        self.optimizer: LocalOptimizer = LocalOptimizer(
            optimizers.create(config.optimizer, config.optimizer_params, schedule)
        )
        self._vector, self._gradient = np.zeros(model.size, np.float32), np.zeros(model.size, np.float32)
        self._weights = flat_views(self._vector, model.sizes)
        self._gradients = flat_views(self._gradient, model.sizes)

    @property
    def weights(self) -> Sequence[Floats]:
        """See LocalSteps."""
        return self._weights

    def begin(self) -> None:
        """See LocalSteps."""
        self._model.read_weights(self._vector)

    def state(self) -> State:
        """See LocalSteps."""
        state = super().state()
        state.add("optimizer", State({}, self.optimizer.state))
        return state

    def load(self, state: State) -> None:
        """See LocalSteps."""
        super().load(state)
        self.optimizer.state = {name: array.copy() for name, array in state.named("optimizer").items()}

    def step(self, samples: int, watch: Stopwatch) -> None:
        """See LocalSteps."""
        self.count += 1
        self.samples += samples
        with watch("forward and backward"):
            self._model.wait_for_gradients()
        with watch("local update"):
            for index, gradient in enumerate(self._gradients):
                self._model.read_gradient(index, gradient)
            self._vector[...] = self.optimizer.update(self._vector, self._gradient)
            self._model.write_weights(self._vector)

    def put(self, index: int, value: Floats) -> Floats:
        """See LocalSteps."""
        self._weights[index][...] = value
        self._model.write_weight(index, self._weights[index])
        return value


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

    def reseed(self, numbers: Sequence[int]) -> None:
        """Seed the framework's random numbers, as of dropout, for the next step: a step that is repeated after a
        restart must give the same numbers.
        """

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
        self.load(other.state())

    def state(self) -> State:
        """Return the weights and statistics. A framework's random numbers, as of dropout, follow from `reseed`."""
        vector = np.empty(self.size, np.float32)
        self.read_weights(vector)
        state = State(arrays={"weights": vector})
        state.add("statistics", State({}, dict(self.read_statistics())))
        return state

    def load(self, state: State) -> None:
        """Set the weights and statistics of a `state`."""
        self.write_weights(state.arrays["weights"])
        self.write_statistics(state.named("statistics"))

    def digest(self) -> str:
        """Return the hexadecimal SHA-256 over the names and bytes of all weights: equal only if bit-identical."""
        digest = hashlib.sha256()
        for name, weight in self.named_weights().items():
            digest.update(name.encode())
            digest.update(weight.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Network(Architecture):
    """An architecture that a framework can compute.

    adapter: creates the model of `build`.
    session: a context for building and training on a device ("" is the CPU, "gpuN" the only GPU visible to this
        process), which seeds the framework's random numbers, used by layers such as dropout. Entering it raises
        InvalidSettings for an unusable device.
    """

    adapter: "Callable[[Network], ModelAdapter]"
    session: Callable[[str, int], AbstractContextManager[object]]

    def build(self) -> ModelAdapter:
        """Return a copy of the network with zero weights."""
        return self.adapter(self)
