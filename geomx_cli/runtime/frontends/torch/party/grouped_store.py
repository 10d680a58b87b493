"""What a PyTorch script knows of its job in a party whose workers form a group of torch.distributed."""

from typing import TYPE_CHECKING

from geomx_cli.core.options import Value
from geomx_cli.runtime.base_store import option_of
from geomx_cli.runtime.frontends.torch.party.group import PartyGroup
from geomx_cli.runtime.frontends.torch.wrapping_store import WrappingStore

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.cluster.bodies import Body
    from geomx_cli.runtime.script import Session
    from geomx_cli.runtime.settings import Settings

__all__ = ["GroupedStore"]


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
