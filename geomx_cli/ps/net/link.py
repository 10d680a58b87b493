"""A link: one peer, what waits for it, and how much is under way to it.

It has two lanes, each a connection of its own: tensors on the one, everything else on the other. So credit, requests
and answers never stand behind tensors, neither here nor in the buffers of the system. Small tensors that are sent in
one turn of the loop travel as one message: header, payload, header, payload, ...
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

Lane = Literal["tensors", "talk"]
LANES: tuple[Lane, Lane] = ("talk", "tensors")
CREDIT_STEP = 1024 * 1024
SMALL = 32 * 1024
SLACK = 1.0
MAX_FUSED = 64
MAX_WANTED = 65_536
MOST_SECONDS = 1e12
QUIET = 5.0
"""Seconds without a word after which a link counts as silent."""


class Lend(Protocol):
    """Puts a payload for the link's peer into shared memory: its place there, None where there is no room."""

    def __call__(self, link: "Link", payload: memoryview, *, lasting: bool) -> bytes | None: ...


class LinkTransport(Protocol):
    """What a link needs of the transport that it belongs to."""

    slice_bytes: int
    window_bytes: int
    counters: Counter[str]

    def fill(self, header: Header) -> None:
        """Complete the header with what is the same in all messages of this process."""

    def owes(self, link: "Link") -> None:
        """Remember to return this link's credit soon, if no message carries it before."""

    def owes_later(self, link: "Link") -> None:
        """The same from any thread."""

    def fuses(self, link: "Link") -> None:
        """Flush this link when the turn of the loop is over."""

    def hand_over(self, link: "Link", lane: Lane, parts: list[Any], size: int) -> None:
        """Write to the socket, now or when the emulated link lets it through."""


