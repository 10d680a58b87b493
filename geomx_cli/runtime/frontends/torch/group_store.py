"""The part in the job of a script that uses torch.distributed."""

from typing import TYPE_CHECKING, Any

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
        """See WrappingStore. Raises InvalidSettings where the process group averages gradients."""
        if self.exchanges_gradients:
            what = "geomx_cli.torch.wrap in a script with torch.distributed, whose gradients the process group averages"
            hint = f"use either with --algo {self.option('algo')}; wrap is for algorithms that exchange weights"
            raise InvalidSettings(what, hint)
        super().wrap(model, optimizer, buffers)

    def settle(self) -> None:
        """See ScriptStore."""
        super().settle()
        self._client.settle()
