"""Attaches the job's algorithm to a script's optimizer."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.backward_pass import BackwardPass
from geomx_cli.runtime.frontends.torch.batch_check import BatchCheck
from geomx_cli.runtime.frontends.torch.broadcast import Broadcast
from geomx_cli.runtime.frontends.torch.buffer_broadcast import BUFFERS
from geomx_cli.runtime.frontends.torch.gradients import GradientSynchroniser
from geomx_cli.runtime.frontends.torch.local import LocalSynchroniser
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.script_model import ScriptModel
from geomx_cli.runtime.frontends.torch.server_optimizer import ServersOptimizer
from geomx_cli.runtime.frontends.torch.server_steps import ServerSynchroniser
from geomx_cli.runtime.frontends.torch.synchroniser import Synchroniser
from geomx_cli.runtime.script.momentum_check import MomentumCheck
from geomx_cli.runtime.training.stop_vote import ELECTION, STOP
from geomx_cli.runtime.training.train_config import TrainConfig

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.cluster.config import NodeSettings

__all__ = ["Chosen", "refuse_closures", "synchronise"]


def synchronise(
    client: "Client", state: ModelState, model: Any, optimizer: Any, buffers: str, backward: BackwardPass,
    on_servers: ServersOptimizer, check: BatchCheck,
) -> Synchroniser:  # fmt: skip
    """Set the servers up, give all workers the initial tensors, and register the hooks; blocks until all workers have
    called this. See geomx_cli.torch.wrap.

    backward, on_servers: shared by the optimizers of a script. check: compares what workers compute with this one.
    """
    chosen = Chosen.of(client.settings, state, buffers)
    asynchronous = chosen.about.asynchronous
    if asynchronous:
        on_servers.take(client, optimizer)
    if chosen.exchanges_gradients:
        refuse_closures(optimizer, f"--algo {chosen.about.name}", "an algorithm that exchanges weights, as --algo hfa")
    chosen.set_servers_up(client, optimizer)
    broadcast = Broadcast(client)
    state.begin(broadcast)
    chosen.declare(broadcast, state)
    client.control.barrier("all")
    if asynchronous:
        return ServerSynchroniser(client, state, optimizer, check)
    if chosen.exchanges_gradients:
        return GradientSynchroniser(client, state, optimizer, list(chosen.statistics.values()), backward, check)
    weights = ScriptModel(state, chosen.statistics)
    part = chosen.algorithm.worker(client, weights, chosen.config)
    return LocalSynchroniser(client, state, part, model, optimizer, check)


def refuse_closures(optimizer: Any, job: str, instead: str) -> None:
    """Raise InvalidSettings for an optimizer whose step runs as many backward passes as this worker's loss requires."""
    if isinstance(optimizer, torch.optim.LBFGS):
        what = f"LBFGS with {job}: how often it computes gradients depends on each worker's own loss"
        raise InvalidSettings(what, f"use another optimizer, or {instead}")


@dataclass(frozen=True)
class Chosen:
    """The job's algorithm, for one wrapped optimizer. statistics: the buffers to average, by key."""

    config: TrainConfig
    about: plugins.Algorithm
    algorithm: Any
    statistics: dict[str, Any]

    @classmethod
    def of(cls, settings: "NodeSettings", state: ModelState, buffers: str) -> "Chosen":
        """Raises InvalidSettings for `buffers` that the algorithm cannot average."""
        config = TrainConfig.from_options(settings.options)
        about = plugins.algorithms()[config.algorithm]
        algorithm: Any = plugins.find("algorithm", config.algorithm)
        by_gradients = about.exchanges == "gradients"
        averages = not about.asynchronous if by_gradients else algorithm.server_optimizer(config) is None
        statistics = _statistics(state, buffers, about.name, averages=averages)
        if not by_gradients:
            config = replace(config, options={**config.options, "sync_stats": bool(statistics)})
        return cls(config, about, algorithm, statistics)

    @property
    def exchanges_gradients(self) -> bool:
        """Whether workers send gradients, not weights."""
        return self.about.exchanges == "gradients"

    def set_servers_up(self, client: "Client", optimizer: Any) -> None:
        """Give them the algorithm's own optimizer, and check the script's."""
        if self.exchanges_gradients:
            momentum = max(float(group.get("momentum", 0.0)) for group in optimizer.param_groups)
            MomentumCheck(client).use_optimizer(momentum, on_servers=self.about.asynchronous)
            return
        outer = self.algorithm.server_optimizer(self.config)
        if outer is not None and client.global_rank == 0:
            client.control.set_optimizer(*outer)

    def declare(self, broadcast: Broadcast, state: ModelState) -> None:
        """Declare the keys beside those of trained tensors."""
        broadcast.arrays({f"{state.prefix}{name}": np.zeros(1, np.float32) for name in (STOP, ELECTION)})
        if self.statistics and self.exchanges_gradients:
            size = sum(tensor.numel() for tensor in self.statistics.values())
            broadcast.arrays({f"{state.prefix}{BUFFERS}": np.zeros(size, np.float32)})
        else:  # their own values remain those of the job, should no worker ever contribute
            broadcast.arrays(ScriptModel(state, self.statistics).read_statistics())


def _statistics(state: ModelState, buffers: str, algorithm: str, *, averages: bool) -> dict[str, Any]:
    """The buffers to average, by key. averages: whether the servers do, and run no optimizer on what they get."""
    if buffers == "local":
        return {}
    if buffers != "mean":
        raise InvalidSettings(f"there is no buffers={buffers!r}", 'write "local" or "mean"')
    if not averages:
        what = f'buffers="mean" with --algo {algorithm}, whose servers do not average'
        raise InvalidSettings(what, 'leave it at "local", or train with fsa, sync or hfa')
    return {f"{state.prefix}{name}": tensor for name, tensor in state.buffers.items() if tensor.is_floating_point()}
