"""The exchange of what a worker's own steps have come to: DiLoCo's and ESync's half of it in a worker."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geomx_cli.ps.wire import Array
    from geomx_cli.runtime.training.recipe import Recipe
    from geomx_cli.runtime.training.replica import Replica

__all__ = ["Differences"]


class Differences:
    """Pushes the differences of this worker's weights to the global ones that it last had, and takes new ones.

    `store` is an MXNet KVStore. Tensors are named by their index in the replica. For the training thread only.
    """

    def __init__(self, store: Any, replica: "Replica", recipe: "Recipe") -> None:
        from geomx_cli.runtime.training.local_steps import LocalSteps

        self.steps = LocalSteps(replica, recipe)
        self._store = store
        self._replica = replica
        self._origin: list[Array] = []
        self._results = [item.copy() for item in replica.weights]

    def start(self) -> None:
        """Take the initial weights from the servers."""
        self._replica.pull(self._store)
        self.steps.begin()
        self._origin = [weight.copy() for weight in self.steps.weights]

    def push(self, tensors: Iterable[int], weight: float = 1.0) -> None:
        """Begin a round of these tensors; the differences count with this weight in the mean."""
        for index in tensors:
            difference = (self._origin[index] - self.steps.weights[index]) * weight
            key = self._replica.names[index]
            self._store.push(key, self._replica.array(difference), priority=-index, weight=weight)
            self._store.pull(key, out=self._results[index], priority=-index)

    def abstain(self, tensors: Iterable[int]) -> None:
        """Begin a round of these tensors with nothing to contribute."""
        for index in tensors:
            key = self._replica.names[index]
            self._store.abstain(key, priority=-index)
            self._store.pull(key, out=self._results[index], priority=-index)

    def end(self) -> None:
        """Give up what is this worker's own for the global weights."""
        for index, origin in enumerate(self._origin):
            self.steps.put(index, origin)
        self._replica.wait_for_weights()

    def take(self, tensors: Iterable[int], mix: float = 0.0) -> None:
        """Wait for the round's new weights and go on from them; `mix` is the part of this worker's own in that."""
        for index in tensors:
            self._origin[index] = self._results[index].asnumpy()
            own = self.steps.weights[index]
            self.steps.put(index, self._origin[index] + mix * (own - self._origin[index]))
        self._replica.wait_for_weights()
