"""`--reduce torch --shards`: fully_shard divides the model, and each shard has a worker that exchanges it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from geomx_cli.core.errors import InvalidSettings, TrainingFailed
from geomx_cli.core.futures import after
from geomx_cli.runtime.frontends.torch.backward_pass import BackwardPass
from geomx_cli.runtime.frontends.torch.checks import DIGEST, to_first_worker
from geomx_cli.runtime.frontends.torch.model_state import Broadcast, ModelState, PartyBroadcast, Shard
from geomx_cli.runtime.frontends.torch.party_group import PartyGroup
from geomx_cli.runtime.frontends.torch.party_reduction import GroupReduction
from geomx_cli.runtime.frontends.torch.tensors import local, set_gradient

if TYPE_CHECKING:
    from concurrent.futures import Future

    from geomx_cli.contract.settings import Settings
    from geomx_cli.ps.arrays import Array
    from geomx_cli.runtime.frontends.torch.backward_pass import Member
    from geomx_cli.runtime.script import Session

__all__ = ["ShardReduction", "check_same_round"]

_MOST = 1 << 20
"""A number above a job's number of workers."""


class ShardReduction(GroupReduction):
    """`--reduce torch --shards`: fully_shard divides the model over the party's workers and reduces its gradients.

    Worker `rank` of a party holds shard `rank % count`, as in a mesh of (replicate, shard). The first worker that holds
    a shard is its leader, which exchanges it with the servers. The default group of torch.distributed has the party's
    workers. Meshes consist of these workers, and fully_shard reduces gradients in this group.
    """

    local_to = "party"

    def __init__(self, session: "Session", settings: "Settings") -> None:
        super().__init__(session, settings)
        self._party = settings.party
        self._index, self._count = self.rank % int(settings.number("shards")), int(settings.number("shards"))
        self.shard = Shard(self._index, self._count, self.group.size)
        self.peers = self.group.part(range(self._index, self.group.size, self._count), f"shard{self._index}")
        self.weight = self.group.size
        self.passes = BackwardPass(self.weight)
        self.group.publish()

    def cause(self, error: BaseException) -> BaseException | None:
        """See Reduction. fully_shard raises failures in the party's group unchanged."""
        return self.group.lost(error) if isinstance(error, RuntimeError) else None

    def holders(self) -> tuple[int, int]:
        """See Reduction."""
        return self.num_all_workers // self._count, self.group.size // self._count

    def gather(self, name: str, digest: "Array") -> "Future[Array] | None":
        """See Reduction. A shard's leader speaks for its party, whose gradients fully_shard has reduced."""
        own = np.concatenate([digest, np.array([self.global_rank], np.int32).view(np.uint8)])
        gathered = to_first_worker(self.member, name, own)
        return None if gathered is None else after([gathered], lambda: self._by_global_rank(gathered.result()))

    def _by_global_rank(self, rows: "Array") -> "Array":
        table = np.zeros((self.num_all_workers, DIGEST), np.uint8)
        table[np.ascontiguousarray(rows[:, DIGEST:]).view(np.int32).reshape(-1)] = rows[:, :DIGEST]
        return table

    def check(self, optimizer: Any, buffers: str, algorithm: str, *, by_gradients: bool) -> None:
        """See Reduction."""
        if buffers != "local":
            what = f"buffers={buffers!r} with --shards: the buffers of a party's workers differ"
            raise InvalidSettings(what, 'leave it at "local"')
        super().check(optimizer, buffers, algorithm, by_gradients=by_gradients)

    def broadcasts(self, source: int | None = None) -> tuple[Broadcast, ...]:
        """See Reduction. source: by default the first party's leader of this shard."""
        between = self._between(source) if self.client is not None else None
        whole = PartyBroadcast(self.group, between if self.group.leads else None)
        return PartyBroadcast(self.peers, between), whole

    def own_keys(self) -> Broadcast:
        """See Reduction."""
        return self._between(None)

    def _between(self, source: int | None) -> Broadcast:
        return Broadcast(self.member, self._index if source is None else source, self._index)

    def share_gradients(self, parameters: Sequence[Any], round_: int, workers: int) -> None:
        """See Reduction. Raises TrainingFailed if the party's shards then belong to different rounds."""
        own = [index for index, parameter in enumerate(parameters) if parameter.grad is not None]
        found, workers = self.announce(own if self.client is not None else (), len(parameters), workers)
        for index in found:
            if parameters[index].grad is None:
                set_gradient(parameters[index], torch.empty_like(local(parameters[index])))
        self.copy(parameters[index].grad for index in found)
        self.check_round(round_, workers)

    def step(self, member: "Member") -> Sequence[int]:
        """See Reduction. With fully_shard, all optimizers of a party take the same step, each for its own shard."""
        return range(self.group.size)

    def _device_of(self, part: Any) -> Any:
        if part.is_cuda:
            self.peers.use_gpus()
        return part.device

    def check_round(self, round_: int, workers: int = 0) -> None:
        """See Reduction."""
        check_same_round(self.group, round_, workers)

    def prepare_end(self, calls: int) -> None:
        """See Reduction. Raises InvalidSettings if the party's workers have begun different numbers of rounds."""
        super().prepare_end(calls)
        rounds = self.group.gather(calls)
        if len(set(rounds)) > 1:
            what = f"the workers of party {self._party} have begun {', '.join(map(str, rounds))} rounds"
            raise InvalidSettings(what, "with --shards a party's workers make the same passes and steps")

    def newest(
        self, state: ModelState, *, is_newest: bool, took_part: bool, has_failed: bool
    ) -> tuple[tuple[Broadcast, ...], bool]:
        """See Reduction. The leaders of all shards elect the same party."""
        # One number for both, so that the party gathers once: bit 0 is a failure, bit 1 an older model.
        values = self.group.gather(has_failed + 2 * (not is_newest))
        failed, all_newest = any(value & 1 for value in values), not any(value & 2 for value in values)
        elected = None
        if self.client is not None:
            elected = self._elect(state, is_newest=is_newest, has_failed=failed)
        return self.broadcasts(elected), all_newest and not failed


def check_same_round(group: PartyGroup, round_: int, workers: int) -> None:
    """Raise TrainingFailed unless all workers of the group are in this round, with so many workers. Blocks."""
    values = group.gather(round_ * _MOST + workers, patient=True)
    if len(set(values)) > 1:
        described = [f"round {value // _MOST} of {value % _MOST} workers" for value in values]
        what = f"the workers of a party hold shards of different rounds: {', '.join(described)}"
        raise TrainingFailed(what, "let all workers of a party make the same passes and steps")
