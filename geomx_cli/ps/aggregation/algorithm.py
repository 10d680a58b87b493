"""The server's interface to a synchronisation algorithm."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from geomx_cli.ps.aggregation.upstream import OnResult, UpstreamClient
from geomx_cli.ps.arrays import Array, Arrays, SliceArrays
from geomx_cli.ps.cluster.bodies import Body
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.net.lanes import Lane
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import Content, Rows
from geomx_cli.ps.net.wire import Header
from geomx_cli.ps.optim.optimizers import Optimizer

__all__ = [
    "Aggregate", "ContributionInbox", "Delivery", "PushUp", "ReplyNow", "RowAlgorithm", "ServerAlgorithm",
    "ServerDelivery", "SliceView", "Sum", "WorkerDelivery",
]  # fmt: skip

# The interface between a process and a delivery (`ps/delivery/`), which transports contributions and results.


class Delivery(Protocol):
    """A delivery in one process. Only its loop's thread calls it. It stores no contributions: the UpstreamClient
    retransmits after a lost connection what the delivery sends through it, and answers it once.
    """

    def up(self, server: int, header: Header, payload: memoryview | None, on_result: OnResult) -> None:
        """Send a contribution (an EXCHANGE) to the server of this rank. `on_result` is called exactly once, with the
        round's RESULT. Until then `payload` is not modified.
        """

    def down(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """Send a RESULT to the member that sent the contribution. Called again if the member repeats its request."""

    def receive(self, link: Link, header: Header, payload: memoryview | None) -> bool:
        """Offer a tensor message from any link to the delivery before the process handles it. If the delivery returns
        False, the process handles the message.

        Raises BadMessage for an invalid message, which is counted and dropped. A delivery that takes a payload must
        return the payload's credit (Link.consumed) when it no longer holds the payload.
        """

    def on_asked(self, link: Link, header: Header) -> None:
        """A server above, or a peer, is blocked on a slice ("want": key, slice, round) that is not in flight to it."""

    def on_reconnect(self, link: Link, lane: Lane) -> None:
        """A lane has a new connection. Contributions without a result were sent again. All other messages in flight may
        be lost.
        """

    def on_renewed(self, link: Link) -> None:
        """The process at this link was restarted: forget what its earlier life has sent and requested."""


class WorkerDelivery(Delivery, Protocol):
    """A delivery in a worker."""

    def begin(self, node: Node, upstream: UpstreamClient, peers: Mapping[int, Link]) -> None:
        """Start.

        upstream: sends over any link.
        peers: links to other workers by rank in the plane, for the workers that the module's `peers` names; also in
            `upstream`. All of them are connected before this worker's first contribution. This worker ends after all
            workers that dial it, unless the module says `needs_peers = False`.
        """

    def on_request(self, request: Request) -> bool:
        """Answer a peer's request; False if the topic is unknown to this delivery."""

    def leave(self) -> None:
        """This worker has received all its results and contributes no more. Other workers' contributions may still
        pass.
        """


class ContributionInbox(Protocol):
    """Accepts the contributions that a delivery assembles from several messages, and keeps arrays for it."""

    def check(self, link: Link, header: Header) -> None:
        """Raise BadMessage unless this peer may send a contribution with this header, to a declared slice."""

    def hand_in(self, link: Link, header: Header, payload: memoryview, credit: int) -> None:
        """Handle a contribution as if it had been received in one message, at any time.

        credit: the payload bytes of its messages whose credit was not returned yet. It is returned when the round of
            the contribution is complete.
        """

    def kept(self, header: Header) -> Arrays:
        """The delivery's own arrays of a slice, which are kept with it."""


class ServerDelivery(Delivery, Protocol):
    """A delivery in a local or global server."""

    def begin(self, node: Node, upstream: UpstreamClient | None, inbox: ContributionInbox) -> None:
        """Start, once the process listens.

        upstream: sends to the roots; None at a root. After a local server has dialled the roots, `upstream.peers` has
            the links to those local servers of other parties that the module's `party_peers` names, by the party's
            index. The loss of such a link does not end the job.
        """

    def on_request(self, request: Request) -> bool:
        """Answer the request of a peer above or below; False if the topic is unknown to this delivery."""

    def leave(self) -> None:
        """A local server: its members contribute no more."""

    def brings(self, plane: str, rank: int) -> Collection[int]:
        """The ranks for which a member may contribute in its plane ("local" or "global"). Other ranks are refused."""


