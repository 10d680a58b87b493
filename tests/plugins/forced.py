"""TSEngine with a fixed choice, whatever was measured: THROUGH has the sender and its relay, as "1:0 3:2"; these are
indices of parties or, with GEOMX_FORCED=intra, ranks of workers in each party.
"""

import os
from collections.abc import Collection, Mapping

from geomx_cli.core.options import Option, Value
from geomx_cli.ps.delivery import tsengine
from geomx_cli.ps.delivery._tsengine_delivery import TsEngine

name = "forced"
needs_peers = False
options = (Option("forced", "text", "inter", "GEOMX_FORCED", "Where.", "transport", choices=("inter", "intra")),)


def refuses(spec: object) -> str | None:
    """Supports every job."""
    return None


def peers(workers: int, given: Mapping[str, Value]) -> Collection[tuple[int, int]]:
    """See tsengine."""
    return tsengine.peers(workers, {"tsengine": given["forced"]})


def party_peers(parties: int, given: Mapping[str, Value]) -> Collection[tuple[int, int]]:
    """See tsengine."""
    return tsengine.party_peers(parties, {"tsengine": given["forced"]})


class Forced(TsEngine):
    """Sends through the relay while that relays, from the second round on."""

    option = "forced"

    def _choose(self, server: int, size: int, before: Collection[int] = ()) -> int:
        """See TsEngine._choose."""
        assert self.upstream is not None
        pairs = dict(item.split(":") for item in os.environ["THROUGH"].split())
        relay = int(pairs.get(str(self._node.memberships[-1].rank), "-1"))
        link = self.upstream.peers.get(relay)
        return relay if link is not None and self._neighbours.of(link).relays() else -1


def worker() -> Forced:
    """The delivery of a worker."""
    return Forced("intra")


def server() -> Forced:
    """The delivery of a server."""
    return Forced("inter")
