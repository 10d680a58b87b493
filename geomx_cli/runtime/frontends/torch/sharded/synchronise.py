"""Attaches the job's algorithm to the optimizer of a model that fully_shard has divided."""

from typing import TYPE_CHECKING, Any

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.backward_pass import BackwardPass
from geomx_cli.runtime.frontends.torch.batch_check import BatchCheck
from geomx_cli.runtime.frontends.torch.broadcast import Broadcast
from geomx_cli.runtime.frontends.torch.local import LocalRounds, SampleCount
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.party.steps import LeaderModel
from geomx_cli.runtime.frontends.torch.sharded.gradients import ReplicaGradients, ShardGradients
from geomx_cli.runtime.frontends.torch.sharded.steps import ShardSteps
from geomx_cli.runtime.frontends.torch.synchronise import Chosen, refuse_closures
from geomx_cli.runtime.frontends.torch.synchroniser import Synchroniser

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends.torch.sharded.shard import Shard
    from geomx_cli.runtime.settings import Settings

__all__ = ["synchronise"]


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
