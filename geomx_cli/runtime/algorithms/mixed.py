"""MixedSync: synchronous inside a party, asynchronous across parties; a slow party delays nobody but itself.

Workers push gradients; a local server sums its party's and exchanges the sum with the roots. A root lets its
optimizer apply each party's sum at once and answers that party alone, with weights that may hold others' newer updates
too. Without a bound the parties' rounds drift apart freely; with `--max-staleness` the result of a round waits as long
as its party would be further ahead of the slowest (Ho et al., "More Effective Distributed ML via a Stale Synchronous
Parallel Parameter Server", NIPS 2013). The optimizers called dcasgd compensate for what has changed meanwhile.
"""

from typing import TYPE_CHECKING

from geomx_cli.options import Option
from geomx_cli.runtime.algorithms.fsa import FsaServer, server_optimizer, worker

if TYPE_CHECKING:
    from geomx_cli.plugins import Spec
    from geomx_cli.ps.algorithm import ServerPart
    from geomx_cli.ps.config import NodeSettings

__all__ = ["name", "options", "refuses", "server", "server_optimizer", "worker"]

name = "mixed"
options = (
    Option(
        "max_staleness", "int", -1, "GEOMX_MAX_STALENESS",
        "Rounds by which a party may be ahead of the slowest (mixed, async); -1 is any number.", "synchronisation",
        minimum=0, maximum=1_000_000,
    ),
)  # fmt: skip


def refuses(spec: "Spec") -> str | None:
    """It needs an optimizer on the global servers."""
    if not spec.script and spec.options["optimizer_on"] == "worker":
        return "the global servers need an optimizer, and --optimizer-on worker leaves them without"
    return None


def server(settings: "NodeSettings") -> "ServerPart":
    """The part in a server: FSA's, with each party for itself."""
    return FsaServer(asynchronous=True, max_staleness=int(settings.number("max_staleness")))
