"""The part in the job of a script that uses torch.distributed."""

from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.process_group import GeomxProcessGroup
from geomx_cli.runtime.frontends.torch.store import Store

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.frontends import ScriptSession

__all__ = ["GroupStore"]


class GroupStore(Store):
    """See ScriptStore. All of the script's process groups share one client. Where the algorithm exchanges gradients,
    DistributedDataParallel does; where it exchanges weights, the optimizers that the script wraps do.
    """

    def __init__(self, client: "Client", session: "ScriptSession") -> None:
        super().__init__(client, session)
        self._groups: list[GeomxProcessGroup] = []

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
        """See ScriptStore; the rounds begun so far with more than single figures."""
        return super().calls + sum(group.rounds.large for group in self._groups)

    def new_group(self) -> GeomxProcessGroup:
        """A process group; all workers make the same ones in the same order."""
        group = GeomxProcessGroup(self._client, self._session, len(self._groups), adds=self.exchanges_gradients)
        self._groups.append(group)
        return group

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
