"""A PyTorch script's part in a job whose parties add gradients themselves (`--reduce torch`)."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from geomx_cli.core.futures import after
from geomx_cli.runtime.frontends.torch.batch_check import DIGEST, BatchCheck
from geomx_cli.runtime.frontends.torch.digests import to_first_worker
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.party.grouped_store import GroupedStore
from geomx_cli.runtime.frontends.torch.party.operations import Operations
from geomx_cli.runtime.frontends.torch.party.synchronise import synchronise
from geomx_cli.runtime.frontends.torch.synchroniser import Synchroniser
from geomx_cli.runtime.frontends.torch.wrapping_store import finish_rounds

if TYPE_CHECKING:
    from concurrent.futures import Future

    from geomx_cli.ps.arrays import Array
    from geomx_cli.runtime.script import Session
    from geomx_cli.runtime.settings import Settings

__all__ = ["PartyStore"]


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