class Link:
    """One peer. `wide_area` says that it stands in another party, `dialled` that this process dials it, which it does
    to those above: `sent` and `received` count bytes on the wire.

    In time.monotonic seconds: `heard`, when the last message came; `was_heard`, when the newest one was sent that the
    peer is known to have heard; `told`, when something has moved behind it; `unsteady`, when no beat of ours had been
    answered for a while; `closed`, when the peer closed the connection, 0 while all is well. `clock` is the newest that
    came from the peer, by its own.
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
        self._lend: Lend | None = None  # where the peer has mapped our arena
        self._peer_arena: PeerArena | None = None

    def attach(self, lane: Lane, socket: Socket, identity: bytes) -> None:
        """Use `socket` for this lane; `identity` is the peer's on a ROUTER, else empty."""
        self._wires[lane] = (socket, identity)

    def send(self, header: Header, payload: memoryview | None = None) -> None:
        """Send `header` and `payload` (bytes that must not change until the receiver has them); returns at once.

        A payload waits for the window, for what has a higher priority, and for earlier requests of the same priority:
        so a slice's rounds go in order, also those that are repeated. Anything else leaves now. A repeat of what still
        waits is dropped.
        """
        if payload is None or header.kind == Kind.PULL:  # numbers of rows: behind others they might wait for each other
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
        """Whether this message waits here to be sent."""
        return (header.kind, header.request) in self._queued

    def control(
        self, topic: str, body: dict[str, Any] | bytes | None = None, request: int = 0, acked: int = 0
    ) -> None:
        """Send a CONTROL message, its body perhaps encoded already; it overtakes every tensor."""
        payload = memoryview(body if isinstance(body, bytes) else encode_body(body)) if body else None
        self._emit(Header(topic=topic, request=request, acked=acked), payload)

    def consumed(self, size: int) -> None:
        """`size` bytes of payload from this peer are no longer held here: return them to its window."""
        self._consumed += size
        if self._consumed - self._told_consumed >= CREDIT_STEP:
            self.flush_credit()
        else:
            self._transport.owes(self)

    def flush_credit(self) -> None:
        """Return what is owed, if no message has carried it, and blocks of shared memory that are free again."""
        if self._peer_arena is not None and (blocks := self._peer_arena.freed()):
            self.control("freed", {"blocks": blocks})
        if self._consumed > self._told_consumed:
            self._emit(Header(topic="credit"), None)

    def ask_for(self, key: int, index: int, round_: int) -> None:
        """Ask the peer to send this slice ahead of its window."""
        self._emit(Header(topic="want", key=key, slice=index, round=round_), None)

    def ask_again(self, request: int) -> None:
        """Ask the peer to send a contribution that is not here, though it was sent."""
        self._emit(Header(topic="again", request=request), None)

    def want(self, key: int, index: int, round_: int) -> bool:
        """The receiver cannot go on without this slice: let it overtake the window, now or when it comes.

        True if it was here.
        """
        wanted = (key, index, round_)
        for position, (*_, header, payload) in enumerate(self._queue):
            if (header.key, header.slice, header.round) == wanted and header.kind == Kind.EXCHANGE:
                del self._queue[position]
                heapq.heapify(self._queue)
                self._queued.discard((header.kind, header.request))
                self._emit(header, payload)
                return True
        # A slice that was under way already never comes here again; the oldest of those make room.
        self._wanted[wanted] = None
        if len(self._wanted) > MAX_WANTED:
            del self._wanted[next(iter(self._wanted))]
        return False

    def credit(self, total: int) -> None:
        """The peer has returned `total` bytes since there is this link. Told so with each message, it is no harm if one
        that says so is lost.
        """
        if total > self.returned:
            self.window.returned(total - self.returned)
            self.returned = total
            self._pump()

    def greet(self, lane: Lane) -> None:
        """This lane that we dial has a new connection: say whose it is, and nothing else before the peer welcomes it.

        What is sent on the other lane may be there first; its answer would be sent on the old connection, and be lost.
        """
        self._hellos += 1
        self._greeted[lane] = self._hellos
        header = Header(topic="hello", request=self._hellos, place=Place.FRAME)
        self._transport.fill(header)
        self._write(lane, [encode_header(header), encode_body({**self.greeting, "lane": lane})])

    def welcome(self, lane: Lane, number: int) -> None:
        """Answer a hello: from now on, what is sent on this lane goes on its new connection."""
        header = Header(topic="welcome", request=number, place=Place.NONE)
        self._transport.fill(header)
        self._write(lane, [encode_header(header)])

    def welcomed(self, number: int) -> Lane | None:
        """The lane whose newest hello had this number, if there is one."""
        return next((lane for lane, greeted in self._greeted.items() if greeted == number), None)

    def restart(self, lane: Lane) -> bool:
        """Both ends know that this lane has a new connection: what was under way on the old one is lost.

        Who keeps it sends it again. True if there was one before.
        """
        again, self.closed = lane in self._connected, 0.0
        self._connected.add(lane)
        self._up.add(lane)
        if lane == "tensors":
            self._fused.clear()
        self.window.restart()
        self._pump()
        return again

    @property
    def is_up(self) -> bool:
        """Whether both lanes, which are dialled here, have been welcomed."""
        return len(self._up) == len(LANES)

    def down(self, lane: Lane) -> None:
        """The connection of this lane has ended."""
        self._up.discard(lane)
        self._greeted.pop(lane, None)

    # Shared memory.

    def share(self, lend: Lend) -> None:
        """The peer has mapped our arena: large payloads go there from now on."""
        self._lend = lend
        self.window.stay_small()

    def map(self, offer: dict[str, Any]) -> bool:
        """Map the peer's arena, if that is possible here. True if it was not mapped before, and now is."""
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
        """A message has come; with `moved` it was a tensor, or brought credit for one."""
        now = time.monotonic()
        if not self._known or now - self.heard >= QUIET:
            self._whole_since = now
        self._known, self.heard = True, now
        if moved:
            self._moved = now

    def expect(self) -> None:
        """Count silence from now on."""
        self.heard = time.monotonic()

    def excuse(self, pause: float) -> None:
        """This process itself has not run for `pause` seconds: that is no silence of the peer's."""
        now = time.monotonic()
        self.heard = min(now, self.heard + pause)
        self._whole_since = now if self._known else 0.0
        if self.closed:
            self.closed = min(now, self.closed + pause)

    def whole_since(self) -> float:
        """Since when the peer is heard without a gap; now, while it is silent; 0 before it was heard at all."""
        now = time.monotonic()
        return now if self._known and now - self.heard >= QUIET else self._whole_since

    def progress(self) -> float:
        """When something has last moved here or behind the peer: a tensor, credit for one, the link back from a cut.

        That is now while the link is silent: what is lost then is sent again later.
        """
        return max(self._moved, self.told, self.whole_since())

    def write(self, lane: Lane, parts: list[Any]) -> None:
        """Give the parts to the socket; on a lane that is dialled they are lost until the peer has welcomed it."""
        if not self.dialled or lane in self._up:
            self._write(lane, parts)

    def _write(self, lane: Lane, parts: list[Any]) -> None:
        """A peer that is gone is only counted: others notice its silence."""
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
            self._hand_over("talk", parts)
            return
        if place is not None and payload is not None:
            self.sent += len(payload) - PLACE.size
        self._fused += parts
        if len(parts[1]) < SMALL and len(self._fused) < 2 * MAX_FUSED:
            self._transport.fuses(self)
        else:
            self.flush()

    def flush(self) -> None:
        """Send the small tensors that have waited for each other, as one message."""
        parts, self._fused = self._fused, []
        if parts:
            self._hand_over("tensors", parts)

    def _hand_over(self, lane: Lane, parts: list[Any]) -> None:
        size = sum(len(part) for part in parts)
        self.sent += size
        self._transport.hand_over(self, lane, parts, size)

    def receive_heartbeat(self, payload: memoryview | None) -> None:
        """Note what it says. Raises BadMessage."""
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
    """The very frame that `payload` is all of, if it came from a socket: libzmq passes that on without bookkeeping."""
    owner = payload.obj
    base = getattr(owner, "base", None)  # of a numpy array
    if isinstance(base, memoryview):
        owner = base.obj
    return owner if isinstance(owner, zmq.Frame) and len(owner) == len(payload) else payload
