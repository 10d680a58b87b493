"""A PyTorch script's part in a job whose parties add gradients themselves (`--reduce torch`)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from geomx_cli.core.options import Value
from geomx_cli.runtime.base_store import option_of
from geomx_cli.runtime.frontends.torch.batch_check import DIGEST, BatchCheck
from geomx_cli.runtime.frontends.torch.digests import to_first_worker
from geomx_cli.runtime.frontends.torch.futures import after
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.party.group import PartyGroup
from geomx_cli.runtime.frontends.torch.party.operations import Operations
from geomx_cli.runtime.frontends.torch.party.synchronise import synchronise
from geomx_cli.runtime.frontends.torch.synchroniser import Synchroniser
from geomx_cli.runtime.frontends.torch.wrapping_store import WrappingStore, finish_rounds

if TYPE_CHECKING:
    from concurrent.futures import Future

    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.script import Session
    from geomx_cli.runtime.settings import Settings

__all__ = ["PartyStore"]


class PartyStore(WrappingStore):
    """See ScriptStore. For the training thread. The constructor joins the job: it blocks until the party's workers
    have, and their leader the servers. Raises GeomxError if that fails.
    """

    trains = True

    def __init__(self, session: "Session", settings: "Settings") -> None:
        super().__init__(session)
        self._settings = settings
        self._group = PartyGroup(settings)
        self._client: Client | None = session.connect_in_group(settings)
        self._group.form(self._client)
        self._operations = Operations(self._group)

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

    def option(self, name: str) -> Value:
        """See BaseStore."""
        return option_of(self._settings, name)

    @property
    def failure(self) -> BaseException | None:
        """See ScriptStore."""
        return None if self._client is None else self._client.failure

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

    def _finish(self, wrapped: Sequence[Synchroniser]) -> None:
        if self.failure is not None:
            raise self.failure
        self._operations.follow()
        if self._client is not None:
            finish_rounds(wrapped)