@dataclass(slots=True, eq=False, kw_only=True)
class SliceView(SliceArrays):
    """One slice as an algorithm sees it.

    key, index: which slice it is.
    value: the current value; None before `init`.
    version: the number of updates by the roots, as far as this server knows.
    """

    key: int
    index: int
    value: Array | None = None
    version: int = 0

    @property
    def state(self) -> Arrays:
        """The algorithm's own arrays for this slice, by name."""
        return self.part("algorithm")

    @property
    def optimizer_state(self) -> Arrays:
        """The optimizer's arrays for this slice: the first argument of Optimizer.update."""
        return self.part("optimizer")


@dataclass(frozen=True, slots=True)
class Aggregate:
    """The sum of the contributions to a slice in one round: fp32, or fp64 for fp64 slices; read-only.

    weight: the sum of the contributions' weights. If all members abstained it is 0, and the array is zeros.
    member: the contributing member if contributions are handled separately, otherwise 0.
    """

    array: Array
    weight: float
    member: int = 0


@dataclass(frozen=True, slots=True)
class PushUp:
    """Exchange `array` with the root under this weight; the result becomes the value. With weight 0 the array is
    neither counted nor sent.
    """

    array: Array
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class ReplyNow:
    """Make `array` the value and answer the members with it."""

    array: Array


class ServerAlgorithm(Protocol):
    """The server side of an algorithm. Called in the server's loop only.

    asynchronous: whether a root handles the contribution of each member (a party, or a worker in a flat cluster)
        separately, on arrival.
    max_staleness: how many rounds a member may then be ahead of the slowest member; -1 for no limit.
    starts_from_value: whether a local server needs the initial value before it closes its first round.
    """

    asynchronous: bool
    max_staleness: int
    starts_from_value: bool

    def aggregate_local(self, slot: SliceView, total: Aggregate) -> PushUp | ReplyNow:
        """At a local server: decide on the party's sum of one round."""

    def on_global(self, slot: SliceView, result: Array) -> Array:
        """At a local server: convert the root's result to the value for the members."""

    def aggregate_global(self, slot: SliceView, total: Aggregate, optimizer: Optimizer | None) -> Array:
        """At a root: compute the new value from a round's sum. Raises InvalidSettings if that is impossible."""

    def on_request(self, topic: str, body: Body, is_root: bool) -> Body | None:
        """Answer a worker's request with a topic of this algorithm; None forwards it to the rank-0 root."""

    def keeps(self, topic: str, body: Body) -> bool:
        """Whether later answers depend on this request, so that a restarted server has to handle it again. Each
        different request is saved once, so an algorithm should make few of them.
        """


@runtime_checkable
class RowAlgorithm(ServerAlgorithm, Protocol):
    """An algorithm that, if `takes_rows` is set, accepts the sum of a round as rows when only rows were contributed.

    A local server then forwards its party's sum and applies the root's result without calling the algorithm. All other
    algorithms get the dense sum.
    """

    takes_rows: bool

    def rows_at_root(
        self, slot: SliceView, total: Rows, weight: float, member: int, optimizer: Optimizer | None
    ) -> Content | None:
        """At a root that has a value: handle the sum of one round's rows. `weight` and `member` have the same meaning
        as in Aggregate.

        Returns the changed rows of the value, or a whole new value, or None for no update. Raises the same errors as
        `aggregate_global`.
        """


class Sum:
    """The sum of all members' contributions, without any state. For tensors of bytes, which have no mean and no step.
    """

    asynchronous = False
    max_staleness = -1
    starts_from_value = False

    def aggregate_local(self, slot: SliceView, total: Aggregate) -> PushUp:
        """See ServerAlgorithm."""
        return PushUp(total.array, total.weight)

    def on_global(self, slot: SliceView, result: Array) -> Array:
        """See ServerAlgorithm."""
        return result

    def aggregate_global(self, slot: SliceView, total: Aggregate, optimizer: Optimizer | None) -> Array:
        """See ServerAlgorithm."""
        return total.array

    def on_request(self, topic: str, body: Body, is_root: bool) -> None:
        """See ServerAlgorithm."""

    def keeps(self, topic: str, body: Body) -> bool:
        """See ServerAlgorithm."""
        return False
