"""The part in the job of a script that uses torch.distributed."""

from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.group_rounds import GroupRounds, LoneRounds
from geomx_cli.runtime.frontends.torch.process_group import GeomxProcessGroup
from geomx_cli.runtime.frontends.torch.skipped_batches import SkippedBatches
from geomx_cli.runtime.frontends.torch.store import Store

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.control_client import ControlClient
    from geomx_cli.runtime.frontends import ScriptSession

__all__ = ["GroupStore"]


class GroupStore(Store):
    """See ScriptStore. All of the script's process groups share one client. Where the algorithm exchanges gradients,
    DistributedDataParallel does; where it exchanges weights, the optimizers that the script wraps do.
    """

    def __init__(self, client: "Client", session: "ScriptSession") -> None:
        super().__init__(client, session)
        self._groups: list[GeomxProcessGroup] = []  # of all workers
        self._encodes = any(client.settings.text(name) not in ("", "none") for name in ("compress", "compress_lan"))

    @property
    def control(self) -> "ControlClient":
        """The client's requests besides rounds."""
        return self._client.control

    @property
    def type(self) -> str:
        """See BaseStore."""
        return "torch.distributed"

    @property
    def failure(self) -> BaseException | None:
        """See ScriptStore."""
        differences = (group.rounds.difference for group in self._groups)
        return next((error for error in differences if error is not None), self._client.failure)

    @property
    def calls(self) -> int:
        """See ScriptStore; elements that the script has given to collective operations, and rounds of optimizers."""
        return super().calls + sum(group.exchanged for group in self._groups)

    def new_group(self, store: Any, _rank: int, size: int, *_: Any) -> GeomxProcessGroup:
        """A process group of `size` workers: all, which make the same ones in the same order, or this one alone. store:
        a store for its values.
        """
        if size == 1 and self._client.num_all_workers > 1:
            return GeomxProcessGroup(LoneRounds(), self._session, store, encodes=False)
        batches = SkippedBatches(self._session, self._client.global_rank)
        rounds = GroupRounds(self._client, len(self._groups), batches)
        adds = self.exchanges_gradients
        self._groups.append(GeomxProcessGroup(rounds, self._session, store, encodes=self._encodes, adds=adds))
        return self._groups[-1]

    def wrap(self, model: Any, optimizer: Any, buffers: str) -> None:
        """See WrappingStore. Where the algorithm exchanges gradients, DistributedDataParallel does, and this has no
        effect; raises InvalidSettings for a model without it.
        """
        if not self.exchanges_gradients:
            super().wrap(model, optimizer, buffers)
        elif not any(isinstance(item, DistributedDataParallel) for item in model.modules()):
            what = "geomx_cli.torch.wrap of a model without DistributedDataParallel, beside init_process_group"
            raise InvalidSettings(what, "wrap what DistributedDataParallel returns; or leave init_process_group out")

    def settle(self) -> None:
        """See ScriptStore."""
        super().settle()
        self._client.settle()
        for group in self._groups:
            if isinstance(group.rounds, GroupRounds):
                group.rounds.made.leave_behind()
