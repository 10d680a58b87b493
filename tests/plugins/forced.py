"""TSEngine with a fixed choice, whatever was measured: THROUGH has the party and its relay, as "1:0 3:2"."""

import os
from collections.abc import Collection

from geomx_cli.ps.delivery import tsengine
from geomx_cli.ps.delivery.tsengine import party_peers, worker

__all__ = ["name", "options", "party_peers", "refuses", "server", "worker"]

name = "forced"
options = ()


def refuses(spec: object) -> str | None:
    """Supports every job."""
    return None


class Forced(tsengine.TsServer):
    """Sends through the relay while that relays, from the second round on."""

    def _choose(self, root: int, size: int, before: Collection[int] = ()) -> int:
        """See TsServer._choose."""
        assert self.upstream is not None
        pairs = dict(item.split(":") for item in os.environ["THROUGH"].split())
        relay = int(pairs.get(str(self._node.memberships[-1].rank), "-1"))
        link = self.upstream.peers.get(relay)
        return relay if link is not None and self._neighbours.of(link).relays() else -1


def server() -> Forced:
    """The delivery of a server."""
    return Forced()
