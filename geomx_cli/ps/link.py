"""A link: one peer, what waits for it, and how much is under way to it.

It has two lanes, each a connection of its own: tensors on the one, everything else on the other. So credit, requests
and answers never stand behind tensors, neither here nor in the buffers of the system. Small tensors that are sent in
one turn of the loop travel as one message: header, payload, header, payload, ...
"""

import heapq
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import zmq

from geomx_cli.ps.sockets import Socket
from geomx_cli.ps.window import Window
from geomx_cli.ps.wire import Header, Kind, Place, encode_body, encode_header

if TYPE_CHECKING:
    from geomx_cli.ps.transport import Transport

__all__ = ["LANES", "MAX_FUSED", "Lane", "Link"]

Lane = Literal["tensors", "talk"]
LANES: tuple[Lane, Lane] = ("talk", "tensors")
CREDIT_STEP = 1024 * 1024
SMALL = 32 * 1024
SLACK = 1.0
MAX_FUSED = 64
MAX_WANTED = 65_536


class Link:
    """One peer. `wide_area` says that it stands in another party; `sent` and `received` count bytes on the wire."""

    def __init__(self, transport: "Transport", name: str, wide_area: bool) -> None:
        self.name = name
        self.wide_area = wide_area
        self.sent = self.received = 0
        self.hello: dict[str, Any] = {}
        self.greeting: dict[str, Any] = {}
        self._transport = transport
        self._wires: dict[Lane, tuple[Socket, bytes]] = {}
        self.window = Window(transport.slice_bytes, transport.window_bytes, SLACK if wide_area else 0.0)
        self._queue: list[tuple[int, int, Header, memoryview]] = []
        self._wanted: dict[tuple[int, int, int], None] = {}
        self._owed = 0
        self._fused: list[Any] = []

    def attach(self, lane: Lane, socket: Socket, identity: bytes) -> None:
        """Use `socket` for this lane; `identity` is the peer's on a ROUTER, else empty."""
        self._wires[lane] = (socket, identity)

    def send(self, header: Header, payload: memoryview | None = None) -> None:
        """Send `header` and `payload` (bytes that must not change until the receiver has them); returns at once.

        A payload waits for the window, and for what has a higher priority. Anything else leaves now.
        """
        if payload is None:
            self._emit(header, None)
            return
        if (header.key, header.slice, header.round) in self._wanted:
            del self._wanted[header.key, header.slice, header.round]
            self._emit(header, payload)
            return
        heapq.heappush(self._queue, (-header.priority, self._transport.next_order(), header, payload))
        self._pump()

    def control(self, topic: str, body: dict[str, Any] | bytes | None = None, request: int = 0) -> None:
        """Send a CONTROL message, its body perhaps encoded already; it overtakes every tensor."""
        payload = memoryview(body if isinstance(body, bytes) else encode_body(body)) if body else None
        self._emit(Header(topic=topic, request=request), payload)

    def consumed(self, size: int) -> None:
        """`size` bytes of payload from this peer are no longer held here: return them to its window."""
        self._owed += size
        if self._owed >= CREDIT_STEP:
            self.flush_credit()
        else:
            self._transport.owes(self)

    def flush_credit(self) -> None:
        """Return what is owed, if no message has carried it."""
        if self._owed:
            self._emit(Header(topic="credit"), None)

    def ask_for(self, key: int, index: int, round_: int) -> None:
        """Ask the peer to send this slice ahead of its window."""
        self._emit(Header(topic="want", key=key, slice=index, round=round_), None)

    def want(self, key: int, index: int, round_: int) -> None:
        """The receiver cannot go on without this slice: let it overtake the window, now or when it comes."""
        wanted = (key, index, round_)
        for position, (_, _, header, payload) in enumerate(self._queue):
            if (header.key, header.slice, header.round) == wanted and header.kind == Kind.EXCHANGE:
                del self._queue[position]
                heapq.heapify(self._queue)
                self._emit(header, payload)
                return
        # A slice that was under way already never comes here again; the oldest of those make room.
        self._wanted[wanted] = None
        if len(self._wanted) > MAX_WANTED:
            del self._wanted[next(iter(self._wanted))]

    def credit(self, size: int) -> None:
        """The peer has returned `size` bytes."""
        self.window.returned(size)
        self._pump()

    def greet(self, body: dict[str, Any]) -> None:
        """Say hello on both lanes: each is a connection that must say whose it is."""
        self.greeting = body
        for lane in LANES:
            self._emit(Header(topic="hello"), memoryview(encode_body(body)), lane)

    def restart(self) -> None:
        """This side has dialled anew: what was under way is lost, and what waited is sent again by who keeps it."""
        self._queue.clear()
        self._fused.clear()
        self._wanted.clear()
        self.window.restart()
        self.greet(self.greeting)

    def write(self, lane: Lane, parts: list[Any]) -> None:
        """Give the parts to the socket. A peer that is gone is only counted: others notice its silence."""
        socket, identity = self._wires.get(lane) or next(iter(self._wires.values()))
        try:
            socket.send_multipart([identity, *parts] if identity else parts, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._transport.counters["unreachable"] += 1

    def _emit(self, header: Header, payload: memoryview | None, lane: Lane | None = None) -> None:
        tensor = header.kind != Kind.CONTROL and payload is not None
        if tensor and payload is not None:
            self.window.sent(len(payload))
        header.credit, self._owed = self._owed, 0
        self._transport.fill(header)
        header.place = Place.NONE if payload is None else Place.FRAME
        parts: list[Any] = [encode_header(header)]
        if payload is not None:
            parts.append(_as_received(payload))
        if not tensor:
            self._hand_over(lane or "talk", parts)
            return
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

    def _pump(self) -> None:
        queue, window = self._queue, self.window
        while queue and window.admits(len(queue[0][3])):
            _, _, header, payload = heapq.heappop(queue)
            self._emit(header, payload)


def _as_received(payload: memoryview) -> memoryview | zmq.Frame:
    """The very frame that `payload` is all of, if it came from a socket: libzmq passes that on without bookkeeping."""
    owner = payload.obj
    if isinstance(owner, np.ndarray) and isinstance(owner.base, memoryview):
        owner = owner.base.obj
    return owner if isinstance(owner, zmq.Frame) and len(owner) == len(payload) else payload
