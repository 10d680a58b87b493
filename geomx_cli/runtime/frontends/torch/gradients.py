"""Synchronous gradients: after `backward` the gradients are the means over all workers (fsa, sync)."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from geomx_cli.runtime.frontends.torch.buckets import BucketExchanges
from geomx_cli.runtime.frontends.torch.checks import BatchCheck, GradientCheck
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.synchroniser import Synchroniser
from geomx_cli.runtime.frontends.torch.tensor_exchanges import TensorExchanges
from geomx_cli.runtime.training.stop_vote import STOP, StopVote

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends.torch.reduction import Reduction

__all__ = ["GradientSynchroniser"]


class GradientSynchroniser(Synchroniser):
    """A backward pass is a round, except within `no_sync`, and leaves the means over all workers of all parties.

    Gradients accumulated before count too. A tensor without a gradient counts as zeros; one without a gradient in all
    workers gets none. Failures of the job are raised from `backward`, and with p3 from what first uses a late tensor.
    With shards a pass ends when all of the party's shards are there, from the same round; else it raises
    TrainingFailed.

    statistics: buffers that become means with each round.
    check: gets the first gradients of each round.
    """

    def __init__(
        self, reduction: "Reduction", state: ModelState, optimizer: Any, statistics: Sequence[Any], check: BatchCheck
    ) -> None:
        where = "here" if reduction.weight == 1 else "in this party"
        self._finite = GradientCheck(reduction.warn, state.trained, where)
        self._vote: StopVote | None = None  # first, as every mean is divided by its weight
        self._exchanges: TensorExchanges | BucketExchanges | None = None  # None in a replica of a shard
        self._is_newest = True  # of all models, as this member contributed to the last round
        client, operations = reduction.client, reduction.operations
        if client is not None:
            self._vote = StopVote(client, 1, f"{state.prefix}{STOP}")
        if operations is not None:
            self._exchanges = BucketExchanges(
                operations, state, statistics, check, client, self._vote, self._finite
            )
        elif client is not None and self._vote is not None:
            self._exchanges = TensorExchanges(
                client, state, statistics, check, self._vote, self._finite, reduction.weight
            )
        super().__init__(reduction, state, optimizer, check, self._exchanges or _Replica(state))
        if isinstance(self._exchanges, TensorExchanges):
            self._exchanges.follow(optimizer)

    def begin(self) -> None:
        """See Member."""
        self._finite.stepped()
        self.rounds += 1
        super().begin()

    def contribute_nothing(self) -> None:
        """See Member."""
        self.rounds += 1
        super().contribute_nothing()

    def announce(self, workers: int) -> None:
        """See Member."""
        if self._vote is not None:
            self._vote.begin(stop=False, unfinished=True, weight=workers)

    def receive(self, workers: int) -> None:
        """See Member."""
        super().receive(workers)
        if self._reduction.shard is not None:
            everywhere = 0 if self._vote is None else self._vote.result().unfinished
            self._reduction.share_gradients(list(self._state.trained.values()), self.rounds, everywhere)

    def leave(self) -> None:
        """See Member."""
        super().leave()
        self._finite.stepped()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        super()._before_step(optimizer, args, kwargs)
        if isinstance(self._exchanges, TensorExchanges):
            self._exchanges.hide_late(optimizer, args, kwargs)

    def finishing(self) -> Iterator["Future[None]"]:
        """See Synchroniser: abstain from the others' rounds."""
        self.leave()
        if isinstance(self._exchanges, TensorExchanges):
            yield from self._exchanges.settling()
        if self.entered is not None:  # it has failed, and the script went on; the others wait for the rest of its round
            self.fail()
            self.contribute_rest()
            if self._vote is not None:
                yield self._vote.pending
            self.receive(self._reduction.weight)
            if isinstance(self._exchanges, TensorExchanges):
                self._exchanges.settle_all()
        if self._exchanges is None or self._vote is None:
            return
        while not self.ended:
            self._exchanges.abstain()
            self._vote.begin(stop=False, unfinished=False)
            yield self._vote.pending
            self._exchanges.skip()
            self.ended = self._vote.result().unfinished == 0
            self._is_newest = self._is_newest and self.ended

    def conclude(self) -> None:
        """See Synchroniser: all take the tensors of a worker that contributed to the last round."""
        self.ended = True
        broadcasts, expects_same = self._reduction.newest(
            self._state, is_newest=self._is_newest, took_part=self._took_part, has_failed=self._has_failed
        )
        self._take_newest(broadcasts, expects_same=expects_same)


class _Replica:
    """In a replica of a shard, which has no exchanges: fully_shard has reduced its gradients, and the leader of the
    shard gives it the means.
    """

    checks = True

    def __init__(self, state: ModelState) -> None:
        self.slots = [SimpleNamespace(parameter=parameter) for parameter in state.trained.values()]

    def begin(self, round_: int) -> None:
        """See Carrier."""

    def load(self, slot: Any) -> None:
        """See Carrier."""

    def load_rest(self) -> None:
        """See Carrier."""

    def load_nothing(self) -> None:
        """See Carrier."""

    def receive(self, workers: int) -> None:
        """See Carrier."""
