"""Direct delivery: each slice goes straight to the server that owns it, in the order of the pushes."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from geomx_cli.core.options import Option

if TYPE_CHECKING:
    from geomx_cli.ps.aggregation.upstream import OnResult, UpstreamClient
    from geomx_cli.ps.cluster.node import Node
    from geomx_cli.ps.cluster.rpc import Request
    from geomx_cli.ps.net.link import Lane, Link
    from geomx_cli.ps.net.wire import Header

name = "direct"
options: tuple[Option, ...] = ()


def refuses(spec: object) -> str | None:
    """Works with everything."""
    return None


class Direct:
    """The part in any process; others are made from it. The link's window and the slice's priority do the rest."""

    def begin(
        self, node: "Node", upstream: "UpstreamClient | None", peers: "Mapping[int, Link] | None" = None
    ) -> None:
        """Keep what contributions are sent with."""
        self.upstream = upstream

    def up(self, server: int, header: "Header", payload: memoryview | None, on_result: "OnResult") -> None:
        """Over the link to the server."""
        assert self.upstream is not None
        self.upstream.send(self.upstream.links[server], header, payload, on_result)

    def down(self, link: "Link", header: "Header", payload: memoryview | None) -> None:
        """Over the link by which the contribution has come."""
        link.send(header, payload)

    def receive(self, link: "Link", header: "Header", payload: memoryview | None) -> bool:
        """All is for the process."""
        return False

    def peers(self, workers: int) -> Collection[tuple[int, int]]:
        """Workers have no links with each other."""
        return ()

    def brings(self, plane: str, rank: int) -> Collection[int]:
        """Each its own."""
        return (rank,)

    def on_request(self, request: "Request") -> bool:
        """Nobody asks."""
        return False

    def on_asked(self, link: "Link", header: "Header") -> None:
        """Contributions wait in the link's own queue, nowhere else."""

    def on_reconnect(self, link: "Link", lane: "Lane") -> None:
        """Nothing else is under way."""

    def leave(self) -> None:
        """Nobody else is concerned."""


def worker() -> Direct:
    """The part in a worker."""
    return Direct()


def server() -> Direct:
    """The part in a server."""
    return Direct()
