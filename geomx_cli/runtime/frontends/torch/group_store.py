"""The part in the job of a script that uses torch.distributed."""

from datetime import timedelta
from typing import TYPE_CHECKING

from geomx_cli.ps.cluster.bodies import MAX_PATIENCE
from geomx_cli.runtime.base_store import BaseStore
from geomx_cli.runtime.frontends.torch.process_group import GeomxProcessGroup

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.frontends import ScriptSession

__all__ = ["GroupStore"]


class GroupStore(BaseStore):
    """See ScriptStore. All of the script's process groups share one client."""

    def __init__(self, client: "Client", session: "ScriptSession") -> None:
        super().__init__(client, "torch.distributed")
        self._session = session
        self._groups: list[GeomxProcessGroup] = []

    @property
    def failure(self) -> BaseException | None:
        """See ScriptStore."""
        differences = (group.rounds.difference for group in self._groups)
        return next((error for error in differences if error is not None), self._client.failure)

    def cause(self, error: BaseException) -> BaseException | None:
        """See ScriptStore."""
        return self.failure

    @property
    def calls(self) -> int:
        """See ScriptStore; the rounds begun so far with more than single figures."""
        return sum(group.rounds.large for group in self._groups)

    def be_patient(self, timeout: timedelta | None) -> None:
        """Let collective operations take as long without progress as the script allows, if that is more than the job's
        limit.
        """
        if timeout is not None:
            self._client.control.be_patient(min(timeout.total_seconds(), MAX_PATIENCE))

    def new_group(self) -> GeomxProcessGroup:
        """A process group; all workers make the same ones in the same order."""
        group = GeomxProcessGroup(self._client, self._session, len(self._groups))
        self._groups.append(group)
        return group

    def settle(self) -> None:
        """See ScriptStore."""
        self._client.settle()
