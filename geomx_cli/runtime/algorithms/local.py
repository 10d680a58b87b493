"""One worker by itself on all the data: what the others are compared with. No gradient leaves the worker."""

from typing import TYPE_CHECKING, Any

from geomx_cli.runtime.algorithms.fsa import refuses, server
from geomx_cli.runtime.training.part import WorkerPart

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.training.recipe import Recipe
    from geomx_cli.runtime.training.replica import Replica
    from geomx_cli.runtime.training.stopwatch import Stopwatch

__all__ = ["fixes", "name", "options", "refuses", "server", "server_optimizer", "worker"]

name = "local"
options = ()
fixes = {"topology": "flat", "parties": 1, "workers": 1}


def server_optimizer(recipe: "Recipe") -> tuple[str, dict[str, float]] | None:
    """None: the servers have nothing to do but to give the initial weights."""
    return None


def worker(client: "Client", store: Any, replica: "Replica", recipe: "Recipe") -> "LocalWorker":
    """The part in a worker. `store` is an MXNet KVStore."""
    return LocalWorker(store, replica, recipe)


class LocalWorker(WorkerPart):
    """Steps of its own; a round is a step, in which nothing but the wish to stop is exchanged."""

    def __init__(self, store: Any, replica: "Replica", recipe: "Recipe") -> None:
        from geomx_cli.runtime.training.local_steps import LocalSteps

        self._store = store
        self._replica = replica
        self._steps = LocalSteps(replica, recipe)

    def start(self) -> None:
        """Take the initial weights from the servers."""
        self._replica.pull(self._store)
        self._steps.begin()

    def after_step(self, samples: int, watch: "Stopwatch") -> bool:
        """A step."""
        self._steps.step(samples, watch)
        return True

    def drain(self) -> None:
        """There is nothing to exchange."""

    def synchronise(self) -> None:
        """Nothing is under way."""
        self._replica.wait_for_weights()
        self.rounds += 1
