"""A PyTorch script's part in the job as a member of the parameter server."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from geomx_cli.runtime.frontends.torch.backward_pass import BackwardPass
from geomx_cli.runtime.frontends.torch.batch_check import BatchCheck, to_first_worker
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.server_optimizer import ServersOptimizer
from geomx_cli.runtime.frontends.torch.synchronise import synchronise
from geomx_cli.runtime.frontends.torch.synchroniser import Synchroniser
from geomx_cli.runtime.frontends.torch.wrapping_store import WrappingStore, finish_rounds
from geomx_cli.runtime.script.base_store import BaseStore

if TYPE_CHECKING:
    from concurrent.futures import Future

    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.cluster.bodies import Body
    from geomx_cli.runtime.frontends import ScriptSession

__all__ = ["Store"]


class Store(BaseStore, WrappingStore):
    """See ScriptStore. For the training thread."""

    def __init__(self, client: "Client", session: "ScriptSession") -> None:
        BaseStore.__init__(self, client, "torch")
        WrappingStore.__init__(self, session)
        self._backward = BackwardPass()
        self._on_servers = ServersOptimizer()

    @property
    def failure(self) -> BaseException | None:
        """See ScriptStore."""
        return self._client.failure

    def _synchronise(
        self, state: ModelState, model: Any, optimizer: Any, buffers: str, check: BatchCheck
    ) -> Synchroniser:
        return synchronise(
            self._client, state, model, optimizer, buffers, self._backward, self._on_servers, check
        )

    def _gather(self, name: str, digest: "Array") -> "Future[Array] | None":
        return to_first_worker(self._client, name, digest)

    def _compare(self, row: "Body") -> None:
        self._client.control.compare(row)

    def _holders(self) -> tuple[int, int]:
        return self.num_all_workers, 1

    def _finish(self, wrapped: Sequence[Synchroniser]) -> None:
        finish_rounds(wrapped)
