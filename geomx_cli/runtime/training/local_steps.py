"""A worker's own optimizer and the steps that it takes by itself between two exchanges."""

from typing import TYPE_CHECKING

import numpy as np

from geomx_cli.ps import optimizers

if TYPE_CHECKING:
    from geomx_cli.ps.wire import Array
    from geomx_cli.runtime.training.recipe import Recipe
    from geomx_cli.runtime.training.replica import Replica

__all__ = ["LocalSteps"]


class LocalSteps:
    """Applies the gradients of one worker's batches to its own weights. For the training thread only.

    count, samples: what there was since the owner last set them to zero.

    `weights` are float32 arrays in the order of the replica's; the replica's own are a copy of them, which `put` makes.
    The optimizer is one of those that servers run, so it gives the same numbers wherever it runs.
    """

    def __init__(self, replica: "Replica", recipe: "Recipe") -> None:
        self.weights: list[Array] = []
        self.count = self.samples = 0
        self._replica = replica
        self._optimizer = optimizers.create(recipe.optimizer, recipe.optimizer_params)

    def begin(self) -> None:
        """Start from the replica's weights."""
        self.weights = [weight.asnumpy() for weight in self._replica.weights]

    def step(self, samples: int) -> None:
        """One update with the replica's gradients, of a batch of so many samples; waits for them."""
        self.count += 1
        self.samples += samples
        for index, gradient in enumerate(self._replica.gradients):
            self.put(index, self._optimizer.update((index, 0), self.weights[index], gradient.asnumpy()))

    def put(self, index: int, value: "Array") -> None:
        """Have one tensor go on from `value`."""
        self.weights[index] = np.ascontiguousarray(value, np.float32)
        self._replica.set_weight(index, self.weights[index])
