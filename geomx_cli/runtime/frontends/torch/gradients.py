"""Synchronous gradients: after `backward` the gradients are the means over all workers (fsa, sync)."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from geomx_cli.runtime.frontends.torch.buckets import BucketExchanges
from geomx_cli.runtime.frontends.torch.checks import BatchCheck, GradientCheck
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.synchroniser import Carrier, Synchroniser
from geomx_cli.runtime.frontends.torch.tensor_exchanges import TensorExchanges
from geomx_cli.runtime.training.stop_vote import STOP, StopVote

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends.torch.reduction import Reduction

__all__ = ["GradientSynchroniser"]


class GradientSynchroniser(Synchroniser):
    """A backward pass is a round, except within `no_sync`. It writes the means over all workers of all parties to the
    gradients.

    Gradients that were accumulated before count too. A tensor without a gradient counts as zeros. A tensor without a
    gradient in all workers gets none. Failures of the job are raised from `backward`, and with p3 from the first use of
    a late tensor. With shards, a pass ends when all of the party's shards have arrived, from the same round. Otherwise
    it raises TrainingFailed.

    statistics: buffers that become means with each round.
    check: receives the first gradients of each round.
    """

    kept = (*Synchroniser.kept, "_is_newest")

    def __init__(
        self, reduction: "Reduction", state: ModelState, optimizer: Any, statistics: Sequence[Any], check: BatchCheck
    ) -> None:
        where = "here" if reduction.weight == 1 else "in this party"
        self._finite = GradientCheck(reduction.warn, state.trained, where)
        self._vote: StopVote | None = None  # comes first, because every mean is divided by its weight
        self._is_newest = True  # whether it is the newest of all models: this member contributed to the last round
        client, operations = reduction.client, reduction.operations
        if client is not None:
            self._vote = StopVote(client, 1, f"{state.prefix}{STOP}")
        carrier = Carrier(state.trained.values())
        if operations is not None:
            carrier = BucketExchanges(operations, state, statistics, check, client, self._vote, self._finite)
        elif client is not None and self._vote is not None:
            carrier = TensorExchanges(client, state, statistics, check, self._vote, self._finite, reduction.weight)
        super().__init__(reduction, state, optimizer, check, carrier)
        if isinstance(carrier, TensorExchanges):
            carrier.follow(optimizer)

    def enter_pass(self) -> None:
        """See Member."""
        self._finite.stepped()
        self.rounds += 1
        super().enter_pass()

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

    def finishing(self) -> Iterator["Future[None] | None"]:
        """See Synchroniser. Abstain from the others' rounds."""
        self.leave()
        yield from self._gradients.completing()
        if self.entered is not None:  # it has failed, and the script went on; the others wait for the rest of its round
            self.fail()
            self.contribute_rest()
            if self._vote is not None:
                yield self._vote.pending
            self.receive(self._reduction.weight)
            yield from self._gradients.completing()
        if self._vote is None:
            return
        while not self.ended:
            self._gradients.abstain()
            self._vote.begin(stop=False, unfinished=False)
            yield self._vote.pending
            self._gradients.skip()
            self.ended = self._vote.result().unfinished == 0
            self._is_newest = self._is_newest and self.ended
            if not self.ended:
                yield None

    def share_model(self) -> None:
        """See Synchroniser. All take the tensors of a worker that contributed to the last round."""
        self.ended = True
        broadcasts, expects_same = self._reduction.newest(
            self._state, is_newest=self._is_newest, took_part=self._took_part, has_failed=self._has_failed
        )
        self._take_newest(broadcasts, expects_same=expects_same)
