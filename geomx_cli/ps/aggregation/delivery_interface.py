"""The interface between a process and a delivery (`ps/delivery/`), which transports contributions and results."""

from collections.abc import Collection, Mapping
from typing import Protocol

from geomx_cli.ps.aggregation.upstream import OnResult, UpstreamClient
from geomx_cli.ps.arrays import Arrays
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.net.lanes import Lane
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.wire import Header

__all__ = ["ContributionInbox", "Delivery", "ServerDelivery", "WorkerDelivery"]


class Delivery(Protocol):
    """A delivery in one process; called in its loop's thread only. It stores no contributions: whatever it sends
    through the UpstreamClient is retransmitted after a lost connection and answered once.
    """

    def up(self, server: int, header: Header, payload: memoryview | None, on_result: OnResult) -> None:
        """Send a contribution (an EXCHANGE) to the server of this rank. `payload` is not modified until `on_result` is
        called, exactly once, with the round's RESULT.
        """

    def down(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """Send a RESULT to the member that sent the contribution; called again if that member repeats its request."""

    def receive(self, link: Link, header: Header, payload: memoryview | None) -> bool:
        """Offer a tensor message from any link to the delivery before the process handles it; False leaves it to the
        process.

        Raises BadMessage for an invalid one, which is counted and dropped. A delivery that takes a payload must return
        its credit (Link.consumed) when it no longer holds it.
        """

    def on_asked(self, link: Link, header: Header) -> None:
        """A server above or a peer is blocked on a slice ("want": key, slice, round) that is not in flight to it."""

    def on_reconnect(self, link: Link, lane: Lane) -> None:
        """A lane has a new connection. Contributions without a result were sent again; anything else in flight may be
        lost.
        """


class WorkerDelivery(Delivery, Protocol):
    """A delivery in a worker."""

    def begin(self, node: Node, upstream: UpstreamClient, peers: Mapping[int, Link]) -> None:
        """Start. `upstream` sends over any link; `peers`, also in `upstream`, maps ranks in the plane to links to other
        workers: those that the module's `peers` names. All of them are connected before this worker's first
        contribution, and it ends after all workers that dial it, unless the module says `needs_peers = False`.
        """

    def on_request(self, request: Request) -> bool:
        """Answer a peer's request; False if the topic is unknown to this delivery."""

    def leave(self) -> None:
        """This worker has received all its results and contributes no more. Contributions of others may still pass."""


class ContributionInbox(Protocol):
    """Takes the contributions that a delivery puts together from several messages, and keeps arrays for it."""

    def check(self, link: Link, header: Header) -> None:
        """Raise BadMessage unless this peer may send a contribution with this header, to a declared slice."""

    def hand_in(self, link: Link, header: Header, payload: memoryview, credit: int) -> None:
        """Handle a contribution as if it had been received whole, at any time. `credit`: the payload bytes of its
        messages that were not returned yet, returned when its round is complete.
        """

    def kept(self, header: Header) -> Arrays:
        """The delivery's own arrays of a slice, which are kept with it."""


class ServerDelivery(Delivery, Protocol):
    """A delivery in a local or global server."""

    def begin(self, node: Node, upstream: UpstreamClient | None, inbox: ContributionInbox) -> None:
        """Start, once the process listens; `upstream` is None at a root. At a local server `upstream.peers` has the
        links to those of other parties, by the party's index, that the module's `party_peers` names, once the roots are
        dialled; the loss of such a link does not end the job.
        """

    def on_request(self, request: Request) -> bool:
        """Answer the request of a peer above or below; False if the topic is unknown to this delivery."""

    def leave(self) -> None:
        """A local server: its members contribute no more."""

    def brings(self, plane: str, rank: int) -> Collection[int]:
        """The ranks for which a member may contribute, in its plane, "local" or "global". Others are refused."""
