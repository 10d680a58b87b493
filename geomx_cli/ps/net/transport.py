"""The links of one process: identifies peers, reads messages from the sockets, and refuses invalid ones.

Sockets have no limits (see sockets.py): each link queues by priority (FIFO within a priority) and hands its socket only
what its window admits.
"""

import itertools
import secrets
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import zmq

from geomx_cli.core.events import EventLog, Traffic, WarningRaised
from geomx_cli.ps.net.link import LANES, MAX_FUSED, Lane, Link
from geomx_cli.ps.net.loop import Loop
from geomx_cli.ps.net.malloc import keep_freed_memory
from geomx_cli.ps.net.security import KeyRing
from geomx_cli.ps.net.shaping import Shaper
from geomx_cli.ps.net.sharing import Sharing
from geomx_cli.ps.net.sockets import Socket, Sockets
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

__all__ = ["Transport"]

Handler = Callable[[Link, Header, memoryview | None], None]

BATCH = 64
IDENTITY = 12  # bytes, without the one for the lane; a replaced connection gets another identity, of 5 bytes
MAX_LINKS = 4096
MAX_HELLO = 4096
CREDIT_DELAY = 0.004
LONGEST_WHY, MOST_REFUSALS = 500, 20
TOGETHER = 5.0
IN_VAIN, LARGE = 3, 16 * 1024
"""Connections in a row that were given up, though each was made, without so many bytes of tensors having arrived."""


