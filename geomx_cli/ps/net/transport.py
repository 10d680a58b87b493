"""The links of one process: reads messages from the sockets, and refuses invalid ones.

Sockets have no limits (see sockets.py): each link queues by priority (FIFO within a priority) and hands its socket only
what its window admits.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
import zmq

from geomx_cli.core.event_log import EventLog
from geomx_cli.core.events import Traffic
from geomx_cli.ps.net.accepted_links import MAX_HELLO, AcceptedLinks, Sharing
from geomx_cli.ps.net.lanes import LANES, Lane, identities
from geomx_cli.ps.net.link import LINK_TOPICS, MAX_FUSED, Link
from geomx_cli.ps.net.link_warnings import LinkWarnings
from geomx_cli.ps.net.loop import Loop
from geomx_cli.ps.net.malloc import keep_freed_memory
from geomx_cli.ps.net.security import KeyRing
from geomx_cli.ps.net.shaping import DelayLine, Shaper, WanLog
from geomx_cli.ps.net.sockets import Socket, Sockets
from geomx_cli.ps.net.tcp import Connection
from geomx_cli.ps.net.wire import (
    MAX_MESSAGE,
    BadMessage,
    Header,
    Kind,
    Place,
    decode_body,
    decode_header,
    largest_message,
)

__all__ = ["FusingLinks", "Transport", "traffic_of"]

# The bytes that a process's links have carried.


def traffic_of(links: Iterable[Link]) -> Traffic:
    """The sums over all links."""
    peers: dict[str, tuple[int, int]] = {}
    lan = wan = (0, 0)
    for link in links:
        if link.wide_area:
            wan = (wan[0] + link.sent, wan[1] + link.received)
            sent, received = peers.get(link.name, (0, 0))
            peers[link.name] = (sent + link.sent, received + link.received)
        else:
            lan = (lan[0] + link.sent, lan[1] + link.received)
    return Traffic(lan, wan, peers)


# When small tensors that a link has fused into one message are sent.

LONGEST = 0.01
"""Seconds that the first of them waits, at most: a turn of a busy loop handles up to 64 messages of each peer. That may
take 100 ms, in which the receiver could have begun.
"""


class FusingLinks:
    """The links that have fused tensors to send. For the loop's thread."""

    def __init__(self) -> None:
        self._links: set[Link] = set()
        self._since = 0.0

    def add(self, link: "Link") -> None:
        """This link has one."""
        if not self._links:
            self._since = time.monotonic()
        self._links.add(link)
        self.flush_due()

    def flush_due(self) -> None:
        """Send them if the first has waited long enough."""
        if self._links and time.monotonic() - self._since >= LONGEST:
            self.flush()

    def flush(self) -> None:
        """Send all."""
        while self._links:
            self._links.pop().flush()


Handler = Callable[[Link, Header, memoryview | None], None]

AGAIN = "hello again"
"""The topic of a hello on a connection on which one was accepted before, from when it is read."""
BATCH = 64
CREDIT_DELAY = 0.004


