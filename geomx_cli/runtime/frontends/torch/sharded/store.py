"""A PyTorch script's part in a job whose parties divide the model by fully_shard (`--reduce torch --shards`)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.futures import after
from geomx_cli.runtime.frontends.torch.backward_pass import BackwardPass
from geomx_cli.runtime.frontends.torch.batch_check import DIGEST, BatchCheck, to_first_worker
from geomx_cli.runtime.frontends.torch.broadcast import Broadcast
from geomx_cli.runtime.frontends.torch.local import LocalRounds, SampleCount
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.party.steps import LeaderModel
from geomx_cli.runtime.frontends.torch.party.store import GroupedStore
from geomx_cli.runtime.frontends.torch.sharded.gradients import ReplicaGradients, ShardGradients, ShardSteps
from geomx_cli.runtime.frontends.torch.sharded.shard import Shard, ShardedState
from geomx_cli.runtime.frontends.torch.synchronise import Chosen, refuse_closures
from geomx_cli.runtime.frontends.torch.synchroniser import Synchroniser
from geomx_cli.runtime.frontends.torch.wrapping_store import finish_rounds

if TYPE_CHECKING:
    from concurrent.futures import Future

    from geomx_cli.ps.arrays import Array
    from geomx_cli.runtime.script import Session
    from geomx_cli.runtime.settings import Settings

__all__ = ["ShardedStore", "synchronise"]


class ShardedStore(GroupedStore):
    """See GroupedStore. The default group of torch.distributed is that of the party's workers: meshes are made of it,
    and fully_shard reduces gradients there.
    """

    def __init__(self, session: "Session", settings: "Settings") -> None:
        super().__init__(session, settings)
        self._shard = Shard(self._group, int(settings.number("shards")), self._client)
        self._group.publish()
        self._backward = BackwardPass()

    def cause(self, error: BaseException) -> BaseException | None:
        """See ScriptStore; fully_shard raises what fails in the party's group as it is."""
        return self.failure or (self._group.lost(error) if isinstance(error, RuntimeError) else None)

    def _state(self, model: Any, optimizer: Any, prefix: str) -> ModelState:
        return ShardedState(model, optimizer, prefix, self._shard)

    def _synchronise(
        self, state: ModelState, model: Any, optimizer: Any, buffers: str, check: BatchCheck
    ) -> Synchroniser:
        return synchronise(self._settings, self._shard, state, model, optimizer, buffers, self._backward, check)

    def _gather(self, name: str, digest: "Array") -> "Future[Array] | None":
        """See WrappingStore; a shard's leader speaks for its party, whose gradients fully_shard has reduced."""
        assert self._client is not None
        own = np.concatenate([digest, np.array([self.global_rank], np.int32).view(np.uint8)])
        gathered = to_first_worker(self._client, name, own)
        return None if gathered is None else after([gathered], lambda: self._by_global_rank(gathered.result()))

    def _by_global_rank(self, rows: "Array") -> "Array":
        table = np.zeros((self.num_all_workers, DIGEST), np.uint8)
        table[np.ascontiguousarray(rows[:, DIGEST:]).view(np.int32).reshape(-1)] = rows[:, :DIGEST]
        return table

    def _holders(self) -> tuple[int, int]:
        """See WrappingStore."""
        return self.num_all_workers // self._shard.count, self._group.size // self._shard.count

    def _finish(self, wrapped: Sequence[Synchroniser]) -> None:
        if self.failure is not None:
            raise self.failure
        rounds = self._group.gather(self.calls)
        if len(set(rounds)) > 1:
            what = f"the workers of party {self._settings.party} have begun {', '.join(map(str, rounds))} rounds"
            raise InvalidSettings(what, "with --shards a party's workers make the same passes and steps")
        finish_rounds(wrapped)


# Attaches the job's algorithm to the optimizer of a model that fully_shard has divided.

def synchronise(
    settings: "Settings", shard: "Shard", state: ModelState, model: Any, optimizer: Any, buffers: str,
    backward: BackwardPass, check: BatchCheck,
) -> Synchroniser:  # fmt: skip
    """See frontends.torch.synchronise."""
    if buffers != "local":
        what = f"buffers={buffers!r} with --shards: the buffers of a party's workers differ"
        raise InvalidSettings(what, 'leave it at "local"')
    chosen = Chosen.of(settings, state, buffers)
    refuse_closures(optimizer, "--reduce torch", "leave --reduce out")
    client = shard.client
    if client is not None:
        chosen.set_servers_up(client, optimizer)
    state.begin(*shard.broadcasts())
    if client is not None:
        chosen.declare(Broadcast(client, shard.index, shard.index), state)
        client.control.barrier("all")
    if chosen.exchanges_gradients:
        if client is None:
            return ReplicaGradients(shard, state, optimizer, backward)
        return ShardGradients(client, shard, state, optimizer, backward, check)
    samples = SampleCount(model) if settings.text("weight") == "samples" else None
    weights, rounds = LeaderModel(state, {}), None
    if client is not None:
        rounds = LocalRounds(client, state, chosen.algorithm.worker(client, weights, chosen.config))
    return ShardSteps(shard, state, weights, rounds, samples, optimizer, check)
