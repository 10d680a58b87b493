"""Local steps of a party whose workers hold shards of one model: the leader of each takes part in the algorithm's
rounds with it (hfa, diloco).
"""

from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from geomx_cli.runtime.frontends.torch.batch_check import BatchCheck
from geomx_cli.runtime.frontends.torch.local import LocalRounds, SampleCount
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.party.steps import LeaderModel
from geomx_cli.runtime.frontends.torch.script_model import last_gradients
from geomx_cli.runtime.frontends.torch.synchroniser import Synchroniser

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends.torch.sharded.shard import Shard

__all__ = ["ShardSteps"]


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
