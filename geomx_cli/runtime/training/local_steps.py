"""A worker's own optimizer and the steps that it takes by itself between two exchanges."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from geomx_cli.ps import optimizers

if TYPE_CHECKING:
    from geomx_cli.ps.wire import Array
    from geomx_cli.runtime.training.recipe import Recipe
    from geomx_cli.runtime.training.replica import Replica
    from geomx_cli.runtime.training.stopwatch import Stopwatch

__all__ = ["LocalSteps"]


class LocalSteps:
    """Applies the gradients of one worker's batches to its own weights. For the training thread only.

    count, samples: what there was since the owner last set them to zero.

    `weights` are float32 arrays in the order of the replica's, parts of one vector, as optimizers work element by
    element; the replica's own are a copy of them, which `step` and `put` make. The optimizer is one of those that
    servers run, so it gives the same numbers wherever it runs.
    """

    def __init__(self, replica: "Replica", recipe: "Recipe") -> None:
        self.count = self.samples = 0
        self._replica = replica
        self._optimizer = optimizers.create(recipe.optimizer, recipe.optimizer_params)
        self._vector, self.weights = _parts_of_one(replica.weights)
        self._gradient, self._gradients = _parts_of_one(replica.gradients)

    def begin(self) -> None:
        """Start from the replica's weights."""
        for own, weight in zip(self.weights, self._replica.weights, strict=True):
            own[...] = weight.asnumpy()

    def step(self, samples: int, watch: "Stopwatch") -> None:
        """One update with the replica's gradients, of a batch of so many samples; waits for them."""
        self.count += 1
        self.samples += samples
        with watch("forward and backward"):
            self._replica.wait_for_gradients()
        with watch("local update"):
            for own, gradient in zip(self._gradients, self._replica.gradients, strict=True):
                own[...] = gradient.asnumpy()
            self._vector[...] = self._optimizer.update((0, 0), self._vector, self._gradient)
            self._replica.set_weights(self._vector)

    def put(self, index: int, value: "Array") -> None:
        """Have one tensor go on from `value`."""
        self.weights[index][...] = value
        self._replica.set_weight(index, self.weights[index])


def _parts_of_one(like: Sequence[Any]) -> "tuple[Array, list[Array]]":
    """A float32 vector, and its parts in the shapes of these arrays."""
    vector = np.zeros(sum(array.size for array in like), np.float32)
    cuts = np.cumsum([array.size for array in like])[:-1]
    return vector, [part.reshape(array.shape) for part, array in zip(np.split(vector, cuts), like, strict=True)]
