"""The links of one process: reads messages from the sockets, and refuses invalid ones.

Sockets have no limits (see sockets.py). Each link queues by priority (FIFO within a priority), and hands its socket
only as much as its window admits.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Any

import msgspec
import zmq

from geomx_cli.contract.security import KeyRing
from geomx_cli.core.event_log import EventLog
from geomx_cli.core.events import Traffic, WarningRaised
from geomx_cli.ps.net.accepted_links import AcceptedLinks
from geomx_cli.ps.net.connections import Connection
from geomx_cli.ps.net.lanes import IDENTITY, LANES, Lane
from geomx_cli.ps.net.link import AGAIN, MAX_FUSED, MOST_REFUSALS, Link
from geomx_cli.ps.net.loop import Loop
from geomx_cli.ps.net.memory import Arena, keep_freed_memory
from geomx_cli.ps.net.shaping import DelayLine, Shaper
from geomx_cli.ps.net.sockets import Socket, Sockets
from geomx_cli.ps.net.wan_log import WanLog
from geomx_cli.ps.net.wire import (
    MAX_INCARNATION,
    MAX_MESSAGE,
    BadMessage,
    Header,
    Kind,
    Place,
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


# Decides when small tensors that a link has fused into one message are sent.

LONGEST = 0.01
"""The most seconds that the first of them waits. A turn of a busy loop handles up to 64 messages of each peer. That may
take 100 ms, in which the receiver could have begun.
"""


class FusingLinks:
    """The links that have fused tensors to send. For the loop's thread."""

    def __init__(self) -> None:
        self._links: set[Link] = set()
        self._since = 0.0

    def add(self, link: "Link") -> None:
        """This link has fused tensors."""
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

BATCH = 64
UNWELCOMED = 15.0
"""Seconds after a hello in which the peer welcomes it, on slow links too. The peer may also be stopped."""
CREDIT_DELAY = 0.004
LEFT_OVER = "left over from earlier lives"
"""Counts messages to or from a dead process. They are dropped silently, because they are no sign of a fault."""
MAX_REASONS = 8192
"""Limit on the pairs of reason and peer for which refused messages are counted."""


