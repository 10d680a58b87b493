"""The tensors of a model that fully_shard has divided over the workers of a party."""

from typing import TYPE_CHECKING, Any

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.tensor_parts import is_divided, local

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends.torch.sharded.shard import Shard

__all__ = ["ShardedState", "check_layout"]


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
