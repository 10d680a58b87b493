"""A link to one peer: its send queue, its flow control, and the state of its connections.

A link has two lanes, each a connection of its own: "tensors", and "control" for everything else. So credit, requests
and answers never queue behind tensors, neither here nor in the system's socket buffers. Small tensors sent in one turn
of the loop are fused into one message (header, payload, header, payload, ...), which saves the fixed cost per message.
"""

import heapq
import itertools
import time
from collections import Counter
from functools import partial
from typing import Any, Literal, Protocol

import zmq

from geomx_cli.ps.net.shared_memory import PLACE, PeerArena
from geomx_cli.ps.net.sockets import Socket
from geomx_cli.ps.net.window import Window
from geomx_cli.ps.net.wire import BadMessage, Header, Kind, Place, decode_body, encode_body, encode_header

__all__ = ["LANES", "MAX_FUSED", "QUIET", "Lane", "Lend", "Link", "LinkTransport"]

Lane = Literal["tensors", "control"]
LANES: tuple[Lane, Lane] = ("control", "tensors")
CREDIT_STEP = 1024 * 1024
SMALL = 32 * 1024
SLACK = 1.0
MAX_FUSED = 64
MAX_WANTED = 65_536
MOST_SECONDS = 1e12
QUIET = 5.0
"""Seconds without a word after which a link counts as silent."""


class Lend(Protocol):
    """Copies a payload into shared memory for the link's peer and returns its place there; None if there is no room."""

    def __call__(self, link: "Link", payload: memoryview, *, lasting: bool) -> bytes | None: ...


class LinkTransport(Protocol):
    """What a link requires of its transport."""

    slice_bytes: int
    window_bytes: int
    counters: Counter[str]

    def fill(self, header: Header) -> None:
        """Set the header fields that are the same in all messages of this process."""

    def owes(self, link: "Link") -> None:
        """Schedule returning this link's credit, in case no message carries it first."""

    def owes_later(self, link: "Link") -> None:
        """Like `owes`, callable from any thread."""

    def fuses(self, link: "Link") -> None:
        """Flush this link at the end of the turn of the loop."""

    def hand_over(self, link: "Link", lane: Lane, parts: list[Any], size: int) -> None:
        """Write to the socket, now or when the emulated link has passed the message."""


