"""MixedSync: synchronous inside a party, asynchronous across parties; a slow party delays nobody but itself.

Workers push gradients; a local server sums its party's and exchanges the sum with the roots. A root lets its
optimizer apply each party's sum at once and answers that party alone, with weights that may hold others' newer updates
too. Without a bound the parties' rounds drift apart freely; with `--max-staleness` the result of a round waits as long
as its party would be further ahead of the slowest (Ho et al., "More Effective Distributed ML via a Stale Synchronous
Parallel Parameter Server", NIPS 2013). The optimizers called dcasgd compensate for what has changed meanwhile.
"""

from typing import TYPE_CHECKING, Any

from geomx_cli.core.options import Option
from geomx_cli.runtime.algorithms._completion import TOPIC, CompletionServer
from geomx_cli.runtime.algorithms.fsa import FsaServer, FsaWorker, server_optimizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from geomx_cli.core.options import Value
    from geomx_cli.core.plugins import Spec
    from geomx_cli.ps.aggregation.algorithm import ServerAlgorithm
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.cluster.config import NodeSettings
    from geomx_cli.runtime.training.model import ModelAdapter
    from geomx_cli.runtime.training.train_config import TrainConfig

__all__ = [
    "look", "name", "options", "refuses", "server", "server_optimizer", "title", "variant", "variants", "worker",
]  # fmt: skip

name = "mixed"
title = "MixedSync"
look = ("#56B4E9", "P", "..")
variants = {"dcasgd": ("DCASGD", ("#009E73", "v", "--"))}
options = (
    Option(
        "max_staleness", "int", -1, "GEOMX_MAX_STALENESS",
        "Rounds by which a party may be ahead of the slowest (mixed, async); -1 is any number.", "synchronisation",
        minimum=0, maximum=1_000_000,
    ),
)  # fmt: skip


def variant(options: "Mapping[str, Value]") -> str:
    """DCASGD, where the optimizer compensates for delay."""
    return "dcasgd" if str(options["optimizer"]).startswith("dcasgd") else ""


def refuses(spec: "Spec") -> str | None:
    """It needs an optimizer on the global servers."""
    if not spec.script and spec.options["optimizer_on"] == "worker":
        return "the global servers need an optimizer, and --optimizer-on worker leaves them without"
    return None


def server(settings: "NodeSettings") -> "ServerAlgorithm":
    """The part in a server: FSA's, with each party for itself."""
    return MixedServer(asynchronous=True, max_staleness=int(settings.number("max_staleness")))


class MixedServer(FsaServer):
    """FSA's, with each party for itself; the rank-0 root counts the workers that are done."""

    def __init__(self, *, asynchronous: bool = True, max_staleness: int = -1) -> None:
        super().__init__(asynchronous=asynchronous, max_staleness=max_staleness)
        self._completion = CompletionServer()

    def on_request(self, topic: str, body: dict[str, Any], is_root: bool) -> dict[str, Any] | None:
        """What CompletionClient asks."""
        return self._completion.answer(body) if topic == TOPIC and is_root else None


# The part in a worker of the bundled training job.


def worker(client: "Client", model: "ModelAdapter", config: "TrainConfig") -> "MixedWorker":
    """The part in a worker."""
    workers = 1 if client.flat else client.num_workers
    return MixedWorker(client, model, workers, workers / client.num_all_workers)


class MixedWorker(FsaWorker):
    """FSA's, whose rounds are the party's, or in a flat cluster the worker's own."""

    asynchronous = True

    def newest(self) -> None:
        """Pull the weights that the global servers have now; counts as a round."""
        self._pull()
        self.rounds += 1