class Transport:
    """Sends and receives messages over links. Used by the loop's thread only.

    job: see Header.
    who: this process's description of itself in its hellos: "process", "party", fields that its peers check, and
        "incarnation" if it has been restarted.
    keys: this process's keys; None if it has none.
    on_message: receives every well-formed message of this job that is not about a link itself.
    on_link: called for each peer that dials. It may refuse the peer with BadMessage.
    on_reconnect: called for each lane with a new connection, including the first, once both ends may send on it.
        Messages in flight on the previous connection may be lost.
    on_renewed: called when the peer of a link has been restarted, before on_reconnect. Messages to its earlier life are
        lost, and answers to requests of that life are dropped.
    on_closed: called when a link's control lane has ended, until it reconnects.
    on_asked: receives the peer's requests for retransmission: "want" for a slice (key, slice, round) that is not in the
        link's queue, "again" and "damaged" for a request number.
    slice_bytes: bytes of a usual slice in float32.
    longest_slice: bytes of the longest slice, if lengths differ.
    window_bytes: bytes of every window; 0 if they are measured.
    shaper: emulates the link to other parties.
    counters: counts refused messages by reason. The first of each peer is logged.
    wan: the emulated link to other parties; None if there is none.
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
        on_renewed: Callable[[Link], None] = lambda _: None,
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
        self.who = {"incarnation": 0, **who, "life": secrets.token_hex(8)}
        self.slice_bytes = slice_bytes
        self.window_bytes = window_bytes
        self.counters, self.links = Counter[str](), list[Link]()
        self.on_reconnect = on_reconnect
        self.on_asked = on_asked
        self._on_message = on_message
        self._on_link = on_link
        self._on_renewed = on_renewed
        self._on_closed = on_closed
        self._events = events
        self.wan = DelayLine(loop, shaper) if shaper else None
        self._wan_log = WanLog(loop, events, lambda: self.traffic().wan[0])
        self._credit_due, self._fusing = set[Link](), FusingLinks()
        loop.each_turn(self._fusing.flush)
        keep_freed_memory()
        max_message = MAX_MESSAGE if keys is None else largest_message(max(slice_bytes, longest_slice))
        self._sockets = Sockets(loop, keys, partial(self.count_refused, None), max_message)
        self._accepted = AcceptedLinks(self, who["party"], self._on_accepted, on_renewed, on_closed)

    def listen(self, endpoints: tuple[str, ...]) -> tuple[str, ...]:
        """Bind one ROUTER to all `endpoints` ("tcp://host:port", with port * for any, or "ipc://path"). Returns the
        bound endpoints.

        Raises InvalidSettings that names the endpoint if one cannot be bound.
        """
        return self._sockets.listen(endpoints, self._read_router, self._accepted.closed)

    def dial(self, endpoint: str, name: str, *, wide_area: bool, **hello: Any) -> Link:
        """A link to the process listening at `endpoint`. It starts with a hello; the peer may start later."""
        link = Link(self, name, wide_area, {**self.who, **hello}, endpoint)
        self._add(link, near=endpoint.startswith("ipc:"))
        for lane in LANES:
            identity = secrets.token_bytes(IDENTITY).replace(b"\0", b"\1")  # libzmq's own begin with 0
            dealer = self._sockets.dial(
                endpoint, identity, partial(self._read_dealer, link, lane),
                partial(self._connected, link, lane), partial(self._disconnected, link, lane), probed=lane == "control",
            )  # fmt: skip
            link.lanes.attach(lane, dealer)
        return link

    def close(self, linger: float = 1.0) -> None:
        """Close all sockets; pending data may be sent within `linger` seconds."""
        if self.wan is not None:
            self.wan.flush()  # do not lose a goodbye in the emulated link
        self._sockets.close(linger)

    def traffic(self) -> Traffic:
        """Bytes of messages sent and received so far."""
        return traffic_of(self.links)

    # Refusals and warnings.

    def refuse(self, link: Link, error: Exception, credit: int | None) -> None:
        """Count an invalid message. Unless it is a CONTROL message (None), also return its credit and tell the peer."""
        self.count_refused(link, "malformed", str(error))
        if credit is not None:
            link.consumed(credit)
            if self.counters[f"malformed from {link.name}"] <= MOST_REFUSALS:
                link.refuse(str(error))

    def count_refused(self, link: Link | None, reason: str, text: str) -> None:
        """This process dropped a message: count it, and log the first of each reason and peer."""
        peer = link.name if link else "an unknown peer"
        self.counters[reason] += 1
        self.counters[f"{reason} from {peer}"] += 1
        if self.counters[f"{reason} from {peer}"] == 1 and len(self.counters) < MAX_REASONS:
            self._events.write(WarningRaised(message=f"refused a message from {peer}: {text}", reason=reason))

    # For Link only: see LinkTransport.

    @cached_property
    def arena(self) -> Arena | None:
        """See LinkTransport.arena."""
        full = "shared memory with processes of this host is full; falling back to sockets"
        try:
            return Arena(partial(self.warn, full))
        except OSError:
            return None

    def schedule_credit(self, link: Link) -> None:
        """See LinkTransport.schedule_credit."""
        if not self._credit_due:
            self.loop.call_later(CREDIT_DELAY, self._flush_credit)
        self._credit_due.add(link)

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
            self.wan.send(size, lane, link.name, partial(self._leave, link, link.incarnation, lane, parts))

    def warn(self, message: str) -> None:
        """See LinkTransport.warn."""
        self._events.write(WarningRaised(message=message))

    # Reading.

    def _read_router(self, router: Socket) -> None:
        for _ in range(BATCH):
            try:
                sender, *frames = router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            link, _ = self._accepted.by_identity.get(sender.bytes, (None, None))
            self._receive(link, frames, router, sender=sender)
            link, lane = self._accepted.by_identity.get(sender.bytes, (None, None))
            # Messages that were sent before the end of a connection was noticed come first on the next connection,
            # ahead of its hello. If that connection ends too, this is known only if its descriptor is known.
            if link is not None and lane == "control":
                self._accepted.note(link, lane, sender.get(zmq.SRCFD))

    def _read_dealer(self, link: Link, lane: Lane, dealer: Socket) -> None:
        for _ in range(BATCH):
            try:
                frames = dealer.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._receive(link, frames, dealer, dialled=lane)

    def _receive(
        self, link: Link | None, frames: list[zmq.Frame], socket: Socket, sender: zmq.Frame | None = None,
        dialled: Lane | None = None,
    ) -> None:  # fmt: skip
        """Split a message into its header and payload, or several fused ones.

        link: None for the first message of a connection to a ROUTER.
        sender: the routing identity of a connection to a ROUTER.
        dialled: the lane of a link that this process dials.
        """
        if link is None and sender is not None and sender.bytes in self._accepted.ended:
            self.counters[LEFT_OVER] += 1
            return
        rest = iter(frames)
        try:
            if len(frames) > 2 * MAX_FUSED:
                raise BadMessage(f"{len(frames)} parts")
            for frame in rest:
                header = decode_header(frame.buffer, self.job)
                body = None if header.place == Place.NONE else next(rest, None)
                if (body is None) != (header.place == Place.NONE):
                    raise BadMessage("a payload that is not where the header says")
                payload = None if body is None else body.buffer
                hello = sender is not None and header.kind == Kind.CONTROL and header.topic == "hello"
                # A hello of an unknown identity is the first one, even if the connection's descriptor is known. An
                # earlier connection may have had this descriptor, and ended before its hello was read.
                repeated = hello and sender is not None and not self._sockets.awaits_hello(sender.get(zmq.SRCFD))
                if repeated and link is not None:
                    header.topic = AGAIN
                if link is None and sender is not None and not hello and self.who["incarnation"]:
                    self.counters[LEFT_OVER] += 1  # the peer has not yet noticed that it has to say hello
                    return
                if link is None and sender is not None:
                    link = self._accepted.accept(header, payload, socket, sender)
                assert link is not None
                if dialled is not None and not self._is_of_this_life(link, dialled, header):
                    self.counters[LEFT_OVER] += 1
                    continue
                if header.place == Place.SHARED_MEMORY and payload is not None:
                    payload = link.received_at(payload)
                self._arrived(link, header, payload, len(frame) + (0 if payload is None else len(payload)))
                if hello and sender is not None:
                    self._sockets.identified(sender.get(zmq.SRCFD))
                    self._accepted.note(*self._accepted.by_identity[sender.bytes], sender.get(zmq.SRCFD))
        except BadMessage as error:
            self.count_refused(link, "malformed", str(error))
            if link is not None:
                # Its sender counts what cannot be read as under way, and would otherwise wait for ever. This is more
                # than its payloads, by the headers, which the sender's window bears.
                link.drop(sum(map(len, rest)))
        self._fusing.flush_due()

    def _arrived(self, link: Link, header: Header, payload: memoryview | None, size: int) -> None:
        link.received += size
        link.health.hear(moved=header.kind != Kind.CONTROL or header.credit > link.returned)
        if self.wan is None or not link.wide_area:
            self._deliver(link, header, payload)
        else:
            lane = LANES[header.kind != Kind.CONTROL and payload is not None]
            deliver = partial(self._deliver_late, link, link.incarnation, header, payload)
            self.wan.receive(size, lane, link.name, deliver)

    def _is_of_this_life(self, link: Link, lane: Lane, header: Header) -> bool:
        """Whether a message from a dialled peer does not belong to an earlier life. A welcome may begin a new life.

        A message of the dead process on one lane may be read after the new process's welcome on the other lane.
        """
        if header.kind != Kind.CONTROL or header.topic != "welcome":
            return lane not in link.lanes.stale
        known, incarnation = link.incarnation, header.acked
        if incarnation > MAX_INCARNATION:
            raise BadMessage(f"a welcome in incarnation {incarnation}")
        if known is not None and incarnation < known:
            return False
        link.incarnation = incarnation
        if known is not None and incarnation > known:
            link.renew(incarnation, lane)
            self._on_renewed(link)
        link.lanes.stale.discard(lane)
        return True

    def _leave(self, link: Link, incarnation: int | None, lane: Lane, parts: list[Any]) -> None:
        """The emulated link has passed a message to this incarnation of the peer."""
        if incarnation in (None, link.incarnation):
            link.lanes.write(lane, parts)

    def _deliver_late(
        self, link: Link, incarnation: int | None, header: Header, payload: memoryview | None
    ) -> None:
        """The emulated link has passed a message of this incarnation of the peer."""
        if incarnation in (None, link.incarnation):
            self._deliver(link, header, payload)

    def _deliver(self, link: Link, header: Header, payload: memoryview | None) -> None:
        link.credit(header.credit, header.arrived)
        if payload is not None and header.kind != Kind.CONTROL:
            link.arrived(len(payload))
        try:
            if header.kind != Kind.CONTROL or not link.on_control(header, payload):
                self._on_message(link, header, payload)
        except (BadMessage, msgspec.ValidationError) as error:
            self.refuse(link, error, None if header.kind == Kind.CONTROL else len(payload or b""))

    def _flush_credit(self) -> None:
        while self._credit_due:
            self._credit_due.pop().flush_credit()

    # Connections.

    def _add(self, link: Link, *, near: bool) -> None:
        """near: whether the link is over a unix socket."""
        self.links.append(link)
        if near and not (link.wide_area and self.wan):
            link.share_memory()

    def _on_accepted(self, link: Link, near: bool) -> None:
        self._on_link(link)
        self._add(link, near=near)

    def _connected(self, link: Link, lane: Lane, connection: Connection) -> None:
        link.lanes.connections[lane] = connection
        link.lanes.greet(lane)
        self.loop.call_later(UNWELCOMED, partial(self._check_welcome, link, lane, connection))

    def _check_welcome(self, link: Link, lane: Lane, connection: Connection) -> None:
        """Dial again if the hello, or its welcome, was lost on a connection that stands."""
        # If a listener's thread is late, libzmq may take an old connection for the newer one of the same process, and
        # then drops the hello on the other. Nothing would ever be sent on this lane.
        if link.lanes.connections.get(lane) is connection and not link.lanes.is_up(lane):
            link.lanes.down(lane)
            connection.shut_down()

    def _disconnected(self, link: Link, lane: Lane, given_up: bool) -> None:
        link.on_disconnected(lane, given_up=given_up)
        if lane == "control" and not given_up:
            self._on_closed(link)
