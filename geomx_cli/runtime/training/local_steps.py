"""A worker's own optimizer, and its local steps between two exchanges."""

from typing import TYPE_CHECKING

import numpy as np

from geomx_cli.ps.arrays import Floats
from geomx_cli.ps.optim import optimizers
from geomx_cli.runtime.training.model import flat_views

if TYPE_CHECKING:
    from geomx_cli.runtime.training.model import ModelAdapter
    from geomx_cli.runtime.training.stopwatch import Stopwatch
    from geomx_cli.runtime.training.train_config import TrainConfig

__all__ = ["LocalSteps"]


class LocalSteps:
    """Applies the gradients of one worker's batches to its own weights. For the training thread only.

    count, samples: totals since the owner last reset them.

    `weights` are 1-D float32 arrays in the order of the model's tensors, views of one vector, as optimizers work
    element-wise; `step` and `put` copy them to the model. The optimizer is one of the servers' implementations, so it
    gives the same numbers wherever it runs.
    """

    def __init__(self, model: "ModelAdapter", config: "TrainConfig") -> None:
        self.count = self.samples = 0
        self._model = model
        self.optimizer = optimizers.create(config.optimizer, config.optimizer_params)
        self._vector, self._gradient = np.zeros(model.size, np.float32), np.zeros(model.size, np.float32)
        self.weights = flat_views(self._vector, model.sizes)
        self._gradients = flat_views(self._gradient, model.sizes)

    def begin(self) -> None:
        """Initialize from the model's weights."""
        self._model.read_weights(self._vector)

    def step(self, samples: int, watch: "Stopwatch") -> None:
        """Update once with the model's gradients, of a batch of `samples` samples; waits for them."""
        self.count += 1
        self.samples += samples
        with watch("forward and backward"):
            self._model.wait_for_gradients()
        with watch("local update"):
            for index, gradient in enumerate(self._gradients):
                self._model.read_gradient(index, gradient)
            self._vector[...] = self.optimizer.update((0, 0), self._vector, self._gradient)
            self._model.write_weights(self._vector)

    def put(self, index: int, value: Floats) -> None:
        """Replace one tensor by `value`."""
        self.weights[index][...] = value
        self._model.write_weight(index, self.weights[index])
