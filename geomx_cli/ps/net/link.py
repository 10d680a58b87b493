"""A link to one peer: what is sent to it, when, and on which connection.

A link has two lanes, each a connection of its own: "tensors", and "control" for everything else. So credit, requests
and answers never queue behind tensors, neither here nor in the system's socket buffers. Small tensors sent shortly
after one another are fused into one message (header, payload, header, payload, ...), which saves the fixed cost per
message.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import zmq

from geomx_cli.ps.net.lanes import Lane, Lanes
from geomx_cli.ps.net.link_health import LinkHealth
from geomx_cli.ps.net.send_queue import SendQueue, Window
from geomx_cli.ps.net.shared_memory import PLACE, PeerArena
from geomx_cli.ps.net.wire import BadMessage, Header, Kind, Place, encode_body, encode_header

__all__ = ["LINK_TOPICS", "MAX_FUSED", "Lend", "Link", "LinkTransport"]

CREDIT_STEP = 1024 * 1024
SMALL = 32 * 1024
MAX_FUSED = 64
LINK_TOPICS = frozenset({
    "again", "alive", "credit", "damaged", "freed", "hello", "hello again", "mapped", "memory", "ready", "refused",
    "want", "welcome",
})  # fmt: skip
"""Of control messages about the link itself, which no handler of requests gets."""


class Lend(Protocol):
    """Copies a payload into shared memory for the link's peer and returns its place there; None if there is no room."""

    def __call__(self, link: "Link", payload: memoryview, *, lasting: bool) -> bytes | None: ...


class LinkTransport(Protocol):
    """What a link requires of its transport."""

    job: int
    slice_bytes: int
    window_bytes: int
    counters: Counter[str]

    def owes(self, link: "Link") -> None:
        """Schedule returning this link's credit, in case no message carries it first."""

    def owes_later(self, link: "Link") -> None:
        """Like `owes`, callable from any thread."""

    def fuses(self, link: "Link") -> None:
        """Flush this link soon, at the end of the loop's turn at the latest."""

    def hand_over(self, link: "Link", lane: Lane, parts: list[Any], size: int) -> None:
        """Write to the socket, now or when the emulated link has passed the message."""


