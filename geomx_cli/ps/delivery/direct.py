"""Direct delivery: each slice is sent straight to the server that owns it, in the order of the pushes."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from geomx_cli.core.options import Option

if TYPE_CHECKING:
    from geomx_cli.ps.aggregation.upstream import OnResult, UpstreamClient
    from geomx_cli.ps.cluster.node import Node
    from geomx_cli.ps.cluster.rpc import Request
    from geomx_cli.ps.net.lanes import Lane
    from geomx_cli.ps.net.link import Link
    from geomx_cli.ps.net.wire import Header

name = "direct"
options: tuple[Option, ...] = ()


def refuses(spec: object) -> str | None:
    """Supports every job."""
    return None


class Direct:
    """Direct delivery in any process, and base class of other deliveries. The link's window and the slice's priority
    control the order.
    """

    def begin(self, node: "Node", upstream: "UpstreamClient | None", others: Any, /) -> None:
        """See WorkerDelivery.begin and ServerDelivery.begin. Keeps the client that sends contributions."""
        self.upstream = upstream

    def up(self, server: int, header: "Header", payload: memoryview | None, on_result: "OnResult") -> None:
        """Send the contribution over the link to the server."""
        assert self.upstream is not None
        self.upstream.send(self.upstream.links[server], header, payload, on_result)

    def down(self, link: "Link", header: "Header", payload: memoryview | None) -> None:
        """Send the result over the link on which the contribution was received."""
        link.send(header, payload)

    def receive(self, link: "Link", header: "Header", payload: memoryview | None) -> bool:
        """Leave every message to the process."""
        return False

    def brings(self, plane: str, rank: int) -> Collection[int]:
        """A member contributes only for itself."""
        return (rank,)

    def on_request(self, request: "Request") -> bool:
        """No requests are defined."""
        return False

    def on_asked(self, link: "Link", header: "Header") -> None:
        """Nothing to do: contributions wait only in the link's own queue."""

    def on_reconnect(self, link: "Link", lane: "Lane") -> None:
        """Nothing to do: nothing else is in flight."""

    def on_renewed(self, link: "Link") -> None:
        """Nothing to do: a member's messages are not kept."""

    def leave(self) -> None:
        """Nothing to do: no other process depends on this one."""


def worker() -> Direct:
    """The delivery of a worker."""
    return Direct()


def server() -> Direct:
    """The delivery of a server."""
    return Direct()
