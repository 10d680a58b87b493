"""A delivery outside geomx: worker 1 of each plane sends its contributions to worker 0, which adds them to its own and
sends one merged contribution to the server; the result goes to worker 0, and from there to worker 1.

Worker 0 is for worker 1 what a local server is: it gathers in rank order, keeps results until they are acknowledged,
and requests what it lacks, so it uses the same classes. Further workers deliver directly. The sums have the same bits
as with direct delivery, as ranks 0 and 1 are added first there too.

Servers write a byte to $GEOMX_JOB_DIR/contributions-PROCESS for each received message with a contribution.
"""

import itertools
import os
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geomx_cli.core.options import Option
from geomx_cli.ps.delivery.direct import Direct

if TYPE_CHECKING:
    from geomx_cli.ps.aggregation.upstream import OnResult, UpstreamClient
    from geomx_cli.ps.cluster.node import Node
    from geomx_cli.ps.cluster.rpc import Request
    from geomx_cli.ps.net.lanes import Lane
    from geomx_cli.ps.net.link import Link
    from geomx_cli.ps.net.wire import Header

name = "relay"
options: tuple[Option, ...] = ()


def refuses(spec: object) -> str | None:
    """Supports every job."""
    return None


def peers(workers: int, options: object) -> Collection[tuple[int, int]]:
    """Worker 1 dials worker 0."""
    return [(1, 0)] if workers > 1 else []


class Relay(Direct):
    """The delivery of a worker. Only worker 0 of a plane with others gathers, from the first contribution on."""

    def begin(self, node: "Node", upstream: "UpstreamClient", peers: "Mapping[int, Link]") -> None:
        super().begin(node, upstream, peers)
        self._node, self._links = node, peers
        self._gathering: Gathering | None = None
        self._left: set[int] = set()  # ranks in the plane

    def up(self, server: int, header: "Header", payload: memoryview | None, on_result: "OnResult") -> None:
        if 0 in self._links:
            self.upstream.send(self._links[0], header, payload, on_result)
        elif 1 in self._links:
            self._gather(header).take_own(header, payload, on_result)
        else:
            super().up(server, header, payload, on_result)

    def receive(self, link: "Link", header: "Header", payload: memoryview | None) -> bool:
        from geomx_cli.ps.net.wire import BadMessage, Kind

        if header.kind != Kind.EXCHANGE:
            return False
        gathering = self._gather(header)
        if link is not self._links.get(1) or header.contributors != (gathering.first + 1,):
            raise BadMessage(f"contributions of ranks {header.contributors} from {link.name}")
        gathering.take(link, header, payload)
        return True

    def leave(self) -> None:
        if 0 in self._links:
            self._node.rpc.ask(self._links[0], "leave", {}, lambda _: None, self._node.fail)
        elif 1 in self._links:
            self._leave(0)

    def on_request(self, request: "Request") -> bool:
        if request.topic != "leave" or request.link is not self._links.get(1):
            return False
        self._leave(1)
        request.answer()
        return True

    def on_asked(self, link: "Link", header: "Header") -> None:
        if self._gathering is not None:
            self._gathering.deadlocks.request_slice(header.key, header.slice, header.round)

    def on_reconnect(self, link: "Link", lane: "Lane") -> None:
        if self._gathering is not None:
            self._gathering.connected_anew(link)

    def _leave(self, rank: int) -> None:
        self._left.add(rank)
        if self._gathering is not None:
            self._gathering.rounds.members_changed()

    def _gather(self, header: "Header") -> "Gathering":
        from geomx_cli.ps.cluster.members import CENTRAL

        if self._gathering is None:
            first = header.contributors[0] // CENTRAL * CENTRAL
            self._gathering = Gathering(self._node, self.upstream, self._links[1], first, self._left)
        return self._gathering