class Link:
    """A link to one peer. `wide_area`: the peer is in another party. `dialled`: this process dials the peer, as it does
    those above it, at `endpoint`; then `greeting` is what its hellos say. `hello` is what the peer's said. `sent` and
    `received` count bytes on the wire.
    """

    def __init__(
        self,
        transport: LinkTransport,
        name: str,
        wide_area: bool,
        greeting: dict[str, Any] | None = None,
        endpoint: str = "",
    ) -> None:
        self.name = name
        self.wide_area = wide_area
        self.dialled = greeting is not None
        self.endpoint = endpoint
        self.hello: dict[str, Any] = {}
        self.sent = self.received = 0
        self.health = LinkHealth()
        self.lanes = Lanes(transport.job, transport.counters, greeting)
        self.window = Window(transport.slice_bytes, transport.window_bytes, wide_area=wide_area)
        self._transport = transport
        self._queue = SendQueue()
        self._restarting = False
        self._consumed = self._told_consumed = self.returned = 0
        self._arrived = self._told_arrived = self._delivered = 0
        self._fused: list[Any] = []
        self._lend: Lend | None = None  # set once the peer has mapped our arena
        self._peer_arena: PeerArena | None = None

    def send(self, header: Header, payload: memoryview | None = None) -> None:
        """Send `header` and `payload` (bytes that must not change until the receiver has them); returns at once.

        A payload waits for the window, for higher priorities, and for earlier requests of the same priority, so a
        slice's rounds stay in order even if repeated. Everything else is sent immediately. A repeat of a message that
        is still queued is dropped.
        """
        # a pull of rows is not queued: behind tensors that wait for others it could cause a deadlock
        if payload is None or header.kind == Kind.PULL:
            self._emit(header, payload)
        else:
            self._queue.push(header, payload)
            self._pump()

    def queues(self, header: Header) -> bool:
        """Whether this message is in the send queue."""
        return header in self._queue

    def withdraw(self, header: Header) -> None:
        """Remove this contribution from the send queue: the receiver does not need it any more."""
        self._queue.remove(header)

    @property
    def unread(self) -> int:
        """Bytes of results of the peer's pulls that wait for its window."""
        return self._queue.pulled

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

    def arrived(self, size: int) -> None:
        """Tell the peer that `size` payload bytes have arrived; on a wide-area link only, as its path is limited."""
        if self.wide_area:
            self._arrived += size
            self._transport.owes(self)

    def flush_credit(self) -> None:
        """Send the credit that no message has carried yet, and release shared memory blocks that are free again."""
        if self._peer_arena is not None and (blocks := self._peer_arena.freed()):
            self.control("freed", {"blocks": blocks})
        if self._consumed > self._told_consumed or self._arrived > self._told_arrived:
            self._emit(Header(topic="credit"), None)

    def flush(self) -> None:
        """Send the fused small tensors as one message."""
        parts, self._fused = self._fused, []
        if parts:
            self._hand_over("tensors", parts)

    def request_slice(self, key: int, index: int, round_: int) -> None:
        """Ask the peer to send this slice without waiting for credit."""
        self._emit(Header(topic="want", key=key, slice=index, round=round_), None)

    def ask_again(self, request: int, *, damaged: bool = False) -> None:
        """Ask the peer to send a contribution again that was not received, or was damaged on the way."""
        self._emit(Header(topic="damaged" if damaged else "again", request=request), None)

    def want(self, key: int, index: int, round_: int) -> bool:
        """The receiver is blocked on this slice: send it ahead of others without waiting for credit, now or when it is
        queued. Returns True if it was queued.
        """
        found = self._queue.ask(key, index, round_)
        self._pump()
        return found

    def credit(self, returned: int, arrived: int = 0) -> None:
        """Apply the peer's credit, and what has arrived there: bytes since the link exists. Each message carries these
        totals, so a lost message loses nothing. On a link within a party bytes count as under way until they are
        returned.
        """
        if not self.wide_area:
            arrived = returned
        if returned > self.returned or arrived > self._delivered:
            self.window.returned(max(0, returned - self.returned))
            self.window.arrived(max(0, arrived - self._delivered))
            self.returned, self._delivered = max(returned, self.returned), max(arrived, self._delivered)
            self._pump()

    def reset(self, lane: Lane) -> None:
        """This lane has a new connection, on which this process may send; what was in flight on the old one is lost."""
        self.health.closed = 0.0
        if lane == "tensors":
            self._fused.clear()
            self.window.restart()
        else:
            self.health.connected()

    def resume(self, lane: Lane, resend: Callable[[], None]) -> bool:
        """Both ends may send on a lane's new connection: `resend` sends again what was lost with the old one, before
        what the queue still holds.

        Returns True if the lane had a connection before.
        """
        again = self.lanes.up(lane)
        self._restarting = True
        try:
            resend()
        finally:
            self._restarting = False
            self._pump()
        return again

    # Shared memory.

    def enable_shared_memory(self, lend: Lend) -> None:
        """The peer has mapped our arena: send large payloads through it from now on."""
        self._lend = lend
        self.window.stay_small()

    def map(self, offer: dict[str, Any]) -> bool:
        """Map the peer's arena if possible. Returns True if it was not mapped before and now is."""
        if self._peer_arena is not None:
            return False
        try:
            self._peer_arena = PeerArena(offer, partial(self._transport.owes_later, self))
        except OSError:
            return False
        return True

    def received_at(self, place: memoryview) -> memoryview:
        """The payload at a place in the peer's arena. Raises BadMessage."""
        if self._peer_arena is None:
            raise BadMessage("a payload in memory that is not shared")
        return self._peer_arena.view(place)

    # Sending.

    def _pump(self) -> None:
        queue, window = self._queue, self.window
        while queue and not self._restarting and window.admits(queue.next_size(), asked=queue.asked):
            self._emit(*queue.pop())

    def _emit(self, header: Header, payload: memoryview | None) -> None:
        if payload is None or header.kind == Kind.CONTROL:
            header.place = Place.NONE if payload is None else Place.FRAME
            self._hand_over("control", [self._encode(header)] if payload is None else [self._encode(header), payload])
            return
        self.window.sent(len(payload))
        place = None
        if self._lend is not None and len(payload) >= SMALL:
            place = self._lend(self, payload, lasting=header.kind == Kind.RESULT)
        if place is not None:
            self.sent += len(payload) - PLACE.size
        header.place = Place.FRAME if place is None else Place.SHARED_MEMORY
        body = _as_received(payload) if place is None else place
        self._fused += (self._encode(header), body)
        if len(body) < SMALL and len(self._fused) < 2 * MAX_FUSED:
            self._transport.fuses(self)
        else:
            self.flush()

    def _encode(self, header: Header) -> bytes:
        header.credit = self._told_consumed = self._consumed
        header.arrived = self._told_arrived = self._arrived
        header.job = self._transport.job
        return encode_header(header)

    def _hand_over(self, lane: Lane, parts: list[Any]) -> None:
        size = sum(map(len, parts))
        self.sent += size
        self._transport.hand_over(self, lane, parts, size)


def _as_received(payload: memoryview) -> memoryview | zmq.Frame:
    """The received frame, if the payload is all of it: libzmq forwards a frame without copying it or calling back."""
    owner = payload.obj
    base = getattr(owner, "base", None)  # the payload of a numpy array
    if isinstance(base, memoryview):
        owner = base.obj
    return owner if isinstance(owner, zmq.Frame) and len(owner) == len(payload) else payload
