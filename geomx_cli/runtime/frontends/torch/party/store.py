"""A PyTorch script's part in a job whose parties add gradients themselves (`--reduce torch`)."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from geomx_cli.core.futures import after
from geomx_cli.core.options import Value
from geomx_cli.runtime.base_store import option_of
from geomx_cli.runtime.frontends.torch.batch_check import DIGEST, BatchCheck, to_first_worker
from geomx_cli.runtime.frontends.torch.broadcast import Broadcast
from geomx_cli.runtime.frontends.torch.local import LocalRounds, SampleCount
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.party.broadcast import PartyBroadcast
from geomx_cli.runtime.frontends.torch.party.gradients import PartyGradients
from geomx_cli.runtime.frontends.torch.party.group import PartyGroup
from geomx_cli.runtime.frontends.torch.party.operations import Operations
from geomx_cli.runtime.frontends.torch.party.steps import LeaderModel, PartySteps
from geomx_cli.runtime.frontends.torch.synchronise import Chosen, refuse_closures
from geomx_cli.runtime.frontends.torch.synchroniser import Synchroniser
from geomx_cli.runtime.frontends.torch.wrapping_store import WrappingStore, finish_rounds

if TYPE_CHECKING:
    from concurrent.futures import Future

    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.cluster.bodies import Body
    from geomx_cli.runtime.script import Session
    from geomx_cli.runtime.settings import Settings

__all__ = ["GroupedStore", "PartyStore", "synchronise"]

# What a PyTorch script knows of its job in a party whose workers form a group of torch.distributed.


class GroupedStore(WrappingStore):
    """Base class, see ScriptStore. For the training thread. The constructor joins the job: it blocks until the party's
    workers have, and those of them that exchange with the servers the servers. Raises GeomxError if that fails.
    """

    trains = True

    def __init__(self, session: "Session", settings: "Settings") -> None:
        super().__init__(session)
        self._settings = settings
        self._group = PartyGroup(settings, session.note_failure, session.end)
        self._client: Client | None = session.connect_in_group(settings, self._group.activity.last)
        self._group.form(self._client)

    @property
    def global_rank(self) -> int:
        """See BaseStore."""
        assert self._settings.global_rank is not None
        return self._settings.global_rank

    @property
    def num_all_workers(self) -> int:
        """See BaseStore."""
        return self._settings.num_all_workers

    @property
    def party_ranks(self) -> range:
        """See BaseStore."""
        first = self.global_rank - self._group.rank
        return range(first, first + self._group.size)

    def _compare(self, row: "Body") -> None:
        """See WrappingStore; the party's first worker sends the rows of all, also of those that are no members."""
        if self._group.size > 1:
            self._group.post(row)
        elif self._client is not None:
            self._client.control.compare(row)

    def option(self, name: str) -> Value:
        """See BaseStore."""
        return option_of(self._settings, name)

    @property
    def failure(self) -> BaseException | None:
        """See ScriptStore."""
        return None if self._client is None else self._client.failure

    def settle(self) -> None:
        """See WrappingStore."""
        super().settle()
        self._group.leave()


class PartyStore(GroupedStore):
    """See GroupedStore."""

    def __init__(self, session: "Session", settings: "Settings") -> None:
        super().__init__(session, settings)
        self._operations = Operations(self._group, partial(session.warn, affects_result=True))

    def _synchronise(
        self, state: ModelState, model: Any, optimizer: Any, buffers: str, check: BatchCheck
    ) -> Synchroniser:
        return synchronise(self._settings, self._operations, self._client, state, model, optimizer, buffers, check)

    def _gather(self, name: str, digest: "Array") -> "Future[Array] | None":
        """See WrappingStore; the party's workers call it in the same pass."""
        rows = self._group.gather_bytes(digest)
        if self._client is None:
            return None
        table = np.zeros((self.num_all_workers, DIGEST), np.uint8)
        table[self.party_ranks] = rows
        gathered = to_first_worker(self._client, name, table.reshape(-1))
        if gathered is None:
            return None
        return after([gathered], lambda: gathered.result().sum(axis=0, dtype=np.uint8).reshape(table.shape))

    def _holders(self) -> tuple[int, int]:
        """See WrappingStore."""
        return self.num_all_workers, self._group.size

    def _finish(self, wrapped: Sequence[Synchroniser]) -> None:
        if self.failure is not None:
            raise self.failure
        self._operations.follow()
        if self._client is not None:
            finish_rounds(wrapped)


# Attaches the job's algorithm to a script's optimizer, in a party that adds its gradients itself.

def synchronise(
    settings: "Settings", operations: "Operations", client: "Client | None", state: ModelState, model: Any,
    optimizer: Any, buffers: str, check: BatchCheck,
) -> Synchroniser:  # fmt: skip
    """See frontends.torch.synchronise. client: the leader's, None in other workers."""
    chosen = Chosen.of(settings, state, buffers)
    refuse_closures(optimizer, "--reduce torch", "leave --reduce out")
    if client is not None:
        chosen.set_servers_up(client, optimizer)
    between = None if client is None else Broadcast(client)
    state.begin(PartyBroadcast(operations.group, between))
    if client is not None and between is not None:
        chosen.declare(between, state)
        client.control.barrier("all")
    operations.choose_device(parameter.device for parameter in state.trained.values())
    if chosen.exchanges_gradients:
        return PartyGradients(operations, client, state, optimizer, list(chosen.statistics.values()), check)
    samples = SampleCount(model) if settings.text("weight") == "samples" else None
    weights, rounds = LeaderModel(state, chosen.statistics), None
    if client is not None:
        rounds = LocalRounds(client, state, chosen.algorithm.worker(client, weights, chosen.config))
    return PartySteps(operations, client, state, weights, rounds, samples, optimizer, chosen.statistics, check)
