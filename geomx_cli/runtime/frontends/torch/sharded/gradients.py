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
from geomx_cli.runtime.frontends.torch.local import LocalRounds, SampleCount
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.party.steps import LeaderModel
from geomx_cli.runtime.frontends.torch.script_model import last_gradients
from geomx_cli.runtime.frontends.torch.synchroniser import Synchroniser
from geomx_cli.runtime.frontends.torch.tensor_views import local

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.frontends.torch.sharded.shard import Shard

__all__ = ["ReplicaGradients", "ShardGradients", "ShardSteps"]

# Local steps of a party whose workers hold shards of one model: the leader of each takes part in the algorithm's rounds
# with it (hfa, diloco).


class ShardSteps(Synchroniser):
    """fully_shard makes all optimizers of a party take the same step, each of its shard.

    After a step a shard's leader does what a worker by itself does, and what that changes is copied to the replicas.
    Raises TrainingFailed from `optimizer.step` if the party's shards then are of different rounds. rounds: the
    leader's, None in replicas.
    """

    def __init__(
        self, shard: "Shard", state: ModelState, model: LeaderModel, rounds: LocalRounds | None,
        samples: SampleCount | None, optimizer: Any, check: BatchCheck,
    ) -> None:  # fmt: skip
        self._shard = shard
        self._state = state
        self._model = model
        self._local = rounds
        self._samples = samples
        self._check = check
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Optimizer hook."""
        self.check_step(self._state)
        if self._local is not None and self._check.compares:
            self._check.observe(*last_gradients(self._state))

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Optimizer hook."""
        samples = 1 if self._samples is None else sum(self._shard.party.gather(self._samples.take()))
        if self._local is not None:
            self._local.advance(samples)
        self._share()

    def _share(self) -> None:
        """Copy what has changed in the leader's model to the replicas."""
        parameters, written = list(self._state.trained.values()), self._model.written
        own = self.rounds if self._local is None else self._local.count
        changed, self.rounds = self._shard.announce(written, len(parameters), own)
        written.clear()
        self._shard.copy(parameters[index] for index in changed)
        self._shard.check(self.rounds)

    def finishing(self) -> Iterator["Future[None]"]:
        """See Synchroniser: only leaders take part in the other parties' rounds."""
        if self._local is not None:
            self._check.finish()
            yield from self._local.finishing()

    def conclude(self) -> None:
        """See Synchroniser: the weights of all parties are the same already."""
        self.ended = True
        self._share()
        self._state.conclude(*self._shard.broadcasts(), trained=False)


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
