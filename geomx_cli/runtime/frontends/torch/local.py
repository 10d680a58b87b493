"""Local steps: the script's optimizer trains this worker's weights, which algorithms exchange (hfa, diloco, esync)."""

import sys
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.broadcast import Broadcast
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.synchroniser import Synchroniser
from geomx_cli.runtime.training.stop_vote import STOP, StopVote
from geomx_cli.runtime.training.stopwatch import Stopwatch
from geomx_cli.runtime.training.worker_algorithm import DrainableWorkerAlgorithm

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.training.worker_algorithm import WorkerAlgorithm

__all__ = ["LocalSynchroniser"]


class LocalSynchroniser(Synchroniser):
    """Drives an algorithm's worker part as the bundled loop does, after each step of the optimizer.

    A round that is due ends within that step. The job's failures are raised from `optimizer.step`.
    """

    def __init__(
        self, client: "Client", state: ModelState, part: "WorkerAlgorithm", model: Any, optimizer: Any
    ) -> None:
        if not isinstance(part, DrainableWorkerAlgorithm):
            what = f"the algorithm {client.settings.text('algo')} cannot train in a script"
            raise InvalidSettings(what, "its worker part has to derive from DrainableWorkerAlgorithm")
        self._client = client
        self._state = state
        self._part = part
        self._vote = StopVote(client, -len(state.trained), f"{state.prefix}{STOP}")
        self._watch = Stopwatch()
        self._samples = 0
        self._exchanging = False
        self._part.start()
        if client.settings.text("weight") == "samples":
            model.register_forward_pre_hook(self._count_samples)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def _count_samples(self, model: Any, inputs: tuple[Any, ...]) -> None:
        """Module hook: the first tensor has a row for each sample."""
        tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
        if torch.is_grad_enabled() and tensors and tensors[0].ndim:
            self._samples += len(tensors[0])

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Optimizer hook."""
        self.check_step(self._state)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Optimizer hook."""
        samples, self._samples = max(1, self._samples), 0
        if self._part.after_step(samples, self._watch):
            self._begin(steps_left=sys.maxsize)
        if self._exchanging and self._part.must_wait:
            self._synchronise()
        self._watch.take()

    def _begin(self, steps_left: int) -> None:
        self.rounds += 1
        self._exchanging = True
        self._vote.begin(stop=False, unfinished=self._part.unfinished(steps_left))

    def _synchronise(self) -> bool:
        """Take the round's result. Return True if no worker has anything to contribute to later ones."""
        self._part.synchronise()
        unfinished = self._vote.result().unfinished
        self._exchanging = False
        self._part.expect(unfinished)
        return self._part.is_global_round and not unfinished

    def finishing(self) -> Iterator["Future[None]"]:
        """See Synchroniser."""
        while not self.ended:
            if not self._exchanging:
                self._part.drain()
                self._begin(steps_left=0)
            yield self._vote.pending
            self.ended = self._synchronise()
        self._part.end()

    def conclude(self) -> None:
        """See Synchroniser: the weights are the same already."""
        self._state.conclude(Broadcast(self._client), trained=False)
