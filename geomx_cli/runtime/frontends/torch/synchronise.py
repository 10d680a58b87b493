"""Attaches the job's algorithm to a script's optimizer."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.broadcast import Broadcast
from geomx_cli.runtime.frontends.torch.buffer_means import BUFFERS
from geomx_cli.runtime.frontends.torch.gradients import GradientSynchroniser
from geomx_cli.runtime.frontends.torch.local import LocalSynchroniser
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.script_model import ScriptModel
from geomx_cli.runtime.frontends.torch.server_optimizer import server_optimizer
from geomx_cli.runtime.frontends.torch.server_steps import ServerSynchroniser
from geomx_cli.runtime.frontends.torch.synchroniser import Synchroniser
from geomx_cli.runtime.momentum_check import MomentumCheck
from geomx_cli.runtime.training.stop_vote import STOP
from geomx_cli.runtime.training.train_config import TrainConfig

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client

__all__ = ["synchronise"]


def synchronise(client: "Client", state: ModelState, model: Any, optimizer: Any, buffers: str) -> Synchroniser:
    """Set the servers up, give all workers the initial tensors, and register the hooks; blocks until all workers have
    called this. See geomx_cli.torch.wrap.
    """
    config = TrainConfig.from_options(client.settings.options)
    about = plugins.algorithms()[config.algorithm]
    algorithm: Any = plugins.find("algorithm", config.algorithm)
    statistics = _statistics(state, buffers, about.name)
    exchanges_gradients = about.exchanges == "gradients"
    if about.asynchronous:
        name, params = server_optimizer(optimizer)
        if client.global_rank == 0:
            client.control.set_optimizer(name, params)
    elif not exchanges_gradients:
        config = replace(config, options={**config.options, "sync_stats": bool(statistics)})
        outer = algorithm.server_optimizer(config)
        if outer is not None and client.global_rank == 0:
            client.control.set_optimizer(*outer)
    if exchanges_gradients:
        momentum = max(float(group.get("momentum", 0.0)) for group in optimizer.param_groups)
        MomentumCheck(client).use_optimizer(momentum, on_servers=about.asynchronous)
    broadcast = Broadcast(client)
    state.begin(broadcast)
    broadcast.arrays({f"{state.prefix}{STOP}": np.zeros(1, np.float32)})
    sizes = {key: tensor.numel() for key, tensor in statistics.items()}
    if statistics and exchanges_gradients:
        sizes = {f"{state.prefix}{BUFFERS}": sum(sizes.values())}
    broadcast.arrays({key: np.zeros(size, np.float32) for key, size in sizes.items()})
    client.control.barrier("all")
    if about.asynchronous:
        return ServerSynchroniser(client, state, optimizer, params)
    if exchanges_gradients:
        return GradientSynchroniser(client, state, optimizer, list(statistics.values()))
    weights = ScriptModel(state, statistics)
    return LocalSynchroniser(client, state, algorithm.worker(client, weights, config), model, optimizer)


def _statistics(state: ModelState, buffers: str, algorithm: str) -> dict[str, Any]:
    """The buffers to average, by key."""
    if buffers == "local":
        return {}
    if buffers != "mean":
        raise InvalidSettings(f"there is no buffers={buffers!r}", 'write "local" or "mean"')
    if algorithm not in ("fsa", "sync", "hfa", "local"):
        what = f'buffers="mean" with --algo {algorithm}, whose servers do not average'
        raise InvalidSettings(what, 'leave it at "local", or train with fsa, sync or hfa')
    return {f"{state.prefix}{name}": tensor for name, tensor in state.buffers.items() if tensor.is_floating_point()}
