"""The part in the job of a script that uses torch.distributed."""

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from geomx_cli.ps.cluster.bodies import MAX_PATIENCE
from geomx_cli.runtime.base_store import BaseStore
from geomx_cli.runtime.frontends.torch.group_rounds import GroupRounds, LoneRounds
from geomx_cli.runtime.frontends.torch.process_group import GeomxProcessGroup
from geomx_cli.runtime.frontends.torch.skipped_batches import SkippedBatches

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.control_client import ControlClient
    from geomx_cli.runtime.frontends import ScriptSession

__all__ = ["GroupStore"]


class GroupStore(BaseStore):
    """See ScriptStore. All of the script's process groups share one client."""

    def __init__(self, client: "Client", session: "ScriptSession") -> None:
        super().__init__(client, "torch.distributed")
        self._session = session
        self._groups: list[GeomxProcessGroup] = []  # of all workers
        self._encodes = any(client.settings.text(name) not in ("", "none") for name in ("compress", "compress_lan"))

    @property
    def control(self) -> "ControlClient":
        """The client's requests besides rounds."""
        return self._client.control

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
        """See ScriptStore; elements that the script has given to collective operations."""
        return sum(group.exchanged for group in self._groups)

    def be_patient(self, timeout: timedelta | None) -> None:
        """Let collective operations take as long without progress as the script allows, if that is more than the job's
        limit.
        """
        if timeout is not None:
            self._client.control.be_patient(min(timeout.total_seconds(), MAX_PATIENCE))

    def new_group(self, store: Any, _rank: int, size: int, *_: Any) -> GeomxProcessGroup:
        """A process group of `size` workers: all, which make the same ones in the same order, or this one alone. store:
        a store for its values.
        """
        if size == 1 and self._client.num_all_workers > 1:
            return GeomxProcessGroup(LoneRounds(), self._session, store, encodes=False)
        batches = SkippedBatches(self._session, self._client.global_rank)
        rounds = GroupRounds(self._client, len(self._groups), batches)
        self._groups.append(GeomxProcessGroup(rounds, self._session, store, encodes=self._encodes))
        return self._groups[-1]

    def settle(self) -> None:
        """See ScriptStore."""
        self._client.settle()
        rounds = [group.rounds for group in self._groups if isinstance(group.rounds, GroupRounds)]
        for told in [each.made.leave_behind() for each in rounds]:
            told.result()