class Link:
    """A link to one peer. `wide_area`: the peer is in another party. `dialled`: this process dials the peer, as it does
    those above it. `sent` and `received` count bytes on the wire.

    Times in time.monotonic seconds: `heard`, when the last message was received; `was_heard`, the send time of the
    newest message that the peer is known to have received, or when its connection was made; `told`, the last reported
    traffic behind the peer; `unsteady`, when our heartbeats last went unanswered for a while; `closed`, when the peer
    closed the connection, 0 if it has not. `clock` is the newest reading of the peer's own clock.
    """

    def __init__(self, transport: LinkTransport, name: str, wide_area: bool, *, dialled: bool) -> None:
        self.name = name
        self.wide_area = wide_area
        self.dialled = dialled
        self.sent = self.received = 0
        self.heard = time.monotonic()
        self.clock = self.was_heard = self.told = self.closed = self.unsteady = 0.0
        self._known = False
        self._moved = self._whole_since = 0.0
        self.hello: dict[str, Any] = {}
        self.greeting: dict[str, Any] = {}
        self._transport = transport
        self._wires: dict[Lane, tuple[Socket, bytes]] = {}
        self._hellos = 0
        self._greeted: dict[Lane, int] = {}
        self._connected: set[Lane] = set()
        self._up: set[Lane] = set()
        self.window = Window(transport.slice_bytes, transport.window_bytes, SLACK if wide_area else 0.0)
        self._queue: list[tuple[int, int, int, Header, memoryview]] = []
        self._order = itertools.count()
        self._queued: set[tuple[Kind, int]] = set()
        self._wanted: dict[tuple[int, int, int], None] = {}
        self._consumed = self._told_consumed = self.returned = 0
        self._fused: list[Any] = []
        self._lend: Lend | None = None  # set once the peer has mapped our arena
        self._peer_arena: PeerArena | None = None

    def attach(self, lane: Lane, socket: Socket, identity: bytes) -> None:
        """Use `socket` for this lane; `identity` is the peer's on a ROUTER, else empty."""
        self._wires[lane] = (socket, identity)

    def send(self, header: Header, payload: memoryview | None = None) -> None:
        """Send `header` and `payload` (bytes that must not change until the receiver has them); returns at once.

        A payload waits for the window, for higher priorities, and for earlier requests of the same priority, so a
        slice's rounds stay in order even if repeated. Everything else is sent immediately. A repeat of a message that
        is still queued is dropped.
        """
        # a pull of rows is not queued: behind tensors that wait for others it could cause a deadlock
        if payload is None or header.kind == Kind.PULL:
            self._emit(header, payload)
            return
        if (header.key, header.slice, header.round) in self._wanted:
            del self._wanted[header.key, header.slice, header.round]
            self._emit(header, payload)
            return
        if (header.kind, header.request) in self._queued:
            return
        self._queued.add((header.kind, header.request))
        heapq.heappush(self._queue, (-header.priority, header.request, next(self._order), header, payload))
        self._pump()

    def queues(self, header: Header) -> bool:
        """Whether this message is in the send queue."""
        return (header.kind, header.request) in self._queued

    def control(
        self, topic: str, body: dict[str, Any] | bytes | None = None, request: int = 0, acked: int = 0
    ) -> None:
        """Send a CONTROL message, whose body may be encoded already. It does not wait for tensors."""
        payload = memoryview(body if isinstance(body, bytes) else encode_body(body)) if body else None
        self._emit(Header(topic=topic, request=request, acked=acked), payload)

    def consumed(self, size: int) -> None:
        """Return credit for `size` payload bytes from this peer that are no longer held here."""
        self._consumed += size
        if self._consumed - self._told_consumed >= CREDIT_STEP:
            self.flush_credit()
        else:
            self._transport.owes(self)

    def flush_credit(self) -> None:
        """Send the credit that no message has carried yet, and release shared memory blocks that are free again."""
        if self._peer_arena is not None and (blocks := self._peer_arena.freed()):
            self.control("freed", {"blocks": blocks})
        if self._consumed > self._told_consumed:
            self._emit(Header(topic="credit"), None)

    def ask_for(self, key: int, index: int, round_: int) -> None:
        """Ask the peer to send this slice beyond its window."""
        self._emit(Header(topic="want", key=key, slice=index, round=round_), None)

    def ask_again(self, request: int) -> None:
        """Ask the peer to send a contribution again that was not received."""
        self._emit(Header(topic="again", request=request), None)

    def want(self, key: int, index: int, round_: int) -> bool:
        """The receiver is blocked on this slice: send it beyond the window, now or when it is queued.

        Returns True if it was queued.
        """
        wanted = (key, index, round_)
        for position, (*_, header, payload) in enumerate(self._queue):
            if (header.key, header.slice, header.round) == wanted and header.kind == Kind.EXCHANGE:
                del self._queue[position]
                heapq.heapify(self._queue)
                self._queued.discard((header.kind, header.request))
                self._emit(header, payload)
                return True
        # A slice in flight already is never queued here again, so its entry would stay: evict the oldest.
        self._wanted[wanted] = None
        if len(self._wanted) > MAX_WANTED:
            del self._wanted[next(iter(self._wanted))]
        return False

    def credit(self, total: int) -> None:
        """Apply the peer's credit: `total` bytes returned since the link exists. Each message carries the total, so a
        lost message loses no credit.
        """
        if total > self.returned:
            self.window.returned(total - self.returned)
            self.returned = total
            self._pump()

    def greet(self, lane: Lane) -> None:
        """Say hello on a new connection of a lane that this process dials. Nothing else is sent on it before the peer's
        welcome.

        Otherwise a message on the other lane could arrive before the hello, and its answer would be sent on the old
        connection and lost.
        """
        self._hellos += 1
        self._greeted[lane] = self._hellos
        header = Header(topic="hello", request=self._hellos, place=Place.FRAME)
        self._transport.fill(header)
        self._write(lane, [encode_header(header), encode_body({**self.greeting, "lane": lane})])

    def welcome(self, lane: Lane, number: int) -> None:
        """Answer a hello: messages on this lane use its new connection from now on."""
        header = Header(topic="welcome", request=number, place=Place.NONE)
        self._transport.fill(header)
        self._write(lane, [encode_header(header)])

    def welcomed(self, number: int) -> Lane | None:
        """The lane whose latest hello had this number, if any."""
        return next((lane for lane, greeted in self._greeted.items() if greeted == number), None)

    def restart(self, lane: Lane) -> bool:
        """Reset a lane whose new connection both ends know. Messages in flight on the old one are lost; their owners
        send them again.

        Returns True if the lane had a connection before.
        """
        again, self.closed = lane in self._connected, 0.0
        self._connected.add(lane)
        self._up.add(lane)
        if lane == "tensors":
            self._fused.clear()
        else:  # its handshake has crossed in both directions
            self.was_heard = max(self.was_heard, time.monotonic())
        self.window.restart()
        self._pump()
        return again

    @property
    def is_up(self) -> bool:
        """Whether both lanes, dialled by this process, have been welcomed."""
        return len(self._up) == len(LANES)

    def down(self, lane: Lane) -> None:
        """This lane's connection has ended."""
        self._up.discard(lane)
        self._greeted.pop(lane, None)

    # Shared memory.

    def share(self, lend: Lend) -> None:
        """The peer has mapped our arena: send large payloads through it from now on."""
        self._lend = lend
        self.window.stay_small()

    def map(self, offer: dict[str, Any]) -> bool:
        """Map the peer's arena if possible. Returns True if that was attempted for the first time and succeeded."""
        before = self._peer_arena
        if before is None:
            try:
                self._peer_arena = PeerArena(offer, partial(self._transport.owes_later, self))
            except OSError:
                return False
        return before is None

    def received_at(self, place: memoryview) -> memoryview:
        """The payload at a place in the peer's arena. Raises BadMessage."""
        if self._peer_arena is None:
            raise BadMessage("a payload in memory that is not shared")
        return self._peer_arena.view(place)

    # Liveness.

    def hear(self, *, moved: bool) -> None:
        """Record a received message; `moved`: it was a tensor or carried credit for one."""
        now = time.monotonic()
        if not self._known or now - self.heard >= QUIET:
            self._whole_since = now
        self._known, self.heard = True, now
        if moved:
            self._moved = now

    def expect(self) -> None:
        """Start measuring silence now."""
        self.heard = time.monotonic()

    def excuse(self, pause: float) -> None:
        """This process did not run for `pause` seconds: do not count them as the peer's silence."""
        now = time.monotonic()
        self.heard = min(now, self.heard + pause)
        self._whole_since = now if self._known else 0.0
        if self.closed:
            self.closed = min(now, self.closed + pause)

    def whole_since(self) -> float:
        """The start of the current period without silence: now, if the peer is silent; 0 if it was never heard."""
        now = time.monotonic()
        return now if self._known and now - self.heard >= QUIET else self._whole_since

    def progress(self) -> float:
        """The time of the last progress on this link or behind the peer: a tensor, credit for one, or a restored
        connection.

        It is now while the link is silent, because what is lost then is retransmitted later.
        """
        return max(self._moved, self.told, self.whole_since())

    def write(self, lane: Lane, parts: list[Any]) -> None:
        """Write to the socket. On a dialled lane the parts are dropped until the peer has welcomed it."""
        if not self.dialled or lane in self._up:
            self._write(lane, parts)

    def _write(self, lane: Lane, parts: list[Any]) -> None:
        """Write to the socket. An unreachable peer is only counted; the heartbeat detects its silence."""
        socket, identity = self._wires.get(lane) or next(iter(self._wires.values()))
        try:
            socket.send_multipart([identity, *parts] if identity else parts, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._transport.counters["unreachable"] += 1

    def _emit(self, header: Header, payload: memoryview | None) -> None:
        tensor = header.kind != Kind.CONTROL and payload is not None
        place = None
        if tensor and payload is not None:
            self.window.sent(len(payload))
            if self._lend is not None and len(payload) >= SMALL:
                place = self._lend(self, payload, lasting=header.kind == Kind.RESULT)
        header.credit = self._told_consumed = self._consumed
        self._transport.fill(header)
        header.place = Place.NONE if payload is None else Place.FRAME if place is None else Place.SHARED_MEMORY
        parts: list[Any] = [encode_header(header)]
        if payload is not None:
            parts.append(_as_received(payload) if place is None else place)
        if not tensor:
            self._hand_over("control", parts)
            return
        if place is not None and payload is not None:
            self.sent += len(payload) - PLACE.size
        self._fused += parts
        if len(parts[1]) < SMALL and len(self._fused) < 2 * MAX_FUSED:
            self._transport.fuses(self)
        else:
            self.flush()

    def flush(self) -> None:
        """Send the fused small tensors as one message."""
        parts, self._fused = self._fused, []
        if parts:
            self._hand_over("tensors", parts)

    def _hand_over(self, lane: Lane, parts: list[Any]) -> None:
        size = sum(len(part) for part in parts)
        self.sent += size
        self._transport.hand_over(self, lane, parts, size)

    def receive_heartbeat(self, payload: memoryview | None) -> None:
        """Read a heartbeat's clock, echo and progress. Raises BadMessage."""
        body: dict[str, Any] = decode_body(payload) if payload is not None else {}
        clock, echo, moved = body.get("clock", float("inf")), body.get("echo", 0.0), body.get("moved", -1.0)
        numbers = (clock, echo, moved)
        if not all(isinstance(number, int | float) and abs(number) < MOST_SECONDS for number in numbers):
            raise BadMessage(f"a heartbeat that says {numbers!r}"[:200])
        now = time.monotonic()
        self.clock = float(clock)
        self.was_heard = max(self.was_heard, min(echo, now))
        if moved >= 0:
            self.told = max(self.told, now - moved)

    def _pump(self) -> None:
        queue, window = self._queue, self.window
        while queue and window.admits(len(queue[0][-1])):
            *_, header, payload = heapq.heappop(queue)
            self._queued.discard((header.kind, header.request))
            self._emit(header, payload)


def _as_received(payload: memoryview) -> memoryview | zmq.Frame:
    """The received frame, if the payload is all of it: libzmq forwards a frame without copying it or calling back."""
    owner = payload.obj
    base = getattr(owner, "base", None)  # the payload of a numpy array
    if isinstance(base, memoryview):
        owner = base.obj
    return owner if isinstance(owner, zmq.Frame) and len(owner) == len(payload) else payload
