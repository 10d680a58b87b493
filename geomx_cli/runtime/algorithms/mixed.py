"""MixedSync: synchronous within a party, asynchronous between parties; a slow party does not delay others.

Workers push gradients; a local server sums its party's and exchanges the sum with the roots. A root lets its
optimizer apply each party's sum on arrival and answers that party alone, with weights that may include newer updates of
others. Without a bound the parties' rounds may diverge arbitrarily; with `--max-staleness` the result of a round is
delayed while its party would be further ahead of the slowest (Ho et al., "More Effective Distributed ML via a Stale
Synchronous Parallel Parameter Server", NIPS 2013). The dcasgd optimizers compensate for the changes in between.
"""

from typing import TYPE_CHECKING, Any

from geomx_cli.core.options import Option
from geomx_cli.runtime.algorithms._async_completion import TOPIC, CompletionClient, CompletionServer
from geomx_cli.runtime.algorithms.fsa import FsaServer, FsaWorker, server_optimizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from geomx_cli.contract.config import NodeSettings
    from geomx_cli.core.options import Value
    from geomx_cli.core.plugins import Spec
    from geomx_cli.ps.aggregation.algorithm import ServerAlgorithm
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.training.model import ModelWeights
    from geomx_cli.runtime.training.train_config import TrainConfig

__all__ = [
    "asynchronous", "depart", "exchanges", "look", "name", "options", "refuses", "server", "server_optimizer", "title",
    "variant", "variants", "worker",
]  # fmt: skip

name = "mixed"
title = "MixedSync"
look = ("#56B4E9", "P", "..")
exchanges = "gradients"
asynchronous = True
variants = {"dcasgd": ("DCASGD", ("#009E73", "v", "--"))}
options = (
    Option(
        "max_staleness", "int", -1, "GEOMX_MAX_STALENESS",
        "Largest number of rounds by which a party may be ahead of the slowest party (mixed, async).",
        "synchronisation",
        minimum=0, maximum=1_000_000, word="unlimited",
    ),
)  # fmt: skip


def variant(options: "Mapping[str, Value]") -> str:
    """DCASGD, if the optimizer compensates for delay."""
    return "dcasgd" if str(options["optimizer"]).startswith("dcasgd") else ""


def refuses(spec: "Spec") -> str | None:
    """Requires an optimizer on the global servers."""
    if not spec.script and spec.options["optimizer_on"] == "worker":
        return "the global servers need an optimizer, and --optimizer-on worker leaves them without"
    return None


def server(settings: "NodeSettings") -> "ServerAlgorithm":
    """The server part: FSA's, in asynchronous mode."""
    return MixedServer(asynchronous=True, max_staleness=int(settings.number("max_staleness")))


class MixedServer(FsaServer):
    """FSA's, in asynchronous mode; the rank-0 root counts the finished workers."""

    def __init__(self, *, asynchronous: bool = True, max_staleness: int = -1) -> None:
        super().__init__(asynchronous=asynchronous, max_staleness=max_staleness)
        self._async_completion = CompletionServer()

    def on_request(self, topic: str, body: dict[str, Any], is_root: bool) -> dict[str, Any] | None:
        """Handle CompletionClient's requests."""
        return self._async_completion.answer(body) if topic == TOPIC and is_root else None

    def keeps(self, topic: str, body: dict[str, Any]) -> bool:
        """See ServerAlgorithm. The server has to keep which workers are done, and whether all have to stop."""
        return topic == TOPIC and (body["done"] or body["stop"])


# The worker part for the bundled training job.


def worker(client: "Client", model: "ModelWeights", config: "TrainConfig") -> "MixedWorker":
    """The worker part."""
    workers = 1 if client.flat else client.num_workers
    return MixedWorker(client, model, workers, workers / client.num_all_workers)


def depart(client: "Client") -> None:
    """This worker is done: the others wait for it at their end."""
    CompletionClient(client).complete(stop=False)


class MixedWorker(FsaWorker):
    """FSA's, with rounds of the party, or in a flat cluster of the worker itself."""

    asynchronous = True
