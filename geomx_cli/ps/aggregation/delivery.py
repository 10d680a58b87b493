"""How contributions and results travel between processes, as each of these sees it: the seam to `ps/delivery/`."""

from collections.abc import Collection, Mapping
from typing import Protocol

from geomx_cli.ps.aggregation.upstream import OnResult, UpstreamClient
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.net.link import Lane, Link
from geomx_cli.ps.net.wire import Header

__all__ = ["Delivery", "ServerDelivery", "WorkerDelivery"]


class Delivery(Protocol):
    """A delivery's part in a process, called by its loop's thread only. It keeps no contribution itself: what it sends
    through the UpstreamClient is sent again after a cut, and answered once.
    """

    def up(self, server: int, header: Header, payload: memoryview | None, on_result: OnResult) -> None:
        """Take a contribution (an EXCHANGE) to the server of this rank. `payload` does not change until `on_result`,
        which is to be called once, gets the round's RESULT.
        """

    def down(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """Send a RESULT to the member that has brought the contribution; called again when that one asks again."""

    def receive(self, link: Link, header: Header, payload: memoryview | None) -> bool:
        """Take a message with a tensor before the process does, from any link; False leaves it to the process.

        Raises BadMessage for one that makes no sense: it is counted and dropped. Who takes one with a payload returns
        its credit (Link.consumed) when it is not held any more.
        """


class WorkerDelivery(Delivery, Protocol):
    """A delivery's part in a worker."""

    def begin(self, node: Node, upstream: UpstreamClient, peers: Mapping[int, Link]) -> None:
        """The worker starts. `upstream` sends to any link; `peers` has those to other workers, by their rank in the
        plane: all of them before the first contribution of this one. A worker ends after all that dial it.
        """

    def peers(self, workers: int) -> Collection[tuple[int, int]]:
        """Which workers of a plane of so many dial which, by rank, without cycles: (dialler, listener), as the
        module's `peers` says to the plan.
        """

    def on_request(self, request: Request) -> bool:
        """Answer what a peer asks; False for what this delivery does not know."""

    def on_asked(self, link: Link, header: Header) -> None:
        """A server or peer cannot go on without a slice ("want": key, slice, round) that is not on the way there."""

    def on_reconnect(self, link: Link, lane: Lane) -> None:
        """A lane has a new connection. Contributions without a result have been sent again; what else was under way may
        be lost.
        """

    def leave(self) -> None:
        """This worker has the results of all its contributions, and makes no more. Others' may still pass."""


class ServerDelivery(Delivery, Protocol):
    """A delivery's part in a server, local or global."""

    def begin(self, node: Node, upstream: UpstreamClient | None) -> None:
        """The server starts; `upstream` is None at a root."""

    def brings(self, plane: str, rank: int) -> Collection[int]:
        """Whose contributions a member may bring, by rank in its plane, "local" or "global". Others are refused."""
