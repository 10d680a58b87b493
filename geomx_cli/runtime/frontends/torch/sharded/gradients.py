"""Synchronous gradients of a model divided in each party: fully_shard has reduced them there, and each shard's leader
exchanges it (fsa, sync).
"""

from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from geomx_cli.runtime.frontends.torch.backward_pass import BackwardPass, check_no_pass
from geomx_cli.runtime.frontends.torch.batch_check import BatchCheck
from geomx_cli.runtime.frontends.torch.gradients import GradientSynchroniser, set_gradient
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.synchroniser import Synchroniser
from geomx_cli.runtime.frontends.torch.tensor_parts import local

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.frontends.torch.sharded.shard import Shard

__all__ = ["ReplicaGradients", "ShardGradients"]


class ShardGradients(GradientSynchroniser):
    """In a shard's leader: see GradientSynchroniser. A gradient is the mean over the party's workers when its exchange
    begins. A pass ends when all of the party's shards are there, from the same round; else it raises TrainingFailed.
    """

    def __init__(
        self, client: "Client", shard: "Shard", state: ModelState, optimizer: Any, backward: BackwardPass,
        check: BatchCheck,
    ) -> None:  # fmt: skip
        self.workers = shard.party.size
        self._shard = shard
        super().__init__(client, state, optimizer, [], backward, check)

    def receive(self) -> None:
        """See Participant."""
        super().receive()
        workers = self._vote.result().unfinished
        parameters = list(self._state.trained.values())
        found = [index for index, parameter in enumerate(parameters) if parameter.grad is not None]
        self._shard.announce(found, len(parameters), workers)
        self._shard.copy(parameters[index].grad for index in found)
        self._shard.check(self.rounds, workers)

    def conclude(self) -> None:
        """See Synchroniser: the leaders of all shards elect the same party, whose model is the newest."""
        self._has_failed, newest = self._shard.agree(has_failed=self._has_failed, is_newest=self._is_newest)
        is_stepped = newest and not self._has_failed
        self.take_newest(self._state, *self._shard.broadcasts(self._elect()), expects_same=is_stepped)


class ReplicaGradients(Synchroniser):
    """In a replica: the end of a backward pass, except within `no_sync`, waits for the leader's gradients."""

    def __init__(self, shard: "Shard", state: ModelState, optimizer: Any, backward: BackwardPass) -> None:
        self._shard = shard
        self._state = state
        self._backward = backward
        self._entered = self._has_failed = False
        for parameter in state.trained.values():
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
        optimizer.register_step_pre_hook(self._before_step)

    def _on_gradient(self, parameter: Any) -> None:
        """Autograd hook."""
        if self.ended:
            return
        if self.accumulating:
            self.has_local = True
        elif not self._entered:
            self._entered = True
            self.rounds += 1
            self._backward.enter(self)

    def contribute_rest(self) -> None:
        """See Participant; fully_shard has reduced this worker's gradients."""

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def receive(self) -> None:
        """See Participant."""
        parameters = list(self._state.trained.values())
        found, workers = self._shard.announce((), len(parameters), 0)
        for index in found:
            if parameters[index].grad is None:
                set_gradient(parameters[index], torch.empty_like(local(parameters[index])))
        self._shard.copy(parameters[index].grad for index in found)
        self._shard.check(self.rounds, workers)
        self._entered = self.has_local = False

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Optimizer hook."""
        check_no_pass()
        self.check_step(self._state, "party")

    def finishing(self) -> Iterator["Future[None]"]:
        """See Synchroniser: only leaders take part in the other parties' rounds."""
        if self._entered:  # the pass has failed, and the script went on; so it does in the leader
            self._has_failed = True
            self.receive()
        yield from ()

    def conclude(self) -> None:
        """See Synchroniser."""
        self.ended = True
        has_failed, newest = self._shard.agree(has_failed=self._has_failed)
        self.take_newest(self._state, *self._shard.broadcasts(), expects_same=newest and not has_failed)
