"""ESync's worker side in a script that may save its state."""

from typing import TYPE_CHECKING

from geomx_cli.runtime.algorithms._esync_client import EsyncClient
from geomx_cli.runtime.training.worker_algorithm import Contributed, State

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.training.worker_state import WorkerState

__all__ = ["SavedEsyncClient"]


class SavedEsyncClient(EsyncClient):
    """See EsyncClient. It saves how many steps a round has, which follows from time, before they are contributed.

    A script of which an earlier life was killed calls the first `begin` as always: `load` has begun the round.
    """

    def __init__(self, client: "Client", recovery: "WorkerState") -> None:
        super().__init__(client)
        self._recovery = recovery
        self._has_begun = False  # by `load`

    def begin(self, contributed: Contributed | None = None) -> None:
        """See EsyncClient."""
        if self._has_begun:
            self._has_begun = False
        else:
            super().begin(contributed)

    def step(self) -> bool:
        """See EsyncClient."""
        ready = super().step()
        if ready:
            self._recovery.contribute(self.rounds, Contributed(self.steps, "step"))
        return ready

    def leave(self) -> None:
        """See EsyncClient."""
        self._recovery.contribute(self.rounds, Contributed(self.steps, "drain"))
        super().leave()

    def load(self, state: State) -> None:
        """See EsyncClient; with `continue_round`."""
        is_first = not self.rounds
        super().load(state)
        self._has_begun = is_first and self.rounds > 0
        self.continue_round(self._recovery.contributed(self.rounds))
