"""A shard of a model, and the workers of a party that hold it: its leader, which exchanges it with the servers, and
replicas.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from geomx_cli.core.errors import InvalidSettings, TrainingFailed
from geomx_cli.runtime.frontends.torch.broadcast import Broadcast
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.party.broadcast import PartyBroadcast
from geomx_cli.runtime.frontends.torch.tensor_views import is_divided, local

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.frontends.torch.party.group import PartyGroup

__all__ = ["Shard", "ShardedState", "check_layout"]

# The tensors of a model that fully_shard has divided over the workers of a party.


class ShardedState(ModelState):
    """See ModelState. trained: those of which this worker's shard has elements; the prefix of keys tells the shard.

    Raises InvalidSettings for a model that fully_shard has not divided into as many shards as the job has in a party,
    over all of its workers.
    """

    def __init__(self, model: Any, optimizer: Any, prefix: str, shard: "Shard") -> None:
        self._shard = shard
        super().__init__(model, optimizer, f"{prefix}shard{shard.index}/")
        self.trained = {name: parameter for name, parameter in self.trained.items() if local(parameter).numel()}
        if not self.trained:
            what = f"shard {shard.index} has no element of the parameters that are trained"
            raise InvalidSettings(what, "divide the model into fewer shards")

    def _check_layout(self, name: str, parameter: Any) -> None:
        """See ModelState."""
        check_layout(name, parameter, self._shard.party.size, self._shard.count)


def check_layout(name: str, parameter: Any, workers: int, shards: int) -> None:
    """Raise InvalidSettings unless fully_shard has divided a parameter into so many shards, over a party of workers."""
    if not is_divided(parameter):
        what = f"parameter {name} is not divided, in a job with --shards {shards}"
        raise InvalidSettings(what, "call fully_shard on the whole model before the optimizer is created")
    mesh = parameter.device_mesh.mesh
    if mesh.shape[-1] != shards:
        what = f"parameter {name} is divided into {mesh.shape[-1]} shards, in a job with --shards {shards}"
        raise InvalidSettings(what, f"launch with --shards {mesh.shape[-1]}, or give fully_shard another mesh")
    # Types by name: other placements, as those of tensor parallelism, derive from these.
    kinds = [type(item).__name__ for item in parameter.placements]
    if kinds not in (["Shard"], ["Replicate", "Shard"]) or mesh.flatten().tolist() != list(range(workers)):
        what = f"parameter {name} is placed as {parameter.placements} on a mesh of shape {tuple(mesh.shape)}"
        hint = f"use fully_shard alone, on a mesh of the party's {workers} workers: (shard) or (replicate, shard)"
        raise InvalidSettings(what, hint)


_MOST = 1 << 20
"""Above the number of a job's workers."""


class Shard:
    """See the module. Worker `rank` of a party holds shard `rank % count`, as in a mesh of (replicate, shard).

    index: of this worker's, of `count`. party: the group of all of the party's workers. holders: that of those which
    hold this shard, of which rank 0 is the leader. client: the leader's, None in replicas. All workers of a party make
    the same calls in the same order; for the training thread.
    """

    def __init__(self, party: "PartyGroup", count: int, client: "Client | None") -> None:
        self.party = party
        self.count = count
        self.index = party.rank % count
        self.holders = party.part(range(self.index, party.size, count), f"shard{self.index}")
        self.client = client

    def broadcasts(self, source: int | None = None) -> tuple[PartyBroadcast, PartyBroadcast]:
        """Copies of this shard from the leader with this rank among all leaders, by default the first party's, to all
        workers that hold it; and copies of what is not divided, from the first worker of that party to all workers.
        """
        between = None
        if self.client is not None:
            between = Broadcast(self.client, self.index if source is None else source, self.index)
        whole = PartyBroadcast(self.party, between if self.party.leads else None)
        return PartyBroadcast(self.holders, between), whole

    def announce(self, changed: Iterable[int], count: int, number: int) -> tuple[list[int], int]:
        """Return the numbers of the tensors that have changed in the leader, of `count`, and its `number`."""
        marks = torch.zeros(count + 1, dtype=torch.int64, device="cpu")
        marks[[*changed]] = 1
        marks[-1] = number
        if self.holders.size > 1:
            self.holders.wait(self.holders.send(marks))
        *given, number = marks.tolist()
        return [index for index, mark in enumerate(given) if mark], number

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def copy(self, tensors: Iterable[Any]) -> None:
        """Copy this shard of these tensors from the leader to the replicas."""
        for tensor in tensors if self.holders.size > 1 else ():
            part = local(tensor)
            if part.is_cuda:
                self.holders.use_gpus()
            copy = part.contiguous()
            self.holders.wait(self.holders.send(copy))
            if copy is not part:
                part.copy_(copy)

    def agree(self, *, has_failed: bool, is_newest: bool = True) -> tuple[bool, bool]:
        """Whether the last backward pass has failed in any of the party's workers, and whether the model is the newest
        in the leaders of shards, who alone know that; the other workers say True. Blocks.
        """
        # One number for both, so that the party gathers once: bit 0 is the failure, bit 1 an older model.
        values = self.party.gather(has_failed + 2 * (not is_newest))
        return any(value & 1 for value in values), not any(value & 2 for value in values)

    def check(self, round_: int, weight: int = 0) -> None:
        """Check that all shards of the party are of this round, and from as many workers. Raises TrainingFailed."""
        values = self.party.gather(round_ * _MOST + weight, patient=True)
        if len(set(values)) > 1:
            described = [f"round {value // _MOST} of {value % _MOST} workers" for value in values]
            what = f"the workers of a party hold shards of different rounds: {', '.join(described)}"
            raise TrainingFailed(what, "let all workers of a party make the same passes and steps")
