"""A single worker on all the data: the reference for other algorithms. Gradients stay on the worker."""

from typing import TYPE_CHECKING

from geomx_cli.runtime.algorithms.fsa import refuses, server
from geomx_cli.runtime.training.worker_algorithm import FiniteWorkerAlgorithm

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.optim.optimizer import LocalOptimizer
    from geomx_cli.runtime.training.model import ModelWeights
    from geomx_cli.runtime.training.stopwatch import Stopwatch
    from geomx_cli.runtime.training.train_config import TrainConfig

__all__ = [
    "forced_options", "look", "name", "options", "refuses", "server", "server_optimizer", "standalone", "title",
    "worker",
]  # fmt: skip

name = "local"
title = "Local"
look = ("#7F7F7F", "h", "")
options = ()
forced_options = {"topology": "flat", "parties": 1, "workers": 1}
standalone = True


def server_optimizer(config: "TrainConfig") -> tuple[str, dict[str, float]] | None:
    """None: the servers only provide the initial weights."""
    return None


def worker(client: "Client", model: "ModelWeights", config: "TrainConfig") -> "LocalWorker":
    """The worker part."""
    return LocalWorker(client, model, config)


class LocalWorker(FiniteWorkerAlgorithm):
    """Local steps; each is a round that exchanges nothing but the stop vote."""

    def __init__(self, client: "Client", model: "ModelWeights", config: "TrainConfig") -> None:

        self._client = client
        self._model = model
        self._steps = model.local_steps(config)

    @property
    def optimizer(self) -> "LocalOptimizer | None":
        """See WorkerAlgorithm."""
        return self._steps.optimizer

    def start(self) -> None:
        """Pull the initial weights from the servers."""
        from geomx_cli.runtime.training.tensor_rounds import pull_weights

        pull_weights(self._client, self._model)
        self._steps.begin()

    def after_step(self, samples: int, watch: "Stopwatch") -> bool:
        """Take a local step."""
        self._steps.step(samples, watch)
        return True

    def drain(self) -> None:
        """Nothing is exchanged."""

    def synchronise(self) -> None:
        """Nothing is pending."""
        self.rounds += 1