class Gathering:
    """Worker 0's gathering and forwarding. `first`: its own rank among the contributors; worker 1's is the next."""

    def __init__(
        self, node: "Node", upstream: "UpstreamClient", below: "Link", first: int, left: Collection[int]
    ) -> None:
        from geomx_cli.ps.aggregation.aggregator import Aggregator
        from geomx_cli.ps.aggregation.slices import SliceTable
        from geomx_cli.ps.aggregation.straggler_monitor import DeadlockBreaker
        from geomx_cli.runtime.algorithms.fsa import FsaServer

        self.first = first
        self._node, self._upstream, self._below = node, upstream, below
        self._servers: dict[tuple[int, int], int] = {}
        self._own: dict[int, OnResult] = {}
        self._numbers = itertools.count(1)
        table = SliceTable(
            algorithm=FsaServer(), roots=lambda: 65_536,
            required_contributors=lambda: [first + rank for rank in (0, 1) if rank not in left],
        )  # fmt: skip
        self.rounds = Aggregator(delivery=self, upstream=upstream, own_rank=None, table=table)
        self.deadlocks = DeadlockBreaker(table, lambda rank: [below] if rank == first + 1 else [], self._tell_servers)
        self.deadlocks.start(node.loop)

    def take_own(self, header: "Header", payload: memoryview | None, on_result: "OnResult") -> None:
        """Take a contribution of this worker."""
        header.request = next(self._numbers)
        self._own[header.request] = on_result
        self.take(self, header, payload)

    def take(self, link: Any, header: "Header", payload: memoryview | None) -> None:
        """Take a contribution for the server named in its header."""
        self._servers[header.key, header.slice] = header.server
        self.rounds.on_exchange(link, header, payload, header.contributors[0])

    def connected_anew(self, link: "Link") -> None:
        """Requests to worker 1 and messages to servers may be lost."""
        if link is self._below:
            self.deadlocks.on_reconnect(self.first + 1)
        else:
            self.deadlocks.on_root_reconnect()

    def _tell_servers(self) -> None:
        for link in self._upstream.links if self._upstream.waiting else ():
            link.control("stuck")

    # The aggregator's delivery.

    def up(self, server: int, header: "Header", payload: memoryview | None, on_result: "OnResult") -> None:
        """Send the merged contribution; the aggregator counts servers as a local server does, by the roots."""
        self._upstream.send(
            self._upstream.links[self._servers[header.key, header.slice]], header, payload, on_result
        )

    def down(self, link: Any, header: "Header", payload: memoryview | None) -> None:
        """Send a result to worker 1, or to this worker in a new turn of the loop, as it may begin its next round then.
        """
        from geomx_cli.ps.aggregation.codec import received

        if link is self:
            on_result = self._own.pop(header.request)
            self._node.loop.call_later(0.0, partial(on_result, header, received(header, payload)))
        else:
            link.send(header, payload)

    # Stands in for a link to this worker.

    def consumed(self, size: int) -> None:
        """No window."""

    def ask_again(self, request: int, *, damaged: bool = False) -> None:
        """Nothing is lost."""


class RelayServer(Direct):
    """The delivery of a server: worker 0 may bring worker 1's contributions."""

    def begin(self, node: "Node", upstream: "UpstreamClient | None", others: object) -> None:
        super().begin(node, upstream, others)
        self._count = Path(node.settings.job_dir or os.devnull, f"contributions-{node.process.replace('/', '-')}")

    def brings(self, plane: str, rank: int) -> Collection[int]:
        return (0, 1) if plane == "local" and rank == 0 else (rank,)

    def receive(self, link: "Link", header: "Header", payload: memoryview | None) -> bool:
        from geomx_cli.ps.net.wire import Kind

        if self._count.parent.is_dir() and header.kind == Kind.EXCHANGE:
            with self._count.open("ab") as file:
                file.write(b".")
        return False


def worker() -> Relay:
    """The delivery of a worker."""
    return Relay()


def server() -> RelayServer:
    """The delivery of a server."""
    return RelayServer()