class Transport:
    """Sends and receives messages over links. `on_message` gets every well-formed message of this job that is not
    handled by the transport itself.

    on_link: called for each peer that dials; may refuse it with BadMessage. on_reconnect: called for each lane with a
    new connection, including the first, once both ends may send on it; those in flight on the previous one may be lost.
    on_closed: called when a link's control lane has ended, until it reconnects. on_asked: gets the peer's requests for
    retransmission: "want" for a slice (key, slice, round) that is not in the link's queue, "again" and "damaged" for
    a request number.

    slice_bytes: of a usual slice in float32; longest_slice: of the longest one, if they differ.
    `wan`: the emulated link to other parties. `counters` counts refused messages by reason, of which the first of each
    peer is logged.
    """

    def __init__(
        self,
        loop: Loop,
        *,
        job: int,
        who: dict[str, Any],
        keys: KeyRing | None,
        on_message: Handler,
        on_link: Callable[[Link], None],
        on_reconnect: Callable[[Link, Lane], None] = lambda _, __: None,
        on_closed: Callable[[Link], None] = lambda _: None,
        on_asked: Callable[[Link, Header], None] = lambda _, __: None,
        events: EventLog,
        slice_bytes: int,
        longest_slice: int = 0,
        window_bytes: int = 0,
        shaper: Shaper | None = None,
    ) -> None:
        self.loop = loop
        self.job = job
        self.who = who
        self.slice_bytes = slice_bytes
        self.window_bytes = window_bytes
        self.counters, self.links = Counter[str](), list[Link]()
        self._on_message = on_message
        self._on_link = on_link
        self._on_reconnect = on_reconnect
        self._on_closed = on_closed
        self._on_asked = on_asked
        self.wan = DelayLine(loop, shaper) if shaper else None
        self._wan_log = WanLog(loop, events, lambda: self.traffic().wan[0])
        self._owing, self._fusing = set[Link](), FusingLinks()
        loop.each_turn(self._fusing.flush)
        keep_freed_memory()
        self.sharing = Sharing(events)
        self.warnings = LinkWarnings(events, who["process"], self.counters)
        max_message = MAX_MESSAGE if keys is None else largest_message(max(slice_bytes, longest_slice))
        self._sockets = Sockets(loop, keys, partial(self.warnings.refuse, None), max_message)
        self._accepted = AcceptedLinks(self, who["party"], self._on_accepted, on_closed)

    def listen(self, endpoints: tuple[str, ...]) -> tuple[str, ...]:
        """Bind one ROUTER to all `endpoints` ("tcp://host:port", port * for any, or "ipc://path"); returns the bound
        ones.

        Raises InvalidSettings naming the endpoint if one cannot be bound.
        """
        return self._sockets.listen(endpoints, self._read_router, self._accepted.closed)

    def dial(self, endpoint: str, name: str, *, wide_area: bool, **hello: Any) -> Link:
        """A link to the process listening at `endpoint`. It starts with a hello; the peer may start later."""
        link = Link(self, name, wide_area, {**self.who, **hello}, endpoint)
        self.links.append(link)
        if endpoint.startswith("ipc:") and not (wide_area and self.wan):
            self.sharing.allow(link)
        for lane, identity in identities().items():
            dealer = self._sockets.dial(
                endpoint, identity, partial(self._read_dealer, link),
                partial(self._connected, link, lane), partial(self._disconnected, link, lane), probed=lane == "control",
            )  # fmt: skip
            link.lanes.attach(lane, dealer, b"")
        return link

    def close(self, linger: float = 1.0) -> None:
        """Close all sockets; pending data may be sent within `linger` seconds."""
        if self.wan is not None:
            self.wan.flush()  # do not lose a goodbye in the emulated link
        self._sockets.close(linger)

    def traffic(self) -> Traffic:
        """Bytes of messages sent and received so far."""
        return traffic_of(self.links)

    # For Link only: see LinkTransport.

    def owes(self, link: Link) -> None:
        """See LinkTransport.owes."""
        if not self._owing:
            self.loop.call_later(CREDIT_DELAY, self._flush_credit)
        self._owing.add(link)

    def owes_later(self, link: Link) -> None:
        """See LinkTransport.owes_later."""
        self.loop.submit(partial(self.owes, link))

    def fuses(self, link: Link) -> None:
        """See LinkTransport.fuses."""
        self._fusing.add(link)

    def hand_over(self, link: Link, lane: Lane, parts: list[Any], size: int) -> None:
        """See LinkTransport.hand_over."""
        self._fusing.flush_due()
        if link.wide_area:
            self._wan_log.sent()
        if self.wan is None or not link.wide_area:
            link.lanes.write(lane, parts)
        else:
            self.wan.send(size, lane, link.name, partial(link.lanes.write, lane, parts))

    # Reading.

    def _read_router(self, router: Socket) -> None:
        for _ in range(BATCH):
            try:
                identity, *frames = router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            link = self._receive(self._accepted.by_identity.get(identity.bytes), frames, router, identity)
            if link is not None and LANES[identity.bytes[-1] - 1] == "control":
                self._accepted.note(link, "control", identity.get(zmq.SRCFD))

    def _read_dealer(self, link: Link, dealer: Socket) -> None:
        for _ in range(BATCH):
            try:
                frames = dealer.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._receive(link, frames, dealer, None)

    def _receive(
        self, link: Link | None, frames: list[zmq.Frame], socket: Socket, identity: zmq.Frame | None
    ) -> Link | None:
        """Split a message into its header and payload, or several fused ones. A message without a link is from a
        ROUTER, with its connection's `identity`. Returns its link, if it has one now.
        """
        try:
            if len(frames) > 2 * MAX_FUSED:
                raise BadMessage(f"{len(frames)} parts")
            rest = iter(frames)
            for frame in rest:
                header = decode_header(frame.buffer, self.job)
                body = None if header.place == Place.NONE else next(rest, None)
                if (body is None) != (header.place == Place.NONE):
                    raise BadMessage("a payload that is not where the header says")
                payload = None if body is None else body.buffer
                hello = identity is not None and header.kind == Kind.CONTROL and header.topic == "hello"
                if hello and identity is not None and not self._sockets.awaits_hello(identity.get(zmq.SRCFD)):
                    header.topic = AGAIN
                if link is None and identity is not None:
                    link = self._accepted.accept(header, payload, socket, identity)
                assert link is not None
                if header.place == Place.SHARED_MEMORY and payload is not None:
                    payload = link.received_at(payload)
                self._arrived(link, header, payload, len(frame) + (0 if payload is None else len(payload)))
                if hello and identity is not None:
                    descriptor = identity.get(zmq.SRCFD)
                    self._sockets.known(descriptor)
                    self._accepted.note(link, LANES[identity.bytes[-1] - 1], descriptor)
        except BadMessage as error:
            self.warnings.refuse(link, "malformed", str(error))
        self._fusing.flush_due()
        return link

    def _arrived(self, link: Link, header: Header, payload: memoryview | None, size: int) -> None:
        link.received += size
        link.health.hear(moved=header.kind != Kind.CONTROL or header.credit > link.returned)
        if self.wan is None or not link.wide_area:
            self._deliver(link, header, payload)
        else:
            lane = LANES[header.kind != Kind.CONTROL and payload is not None]
            self.wan.receive(size, lane, link.name, partial(self._deliver, link, header, payload))

    def _deliver(self, link: Link, header: Header, payload: memoryview | None) -> None:
        link.credit(header.credit, header.arrived)
        if payload is not None and header.kind != Kind.CONTROL:
            link.arrived(len(payload))
        try:
            if header.kind != Kind.CONTROL or not self._handle(link, header, payload):
                self._on_message(link, header, payload)
        except (BadMessage, msgspec.ValidationError) as error:
            self.refuse(link, error, None if header.kind == Kind.CONTROL else len(payload or b""))

    def refuse(self, link: Link, error: Exception, credit: int | None) -> None:
        """Count an invalid message; unless it is a CONTROL message (None), return its credit and tell the peer."""
        self.warnings.refuse(link, "malformed", str(error))
        if credit is not None:
            link.consumed(credit)
            self.warnings.report_refusal(link, str(error))

    def _handle(self, link: Link, header: Header, payload: memoryview | None) -> bool:
        """Handle a CONTROL message about the link itself; returns False for any other."""
        if header.topic not in LINK_TOPICS:
            return False
        match header.topic:
            case "credit":
                pass  # as in every header
            case "want":
                if not link.want(header.key, header.slice, header.round):
                    self._on_asked(link, header)
            case "again" | "damaged":
                self._on_asked(link, header)
            case "alive":
                link.health.receive_heartbeat(payload)
                link.window.crossed(link.health.round_trip)
            case "memory" | "mapped" | "freed":
                self.sharing.receive(link, header.topic, decode_body(payload) if payload is not None else {})
            case "hello" | "hello again":
                self._greeted(link, header.request, payload, again=header.topic == AGAIN)
            case "welcome":
                self._welcomed(link, header.request)
            case "ready":
                self._ready(link, header.request)
            case "refused":
                self.warnings.refused(link, decode_body(payload, MAX_HELLO) if payload is not None else {})
        return True

    def _flush_credit(self) -> None:
        while self._owing:
            self._owing.pop().flush_credit()

    # Connections.

    def _on_accepted(self, link: Link, near: bool) -> None:
        self._on_link(link)
        self.links.append(link)
        if near and not (link.wide_area and self.wan):
            self.sharing.allow(link)

    def _greeted(self, link: Link, number: int, payload: memoryview | None, *, again: bool) -> None:
        """The peer has dialled, for the first time or again. With `again` it says so a second time on one connection,
        as after one that ended before the first hello was sent, so nothing was lost; a peer that repeats hellos would
        have what it waits for forgotten otherwise.
        """
        lane = decode_body(payload).get("lane") if payload is not None else None
        if link.dialled or lane not in LANES:
            raise BadMessage("a hello of no lane, or from a peer that does not dial")
        if not again:
            link.reset(lane)
        link.lanes.welcome(lane, number)

    def _welcomed(self, link: Link, number: int) -> None:
        """The peer knows the connection of a lane that we dial: say so, and report what may be lost."""
        lane = link.lanes.lane_of(number)
        if not link.dialled or lane is None:  # a hello of a connection replaced meanwhile
            return
        link.reset(lane)
        link.lanes.ready(lane, number)
        if link.resume(lane, partial(self._on_reconnect, link, lane)):
            self.warnings.restored(link)
        if link.lanes.all_up:
            self.sharing.offer(link)

    def _ready(self, link: Link, number: int) -> None:
        """The peer sends on the connection of a lane that it dials: report what may be lost."""
        lane = link.lanes.lane_of(number)
        if not link.dialled and lane is not None:
            link.resume(lane, partial(self._on_reconnect, link, lane))

    def _connected(self, link: Link, lane: Lane, connection: Connection) -> None:
        link.lanes.connections[lane] = connection
        link.lanes.greet(lane)

    def _disconnected(self, link: Link, lane: Lane, given_up: bool) -> None:
        link.lanes.down(lane)
        if given_up and lane == "tensors":
            self.warnings.given_up(link)
        if lane == "control" and not given_up:
            self._on_closed(link)
