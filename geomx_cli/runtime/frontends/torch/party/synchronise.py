"""Attaches the job's algorithm to a script's optimizer, in a party that adds its gradients itself."""

from typing import TYPE_CHECKING, Any

from geomx_cli.runtime.frontends.torch.batch_check import BatchCheck
from geomx_cli.runtime.frontends.torch.broadcast import Broadcast
from geomx_cli.runtime.frontends.torch.local import LocalRounds, SampleCount
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.party.broadcast import PartyBroadcast
from geomx_cli.runtime.frontends.torch.party.gradients import PartyGradients
from geomx_cli.runtime.frontends.torch.party.steps import LeaderModel, PartySteps
from geomx_cli.runtime.frontends.torch.synchronise import Chosen, refuse_closures
from geomx_cli.runtime.frontends.torch.synchroniser import Synchroniser

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.frontends.torch.party.operations import Operations
    from geomx_cli.runtime.settings import Settings

__all__ = ["synchronise"]


def synchronise(
    settings: "Settings", operations: "Operations", client: "Client | None", state: ModelState, model: Any,
    optimizer: Any, buffers: str, check: BatchCheck,
) -> Synchroniser:  # fmt: skip
    """See frontends.torch.synchronise. client: the leader's, None in other workers."""
    chosen = Chosen.of(settings, state, buffers)
    refuse_closures(optimizer, "--reduce torch", "leave --reduce out")
    if client is not None:
        chosen.set_servers_up(client, optimizer)
    between = None if client is None else Broadcast(client)
    state.begin(PartyBroadcast(operations.group, between))
    if client is not None and between is not None:
        chosen.declare(between, state)
        client.control.barrier("all")
    operations.choose_device(parameter.device for parameter in state.trained.values())
    if chosen.exchanges_gradients:
        return PartyGradients(operations, client, state, optimizer, list(chosen.statistics.values()), check)
    samples = SampleCount(model) if settings.text("weight") == "samples" else None
    weights, rounds = LeaderModel(state, chosen.statistics), None
    if client is not None:
        rounds = LocalRounds(client, state, chosen.algorithm.worker(client, weights, chosen.config))
    return PartySteps(operations, client, state, weights, rounds, samples, optimizer, chosen.statistics, check)
