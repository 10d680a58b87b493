"""`--reduce torch`: a party's workers form a group, whose first worker exchanges with the servers."""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from geomx_cli.core.futures import after
from geomx_cli.runtime.frontends.torch.backward_pass import PartyOperations
from geomx_cli.runtime.frontends.torch.checks import DIGEST, to_first_worker
from geomx_cli.runtime.frontends.torch.model_state import Broadcast, ModelState, PartyBroadcast
from geomx_cli.runtime.frontends.torch.party_group import PartyGroup
from geomx_cli.runtime.frontends.torch.reduction import Reduction, refuse_closures
from geomx_cli.runtime.frontends.torch.tensors import local

if TYPE_CHECKING:
    from concurrent.futures import Future

    from geomx_cli.contract.settings import Settings
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.cluster.bodies import Body
    from geomx_cli.runtime.frontends.torch.backward_pass import Member
    from geomx_cli.runtime.script import Session

__all__ = ["GroupReduction", "PartyReduction"]

_OLD, _FAILED, _STEPPED = range(3)
"""How new a worker's model is at the end: it did not contribute to the last round, has not taken its step, or has."""
_UNEVEN = "a worker of this party has finished before the others, and they go on without a state of it"


class GroupReduction(Reduction):
    """For a party whose workers form a group of torch.distributed. Only some of them are members of the parameter
    server.

    The constructor joins the job. It blocks until the party's workers have joined their group, and until the workers
    that exchange with the servers have joined the servers. Raises GeomxError if that fails.

    group: all of the party's workers.
    peers: the workers with the same tensors. Rank 0 of them is the leader, a member.
    """

    in_party = True

    def __init__(self, session: "Session", settings: "Settings") -> None:
        self.group = PartyGroup(settings, session.note_failure, session.end)
        self.client = session.connect_in_group(settings, self.group.activity.last)
        self.group.form(self.client)
        assert session.recovery is not None  # it has joined
        self.group.restarts = session.recovery.join_group(self.group)
        session.await_group = self.group.await_end
        self.peers = self.group
        self.rank = self.group.rank
        self.settings = settings
        self.warn = partial(session.warn, affects_result=True)
        assert settings.global_rank is not None
        self.global_rank, self.num_all_workers = settings.global_rank, settings.num_all_workers
        first = self.global_rank - self.rank
        self.party_ranks: range = range(first, first + self.group.size)

    def compare(self, row: "Body") -> None:
        """See Reduction. The party's first worker sends the rows of all workers, also of workers that are no members.
        """
        if self.group.size > 1:
            self.group.post(row)
        elif self.client is not None:
            self.client.control.compare(row)

    def check(self, optimizer: Any, buffers: str, algorithm: str, *, by_gradients: bool) -> None:
        """See Reduction."""
        refuse_closures(optimizer, "--reduce torch", "leave --reduce out")

    def total(self, value: int) -> int:
        """See Reduction."""
        return sum(self.group.gather(value))

    def announce(self, changed: Collection[int], count: int, number: int) -> tuple[list[int], int]:
        """See Reduction."""
        # One message in each step names the changed tensors, and only these follow. After most local steps there are
        # none.
        marks = torch.zeros(count + 1, dtype=torch.int64, device="cpu")
        marks[[*changed]] = 1
        marks[-1] = number
        if self.peers.size > 1:
            self.peers.wait(self.peers.send(marks))
        *given, number = marks.tolist()
        return [index for index, mark in enumerate(given) if mark], number

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def copy(self, tensors: Iterable[Any], source: int = 0) -> None:
        """See Reduction."""
        parts = [local(tensor) for tensor in tensors] if self.peers.size > 1 else []
        copies = [part.to(self._device_of(part)).contiguous() for part in parts]
        # All copies begin before the code waits for the first, so that small tensors do not each cost a round trip.
        works = [self.peers.send(copy, source) for copy in copies]
        for part, copy, work in zip(parts, copies, works, strict=True):
            self.peers.wait(work)
            if copy is not part and self.peers.rank != source:
                part.copy_(copy)

    def _device_of(self, part: Any) -> Any:
        """The device on which a tensor is while it is copied."""
        return part.device

    def should_stop(self, wishes: Callable[[], bool], agrees: Callable[[bool], bool]) -> bool:
        """See ScriptStore. The party's first worker decides for all, with each gather of the party."""
        self.group.use_stops(wishes, agrees)
        return self.group.stops

    def prepare_end(self, calls: int) -> None:
        """See Reduction."""
        if self.failure is not None:
            raise self.failure

    def leave(self) -> None:
        """See Reduction."""
        self.group.leave()


class PartyReduction(GroupReduction):
    """`--reduce torch`: a party's workers add their gradients, and the party's first worker exchanges the sums."""

    def __init__(self, session: "Session", settings: "Settings") -> None:
        super().__init__(session, settings)
        recovery = session.recovery
        assert recovery is not None
        give_up = partial(recovery.give_up, _UNEVEN, tells=self.group.leads)
        self.passes = self.operations = self._operations = PartyOperations(self.group, give_up)

    def holders(self) -> tuple[int, int]:
        """See Reduction."""
        return self.num_all_workers, self.group.size

    def gather(self, name: str, digest: "Array") -> "Future[Array] | None":
        """See Reduction. The party's workers call it in the same pass."""
        rows = self.group.gather_bytes(digest)
        if self.client is None:
            return None
        table = np.zeros((self.num_all_workers, DIGEST), np.uint8)
        table[self.party_ranks] = rows
        gathered = to_first_worker(self.client, name, table.reshape(-1))
        if gathered is None:
            return None
        return after([gathered], lambda: gathered.result().sum(axis=0, dtype=np.uint8).reshape(table.shape))

    def broadcasts(self, source: int | None = None, origin: int = 0) -> tuple[Broadcast, ...]:
        """See Reduction. origin: the source's rank in its party."""
        between = None if self.client is None else Broadcast(self.client, source)
        return (PartyBroadcast(self.group, between, origin),)

    def choose_device(self, state: ModelState) -> None:
        """See Reduction."""
        self._operations.choose_device(parameter.device for parameter in state.trained.values())

    def step(self, member: "Member") -> Sequence[int]:
        """See Reduction; blocks."""
        return self._operations.step(member)

    def _device_of(self, part: Any) -> Any:
        return self._operations.device

    def prepare_end(self, calls: int) -> None:
        """See Reduction."""
        super().prepare_end(calls)
        self._operations.follow()

    def newest(
        self, state: ModelState, *, is_newest: bool, took_part: bool, has_failed: bool
    ) -> tuple[tuple[Broadcast, ...], bool]:
        """See Reduction. The source is the best worker in the party whose leader is elected."""
        own = (_FAILED if has_failed else _STEPPED) if took_part else _OLD
        models = self.group.gather(own)
        best = max(models)
        is_newest = bool(self.group.share(int(is_newest)))
        elected = None
        if self.client is not None:
            elected = self._elect(state, is_newest=is_newest and best != _OLD, has_failed=best == _FAILED)
        origin = max(rank for rank, model in enumerate(models) if model == best)
        return self.broadcasts(elected, origin), is_newest and own == _STEPPED
