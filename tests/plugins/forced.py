"""TSEngine with a fixed choice, whatever was measured: THROUGH has the sender and its relay, as "1:0 3:2"; these are
indices of parties or, with GEOMX_FORCED=intra, ranks of workers in each party, and with GEOMX_FORCED=both both.

RELAY_FAULT: "PROCESS POINT COUNT SIGNAL", as "A/server:0 taken 9 KILL": the process gets the signal, from itself, when
it has taken so many contributions of peers ("taken"), or when the results of so many sums that contain such have come
and were not passed on ("answered"). At the point "refused" it refuses that contribution instead. LOSES: the file in
which a process notes that it has lost a refusal, its first one, and that again whenever it comes. LONGEST: seconds for
which a relay waits for contributions at most. DEAD: seconds of silence after which a relay is given up.
"""

import os
import signal
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from geomx_cli.core.options import Option, Value
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.delivery import _tsengine_neighbours, _tsengine_relay, tsengine
from geomx_cli.ps.delivery._tsengine_delivery import TsEngine
from geomx_cli.ps.delivery._tsengine_neighbours import TOPIC
from geomx_cli.ps.delivery._tsengine_relay import _Client
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.wire import Header, Kind

name = "forced"
needs_peers = False
sends_by = ("dgt",)
options = (
    Option("forced", "text", "inter", "GEOMX_FORCED", "Where.", "transport", choices=("inter", "intra", "both")),
)


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
    _seen = 0
    _lost: int | None = None

    def __init__(self, level: Literal["inter", "intra"]) -> None:
        super().__init__(level)
        _tsengine_relay.LONGEST = float(os.environ.get("LONGEST", _tsengine_relay.LONGEST))
        _tsengine_neighbours.DEAD = float(os.environ.get("DEAD", _tsengine_neighbours.DEAD))

    def receive(self, link: Link, header: Header, payload: memoryview | None) -> bool:
        """See TsEngine.receive."""
        process, point, count, name = os.environ.get("RELAY_FAULT", "- - 0 -").split()
        if process != self._node.process or self._relay is None:
            return super().receive(link, header, payload)
        is_contribution = header.kind == Kind.EXCHANGE and payload is not None
        size = len(payload or b"") if is_contribution and self._peer_at(link) is not None else 0
        if size and point == "refused":
            self._seen += 1
            if self._seen == int(count):
                link.consumed(size)
                self._relay._refuse([_Client(link, header, None)])
                return True
        if header.kind == Kind.RESULT and header.request in self._relay._merged and point == "answered":
            self._count_to(int(count), name)
        taken = super().receive(link, header, payload)
        if size and point == "taken":
            self._count_to(int(count), name)
        return taken

    def on_request(self, request: Request) -> bool:
        """See TsEngine.on_request."""
        refused = request.body.get("refused", ()) if request.topic == TOPIC else ()
        if refused and "LOSES" in os.environ:
            self._lost = refused[0] if self._lost is None else self._lost
            if refused[0] == self._lost:
                Path(os.environ["LOSES"]).touch()
                return True
        return super().on_request(request)

    def _count_to(self, count: int, name: str) -> None:
        self._seen += 1
        if self._seen == count:
            os.kill(os.getpid(), signal.Signals[f"SIG{name}"])

    def _choose(self, server: int, size: int, before: Collection[int]) -> tuple[int, bool]:
        """See TsEngine._choose."""
        assert self.upstream is not None
        pairs = dict(item.split(":") for item in os.environ["THROUGH"].split())
        relay = int(pairs.get(str(self._node.memberships[-1].rank), "-1"))
        link = self.upstream.peers.get(relay)
        return (relay if link is not None and self._neighbours.of(link).relays() else -1), False


def worker() -> Forced:
    """The delivery of a worker."""
    return Forced("intra")


def server() -> Forced:
    """The delivery of a server."""
    return Forced("inter")
