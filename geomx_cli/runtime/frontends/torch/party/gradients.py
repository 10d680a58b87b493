"""Synchronous gradients: added in the party, then exchanged by its leader (fsa, sync)."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from geomx_cli.runtime.frontends.torch.batch_check import BatchCheck
from geomx_cli.runtime.frontends.torch.broadcast import Broadcast
from geomx_cli.runtime.frontends.torch.election import elect_newest
from geomx_cli.runtime.frontends.torch.finite import GradientCheck
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.party.broadcast import PartyBroadcast
from geomx_cli.runtime.frontends.torch.party.buckets import Slot
from geomx_cli.runtime.frontends.torch.party.exchange import Exchanger
from geomx_cli.runtime.frontends.torch.party.passes import PartySynchroniser
from geomx_cli.runtime.training.stop_vote import STOP, StopVote

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.frontends.torch.party.operations import Operations

__all__ = ["PartyGradients"]

_OLD, _FAILED, _STEPPED = range(3)
"""How new a worker's model is at the end: it did not contribute to the last round, has not taken its step, or has."""


class PartyGradients(PartySynchroniser):
    """A backward pass is a round, except within `no_sync`, and leaves the means over all workers of all parties.

    A bucket of gradients is added in the party as soon as it is complete, sent to the servers by the leader, and its
    result copied to the party's workers at the end of the pass. client: the leader's, None in other workers.
    """

    def __init__(
        self, operations: "Operations", client: "Client | None", state: ModelState, optimizer: Any,
        statistics: Sequence[Any], check: BatchCheck,
    ) -> None:  # fmt: skip
        self._client = client
        self._exchanger: Exchanger | None = None
        if client is not None:
            self._vote = StopVote(client, -len(state.trained) - 1, f"{state.prefix}{STOP}")
            self._exchanger = Exchanger(client, operations, self._vote)
        on_begun = None if self._exchanger is None else self._exchanger.put
        self._finite = GradientCheck(operations.warn, state.trained)
        self._is_newest = False  # in the leader: the party contributed to the last round
        super().__init__(operations, state, optimizer, statistics, on_begun, check)

    def begin(self) -> None:
        """See Member."""
        self._finite.stepped()
        super().begin()

    def load(self, slot: Slot) -> None:
        """See PartySynchroniser."""
        super().load(slot)  # which checks it
        self._finite.contributes(slot.parameter, slot.parameter.grad.detach(), self.rounds + 1)

    def leave(self) -> None:
        """See Member."""
        self._finite.stepped()
        super().leave()

    def announce(self, active: Sequence[int]) -> None:
        """See Member."""
        self.rounds += 1
        if self._exchanger is not None:
            self._exchanger.vote(len(active))

    def receive(self, active: Sequence[int]) -> None:
        """See Member."""
        arriving = self.sums.buckets[::-1]  # the first tensors' have priority
        for bucket in arriving:
            if self._exchanger is None:
                self.group.wait(bucket.work)
            else:
                self._exchanger.take(bucket)
            bucket.work = self.group.send(bucket.vector)
        workers = self.group.share(self._vote.result().unfinished if self._client is not None else 0)
        for bucket in arriving:
            self.group.wait(bucket.work)
            self.sums.store(bucket, workers)
            for slot in bucket.slots:
                if slot.parameter is not None and slot.parameter.grad is not None:
                    self._finite.received(slot.parameter, slot.parameter.grad.detach())

    def finishing(self) -> Iterator["Future[None]"]:
        """See Synchroniser: in the leader, after all of its party's workers have finished."""
        assert self._exchanger is not None
        rounds = 0
        while not self.ended:
            self._exchanger.abstain(self.slots)
            yield self._vote.pending
            self._exchanger.skip(self.slots)
            self.ended = self._vote.result().unfinished == 0
            rounds += 1
        self._is_newest = rounds == 1

    def conclude(self) -> None:
        """See Synchroniser: all take the tensors of a worker that contributed to the last round."""
        self.ended = True
        own = (_FAILED if self.has_failed else _STEPPED) if self.has_newest else _OLD
        models = self.group.gather(own)
        best = max(models)
        is_newest = bool(self.group.share(int(self._is_newest)))
        between = None
        if self._client is not None:
            takes_part = is_newest and best != _OLD
            elected = elect_newest(self._client, self.state, is_newest=takes_part, has_failed=best == _FAILED)
            between = Broadcast(self._client, elected)
        source = max(rank for rank, model in enumerate(models) if model == best)
        broadcast = PartyBroadcast(self.group, between, source)
        self.take_newest(self.state, broadcast, expects_same=is_newest and own == _STEPPED)
