"""A worker's local steps between two exchanges."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from geomx_cli.ps.arrays import Floats
from geomx_cli.ps.optim import optimizers, schedules
from geomx_cli.ps.optim.optimizer import LocalOptimizer
from geomx_cli.runtime.training.flat_views import flat_views

if TYPE_CHECKING:
    from geomx_cli.runtime.training.stopwatch import Stopwatch
    from geomx_cli.runtime.training.train_config import TrainConfig

__all__ = ["LocalSteps", "OptimizerSteps"]


class LocalSteps(ABC):
    """The steps that one worker takes with its own weights. For the training thread only.

    count, samples: totals since the owner last reset them. optimizer: one of the servers' implementations, if that
    takes the steps.
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

    @abstractmethod
    def step(self, samples: int, watch: "Stopwatch") -> None:
        """Update once with the model's gradients, of a batch of `samples` samples; waits for them."""

    @abstractmethod
    def put(self, index: int, value: Floats) -> Floats:
        """Replace one tensor by `value`, which may be modified once this returns; return what it now holds, which is
        `value` itself unless the tensor's dtype has rounded it.
        """


class _Model(Protocol):
    """What OptimizerSteps needs of a ModelAdapter."""

    sizes: tuple[int, ...]

    @property
    def size(self) -> int: ...

    def wait_for_gradients(self) -> None: ...

    def read_gradient(self, index: int, out: Floats) -> None: ...

    def read_weights(self, out: Floats) -> None: ...

    def write_weights(self, vector: Floats) -> None: ...

    def write_weight(self, index: int, value: Floats) -> None: ...


class OptimizerSteps(LocalSteps):
    """Steps of one of the servers' optimizers, which gives the same numbers wherever it runs.

    The weights are views of one vector, as optimizers work element-wise; `step` and `put` copy them to the model.
    """

    def __init__(self, model: _Model, config: "TrainConfig") -> None:
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

    def step(self, samples: int, watch: "Stopwatch") -> None:
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