class Transport:
    """Sends and receives messages over links. `on_message` gets every well-formed message of this job that is not
    handled by the transport itself.

    on_link: called for each peer that dials; may refuse it with BadMessage. on_reconnect: called for each lane with a
    new connection, including the first, whichever end dialled; messages in flight on the previous one may be lost.
    on_closed: called when a link's talk lane has ended, until it reconnects. on_asked: gets the peer's requests for
    retransmission: "want" for a slice (key, slice, round) that is not in the link's queue, "again" for a request
    number.

    `counters` counts refused messages by reason; the first of each reason and peer is written to the event log.
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
        window_bytes: int = 0,
        shaper: Shaper | None = None,
    ) -> None:
        self.loop = loop
        self.job = job
        self.who = who
        self.slice_bytes = slice_bytes
        self.window_bytes = window_bytes
        self.counters: Counter[str] = Counter()
        self.links: list[Link] = []
        self._on_message = on_message
        self._on_link = on_link
        self._on_reconnect = on_reconnect
        self._on_closed = on_closed
        self._on_asked = on_asked
        self._events = events
        self._shaper = shaper or None
        self._order = itertools.count()
        self._owing: set[Link] = set()
        self._fusing: set[Link] = set()
        loop.each_turn(self._flush_fused)
        keep_freed_memory()
        self._sockets = Sockets(
            loop, keys, partial(self.refuse, None), MAX_MESSAGE if keys is None else largest_message(slice_bytes)
        )
        self._accepted: dict[bytes, Link] = {}
        self._talks: dict[int, Link] = {}  # accepted talk lanes, by file descriptor
        self._descriptors: dict[Link, int] = {}
        self._told_back: dict[Link, float] = {}
        self._hellos = 0
        self._in_vain: dict[Link, tuple[int, int]] = {}  # credit when tensor connections were given up, and how often
        self._by_peer: dict[bytes, Link] = {}
        self._delayed: dict[int, tuple[Link, Lane, list[Any]]] = {}
        self.sharing = Sharing(events)
        self._refusals: set[tuple[Link, str]] = set()

    def listen(self, endpoints: tuple[str, ...]) -> tuple[str, ...]:
        """Bind one ROUTER to all `endpoints` ("tcp://host:port", port * for any, or "ipc://path"); returns the bound
        ones.

        Raises InvalidSettings naming the endpoint if one cannot be bound.
        """
        return self._sockets.listen(endpoints, self._read_router, self._accepted_closed)

    def dial(self, endpoint: str, name: str, *, wide_area: bool, **hello: Any) -> Link:
        """A link to the process listening at `endpoint`. It starts with a hello; the peer may start later."""
        link = Link(self, name, wide_area, dialled=True)
        link.greeting = {**self.who, **hello}
        self.links.append(link)
        if endpoint.startswith("ipc:") and not (wide_area and self._shaper):
            self.sharing.allow(link)
        identity = secrets.token_bytes(IDENTITY).replace(b"\0", b"\1")
        for number, lane in enumerate(LANES):
            dealer = self._sockets.dial(
                endpoint,
                identity + bytes([number + 1]),
                partial(self._read_dealer, link),
                partial(link.greet, lane),
                partial(self._disconnected, link, lane),
            )
            link.attach(lane, dealer, b"")
        return link

    def close(self, linger: float = 1.0) -> None:
        """Close all sockets; pending data may be sent within `linger` seconds."""
        for number in list(self._delayed):  # do not lose a goodbye in the emulated link
            self._release(number)
        self._sockets.close(linger)

    def traffic(self) -> Traffic:
        """Bytes of messages sent and received so far."""
        peers: dict[str, tuple[int, int]] = {}
        lan = wan = (0, 0)
        for link in self.links:
            if link.wide_area:
                wan = (wan[0] + link.sent, wan[1] + link.received)
                sent, received = peers.get(link.name, (0, 0))
                peers[link.name] = (sent + link.sent, received + link.received)
            else:
                lan = (lan[0] + link.sent, lan[1] + link.received)
        return Traffic(lan, wan, peers)

    def refuse(self, link: Link | None, reason: str, text: str) -> None:
        """Count a dropped message; write the first of each reason and peer to the event log."""
        peer = link.name if link else "an unknown peer"
        self.counters[reason] += 1
        self.counters[f"{reason} from {peer}"] += 1
        if self.counters[f"{reason} from {peer}"] == 1 and len(self.counters) < 2 * MAX_LINKS:
            self._events.write(WarningRaised(message=f"refused a message from {peer}: {text}", reason=reason))

    # For Link only: see LinkTransport.

    def fill(self, header: Header) -> None:
        """See LinkTransport.fill."""
        header.job = self.job
        header.sender = self.who["process"]

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
        if self._shaper is None or not link.wide_area:
            link.write(lane, parts)
        else:
            number = next(self._order)
            self._delayed[number] = (link, lane, parts)
            self.loop.call_at(self._shaper.leaves(size, lane), partial(self._release, number))

    def _release(self, number: int) -> None:
        link, lane, parts = self._delayed.pop(number)
        link.write(lane, parts)

    # Reading.

    def _read_router(self, router: Socket) -> None:
        for _ in range(BATCH):
            try:
                identity, *frames = router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            hellos = self._hellos
            self._receive(self._accepted.get(identity.bytes), frames, router, identity)
            link = self._accepted.get(identity.bytes)
            if self._hellos != hellos:
                self._sockets.known(identity.get(zmq.SRCFD))
            if link is not None and LANES[identity.bytes[-1] - 1] == "talk":
                self._note_talk(link, identity.get(zmq.SRCFD))

    def _read_dealer(self, link: Link, dealer: Socket) -> None:
        for _ in range(BATCH):
            try:
                frames = dealer.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._receive(link, frames, dealer, None)

    def _receive(
        self, link: Link | None, frames: list[zmq.Frame], socket: Socket, identity: zmq.Frame | None
    ) -> None:
        """Split a message into its header and payload, or several fused ones. A message without a link is from a
        ROUTER, with its connection's `identity`.
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
                if link is None and identity is not None:
                    link = self._accept(header, payload, socket, identity)
                assert link is not None
                if header.place == Place.SHARED_MEMORY and payload is not None:
                    payload = link.received_at(payload)
                self._hellos += header.kind == Kind.CONTROL and header.topic == "hello"
                self._arrived(link, header, payload, len(frame) + (0 if payload is None else len(payload)))
        except BadMessage as error:
            self.refuse(link, "malformed", str(error))

    def _arrived(self, link: Link, header: Header, payload: memoryview | None, size: int) -> None:
        link.received += size
        link.hear(moved=header.kind != Kind.CONTROL or header.credit > link.returned)
        if self._shaper is not None and link.wide_area:
            lane = LANES[header.kind != Kind.CONTROL and payload is not None]
            self.loop.call_at(self._shaper.arrives(size, lane), lambda: self._deliver(link, header, payload))
        else:
            self._deliver(link, header, payload)

    def _deliver(self, link: Link, header: Header, payload: memoryview | None) -> None:
        link.credit(header.credit)
        if header.kind == Kind.CONTROL and header.topic == "credit":
            return
        wants = header.kind == Kind.CONTROL and header.topic == "want"
        if wants and link.want(header.key, header.slice, header.round):
            return
        try:
            if header.kind == Kind.CONTROL and header.topic == "hello":
                self._greeted(link, header.request, payload)
            elif header.kind == Kind.CONTROL and header.topic == "welcome":
                self._welcomed(link, header.request)
            elif header.kind == Kind.CONTROL and header.topic in ("memory", "mapped", "freed"):
                self.sharing.receive(link, header.topic, decode_body(payload) if payload is not None else {})
            elif header.kind == Kind.CONTROL and header.topic == "alive":
                link.receive_heartbeat(payload)
            elif header.kind == Kind.CONTROL and header.topic == "refused":
                self._note_refused(link, decode_body(payload, MAX_HELLO) if payload is not None else {})
            elif header.kind == Kind.CONTROL and header.topic in ("want", "again"):
                self._on_asked(link, header)
            else:
                self._on_message(link, header, payload)
        except (BadMessage, msgspec.ValidationError) as error:
            self.refuse(link, "malformed", str(error))
            if header.kind != Kind.CONTROL:
                link.consumed(0 if payload is None else len(payload))
                if self.counters[f"malformed from {link.name}"] <= MOST_REFUSALS:
                    link.control("refused", {"why": str(error)[:LONGEST_WHY]})

    def _accept(self, header: Header, payload: memoryview | None, router: Socket, sender: zmq.Frame) -> Link:
        if header.kind != Kind.CONTROL or header.topic != "hello" or payload is None:
            raise BadMessage("a message before the hello")
        hello = decode_body(payload, MAX_HELLO)
        try:
            name, party = str(hello["process"])[:128], str(hello["party"])[:128]
        except KeyError as error:
            raise BadMessage(f"a hello without {error}") from None
        identity, owner = sender.bytes, _owner(sender)
        if owner not in (None, name):
            raise BadMessage(f"a hello of {name} with the key of {owner}")
        if len(identity) != IDENTITY + 1:
            raise BadMessage("a hello on a connection that has been replaced")
        if len(self._accepted) >= 2 * MAX_LINKS or not 1 <= identity[-1] <= len(LANES):
            raise BadMessage("too many links, or no lane of one")
        link = self._by_peer.get(identity[:-1])
        if link is None:
            link = Link(self, name, party != self.who["party"], dialled=False)
            link.hello = hello
        link.attach(LANES[identity[-1] - 1], router, identity)
        if identity[:-1] not in self._by_peer:
            self._on_link(link)
            self._by_peer[identity[:-1]] = link
            self.links.append(link)
            if _is_near(sender) and not (link.wide_area and self._shaper):
                self.sharing.allow(link)
        self._accepted[identity] = link
        return link

    def _flush_fused(self) -> None:
        while self._fusing:
            self._fusing.pop().flush()

    def _flush_credit(self) -> None:
        while self._owing:
            self._owing.pop().flush_credit()

    # Connections.

    def _welcomed(self, link: Link, number: int) -> None:
        """The peer knows the connection of a lane that we dial: restart the lane, and report what may be lost."""
        lane = link.welcomed(number)
        if lane is None:  # a hello of a connection replaced meanwhile
            return
        if link.restart(lane):
            self._tell_back(link)
        if link.is_up:
            self.sharing.offer(link)
        self._on_reconnect(link, lane)

    def _disconnected(self, link: Link, lane: Lane, given_up: bool) -> None:
        link.down(lane)
        if given_up and lane == "tensors":
            self._note_in_vain(link)
        if lane == "talk" and not given_up:
            self._on_closed(link)

    def _note_in_vain(self, link: Link) -> None:
        """A tensor connection was given up without any acknowledgement: warn after several in a row."""
        before, count = self._in_vain.get(link, (0, 0))
        count = 1 if link.returned - before > LARGE else count + 1
        self._in_vain[link] = (link.returned, count)
        if count == IN_VAIN:
            what = f"the link {self.who['process']} - {link.name} passes small messages but drops large ones"
            why = "does something on the way drop large packets (path MTU)?"
            hint = "Try a smaller MTU on this host's interface (ip link set dev INTERFACE mtu 1280)"
            self._events.write(WarningRaised(message=f"{what}: {why} {hint}"))

    def _note_refused(self, link: Link, body: dict[str, Any]) -> None:
        """The peer refused a tensor or a query: log why, for whoever waits for the answer."""
        why = str(body.get("why"))[:LONGEST_WHY]
        if len(self._refusals) < MOST_REFUSALS and (link, why) not in self._refusals:
            self._refusals.add((link, why))
            self._events.write(WarningRaised(message=f"{link.name} refused a message of this process: {why}"))

    def _tell_back(self, link: Link) -> None:
        """Log once for both lanes, as they are usually cut together."""
        now = time.monotonic()
        if now - self._told_back.get(link, 0.0) > TOGETHER:
            self._events.write(WarningRaised(message=f"the connection to {link.name} was cut, and is back"))
        self._told_back[link] = now

    def _greeted(self, link: Link, number: int, payload: memoryview | None) -> None:
        """The peer has dialled, for the first time or again."""
        lane = decode_body(payload).get("lane") if payload is not None else None
        if link.dialled or lane not in LANES:
            raise BadMessage("a hello of no lane, or from a peer that does not dial")
        link.welcome(lane, number)
        link.restart(lane)
        self._on_reconnect(link, lane)

    def _note_talk(self, link: Link, descriptor: int) -> None:
        """Record the connection of this link's talk lane; it replaces an older one."""
        before = self._descriptors.get(link)
        if before != descriptor:
            if before is not None:
                self._talks.pop(before, None)
            self._talks[descriptor], self._descriptors[link] = link, descriptor

    def _accepted_closed(self, descriptor: int) -> None:
        link = self._talks.pop(descriptor, None)
        if link is not None:
            del self._descriptors[link]
            self._on_closed(link)


def _is_near(sender: zmq.Frame) -> bool:
    """Whether the message came over a unix socket: then libzmq gives the peer's account and pid instead of an address.
    """
    try:
        return str(sender.get("Peer-Address")).startswith("localhost:")
    except zmq.ZMQError:
        return False


def _owner(sender: zmq.Frame) -> str | None:
    """The process that the sender's key was made for; None without keys, as over a unix socket."""
    try:
        return str(sender.get("User-Id"))
    except zmq.ZMQError:
        return None
