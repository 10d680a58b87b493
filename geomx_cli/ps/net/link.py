"""A link to one peer. It decides which messages are sent to the peer, when, and on which connection.

A link belongs to a named process and outlives its connections. It has everything that this process knows of the peer.
When the peer is restarted, the link stays and is renewed.

It has two lanes, each a connection of its own: "tensors", and "control" for everything else. So credit, requests and
answers never queue behind tensors, neither here nor in the system's socket buffers. Small tensors that are sent shortly
after one another are fused into one message (header, payload, header, payload, ...), which saves the fixed cost of
messages.
"""

import time
from collections import Counter
from functools import partial
from typing import Any, Protocol

import zmq

from geomx_cli.ps.net.lanes import LANES, Lane, Lanes, LinkHealth
from geomx_cli.ps.net.loop import Loop
from geomx_cli.ps.net.memory import PLACE, Arena, LinkMemory
from geomx_cli.ps.net.send_queue import SendQueue, Window
from geomx_cli.ps.net.wire import MAX_HELLO, BadMessage, Header, Kind, Place, decode_body, encode_body, encode_header

__all__ = ["AGAIN", "LINK_TOPICS", "MAX_FUSED", "Link", "LinkTransport"]

CREDIT_STEP = 1024 * 1024
SMALL = 32 * 1024
MAX_FUSED = 64
AGAIN = "hello again"
"""The topic of a hello, once it is read, on a connection on which a hello was accepted before."""
LINK_TOPICS = frozenset({
    "again", "alive", "credit", "damaged", "freed", "hello", AGAIN, "mapped", "memory", "ready", "refused", "want",
    "welcome",
})  # fmt: skip
"""Topics of control messages about the link itself, which no handler of requests receives."""
LONGEST_WHY, MOST_REFUSALS = 500, 20
"""Limits on the characters of a refusal, and on the refusals of one peer that are logged."""
TOGETHER = 5.0
"""Seconds in which the loss of both lanes' connections, which are usually cut together, is reported once."""
IN_VAIN, LARGE = 3, 16 * 1024
"""Limits: connections in a row that were made and given up; bytes of tensors that each would have to deliver to count
as a success."""


class LinkTransport(Protocol):
    """What a link requires of its transport.

    job: see Header.
    who: this process's description of itself. "process" is its name, and "incarnation" distinguishes its lives.
    slice_bytes, window_bytes: see Window.
    counters: counts messages that were refused or could not be sent, by reason.
    arena: this process's shared memory; None if the system has none.
    """

    job: int
    who: dict[str, Any]
    loop: Loop
    slice_bytes: int
    window_bytes: int
    counters: Counter[str]

    @property
    def arena(self) -> Arena | None: ...

    def schedule_credit(self, link: "Link") -> None:
        """Schedule returning this link's credit, unless a message carries it before."""

    def fuses(self, link: "Link") -> None:
        """Flush this link soon, at the end of the loop's turn at the latest."""

    def hand_over(self, link: "Link", lane: Lane, parts: list[Any], size: int) -> None:
        """Write to the socket, now or when the emulated link has passed the message."""

    def on_asked(self, link: "Link", header: Header) -> None:
        """The peer requests a tensor that is not in the link's queue: see Transport."""

    def on_reconnect(self, link: "Link", lane: Lane) -> None:
        """Both ends may send on a new connection of this lane. Send again what may be lost with the old connection."""

    def warn(self, message: str) -> None:
        """Write a warning to the event log."""


class Link:
    """A link to one peer. Used by the loop's thread only.

    name: the name of the peer's process.
    wide_area: whether the peer is in another party.
    greeting: the content of this process's hellos; None if the peer dials, as members do.
    endpoint: where this process dials the peer; "" if the peer dials.
    dialled: whether this process dials.
    hello: the content of the peer's first hello; empty if this process dials.
    incarnation: the peer's newest incarnation; None before the first welcome of a peer that this process dials.
    sent, received: bytes on the wire since the link exists.
    returned: bytes of credit that the peer has returned since its start.
    refusals: why the peer, since its start, has refused messages of this process; each reason once, the first ones.
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
        self.lanes = Lanes(transport.job, transport.counters, greeting, transport.who["incarnation"])
        self.incarnation: int | None = None
        self._transport = transport
        self._restarting = False
        self._memory: LinkMemory | None = None  # over a unix socket only
        self._restored = 0.0  # when a restored connection was last logged
        self._begin()

    def _begin(self) -> None:
        """Reset all counts and state of the link's ends."""
        transport = self._transport
        self.window = Window(transport.slice_bytes, transport.window_bytes, wide_area=self.wide_area)
        self._queue = SendQueue()
        self._consumed = self._told_consumed = self.returned = 0
        self._arrived = self._told_arrived = self._delivered = 0
        self._fused: list[Any] = []
        self.refusals: list[str] = []
        self._in_vain = (0, 0)  # credit when a tensor connection was given up; how often in vain

    def send(self, header: Header, payload: memoryview | None = None) -> None:
        """Send `header` and `payload` (bytes that must not change until the receiver has them); returns at once.

        A payload waits for the window, for higher priorities, and for earlier requests of the same priority. So a
        slice's rounds stay in order even if repeated. All other messages are sent immediately. A repeat of a message
        that is still queued is dropped.
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
        """Remove this contribution from the send queue, because the receiver no longer needs it."""
        self._queue.remove(header)

    @property
    def unread(self) -> int:
        """Bytes of results of the peer's pulls that wait for its window."""
        return self._queue.pulled

    def control(self, topic: str, body: dict[str, Any] | bytes | None = None, request: int = 0, acked: int = 0) -> None:
        """Send a CONTROL message, whose body may be encoded already. It does not wait for tensors."""
        payload = memoryview(body if isinstance(body, bytes) else encode_body(body)) if body else None
        self._emit(Header(topic=topic, request=request, acked=acked), payload)

    def consumed(self, size: int) -> None:
        """Return credit for `size` payload bytes from this peer that are no longer held here."""
        # The next message carries the credit. A message of its own is sent after 4 ms, or at once for CREDIT_STEP
        # bytes: a peer whose window is full would idle until then.
        self._consumed += size
        if self._consumed - self._told_consumed >= CREDIT_STEP:
            self.flush_credit()
        else:
            self._transport.schedule_credit(self)

    def arrived(self, size: int) -> None:
        """Tell the peer that `size` payload bytes have arrived. Only on a wide-area link, because its path is limited.
        """
        if self.wide_area:
            self._arrived += size
            self._transport.schedule_credit(self)

    def drop(self, size: int) -> None:
        """`size` bytes from this peer have arrived, and cannot be read."""
        self.arrived(size)
        self.consumed(size)

    def flush_credit(self) -> None:
        """Send the credit that no message has carried yet, and release shared memory blocks that are free again."""
        if self._memory is not None and (blocks := self._memory.freed()):
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
        """Ask the peer to send again a contribution that was not received, or was damaged on the way."""
        self._emit(Header(topic="damaged" if damaged else "again", request=request), None)

    def want(self, key: int, index: int, round_: int) -> bool:
        """The receiver is blocked on this slice. Send it ahead of others without waiting for credit, now or when it is
        queued. Returns True if it was queued.
        """
        found = self._queue.ask(key, index, round_)
        self._pump()
        return found

    def credit(self, returned: int, arrived: int = 0) -> None:
        """Apply the peer's credit, and its count of arrived bytes since the link exists."""
        # Each message carries totals, so a lost or late message loses no credit, and no credit is counted twice. A new
        # connection does not reset them. The window forgets the bytes in flight on the old one (Window.restart),
        # because the credit for that may never arrive. If the credit does arrive, it admits as many bytes more, once.
        # Within a party, bytes count as under way until their credit is returned.
        if not self.wide_area:
            arrived = returned
        if returned > self.returned or arrived > self._delivered:
            self.window.returned(max(0, returned - self.returned))
            self.window.arrived(max(0, arrived - self._delivered))
            self.returned, self._delivered = max(returned, self.returned), max(arrived, self._delivered)
            self._pump()

    # Connections.

    def renew(self, incarnation: int, lane: Lane) -> None:
        """The peer has been restarted, as the handshake on this lane tells.

        It does not know of earlier messages, counts and lent memory. Code that waits for an answer asks again once a
        lane is up, as after any new connection.
        """
        self.incarnation = incarnation
        self.lanes.renew(lane)
        self.health.renew()
        self._begin()
        if self._memory is not None:
            self._memory.release()
            self.share_memory()
        self._restored = time.monotonic()

    def reset(self, lane: Lane) -> None:
        """This lane has a new connection, on which this process may send. Messages in flight on the old one are lost.
        """
        self.health.closed = 0.0
        if lane == "tensors":
            self._fused.clear()
            self.window.restart()
        else:
            self.health.connected()

    def resume(self, lane: Lane) -> None:
        """Both ends may send on a lane's new connection. Messages that were lost with the old one are sent again."""
        if self.lanes.up(lane) and self.dialled:
            self._warn_restored()
        # Repeats have lower numbers than queued messages, and a slice's rounds must stay in order.
        self._restarting = True
        try:
            self._transport.on_reconnect(self, lane)
        finally:
            self._restarting = False
            self._pump()

    def on_disconnected(self, lane: Lane, *, given_up: bool) -> None:
        """A dialled connection has ended. given_up: whether this end gave it up because nothing was acknowledged."""
        # Not only welcomed lanes count: their hello may wait behind tensors that libzmq kept from the last connection.
        stood = lane in self.lanes.connections
        self.lanes.down(lane)
        if given_up and stood and lane == "tensors":
            self._warn_given_up()

    def on_control(self, header: Header, payload: memoryview | None) -> bool:
        """Handle a CONTROL message about the link itself; returns False for any other. Raises BadMessage."""
        match header.topic:
            case "credit":
                pass  # as in every header
            case "want":
                if not self.want(header.key, header.slice, header.round):
                    self._transport.on_asked(self, header)
            case "again" | "damaged":
                self._transport.on_asked(self, header)
            case "alive":
                self.health.receive_heartbeat(payload)
                self.window.crossed(self.health.round_trip)
            case "memory" | "mapped" | "freed":
                self._on_memory(header.topic, decode_body(payload) if payload is not None else {})
            case "hello" | "hello again":
                self._on_hello(header.request, payload, again=header.topic == AGAIN)
            case "welcome":
                self._on_welcome(header.request)
            case "ready":
                lane = self.lanes.lane_of(header.request)
                if not self.dialled and lane is not None:
                    self.resume(lane)
            case "refused":
                self._on_refused(decode_body(payload, MAX_HELLO) if payload is not None else {})
            case _:
                return False
        return True

    def _on_hello(self, number: int, payload: memoryview | None, *, again: bool) -> None:
        """The peer has dialled, for the first time or again."""
        lane = decode_body(payload).get("lane") if payload is not None else None
        if self.dialled or lane not in LANES:
            raise BadMessage("a hello of no lane, or from a peer that does not dial")
        # A second hello on one connection comes after a connection that ended before its hello was sent, so nothing was
        # lost. If this hello reset the lane, a peer that repeats hellos would lose the messages for which it waits.
        if not again:
            self.reset(lane)
        self.lanes.welcome(lane, number)

    def _on_welcome(self, number: int) -> None:
        """The peer knows the connection of a lane that this process dials. Tell the peer so, and report possible
        losses.
        """
        lane = self.lanes.lane_of(number)
        if not self.dialled or lane is None:  # a hello of a connection replaced meanwhile
            return
        self.reset(lane)
        self.lanes.ready(lane, number)
        self.resume(lane)
        if self.lanes.all_up and self._memory is not None:
            self._memory.offer()

    # Warnings.

    def refuse(self, why: str) -> None:
        """Tell the peer why its tensor or query was refused."""
        self.control("refused", {"why": why[:LONGEST_WHY]})

    def _on_refused(self, body: dict[str, Any]) -> None:
        """The peer refused a tensor or a query. Log the reason, because other code waits for the answer."""
        why = str(body.get("why"))[:LONGEST_WHY]
        if len(self.refusals) < MOST_REFUSALS and why not in self.refusals:
            self.refusals.append(why)
            self._transport.warn(f"{self.name} refused a message of this process: {why}")

    def _warn_restored(self) -> None:
        now = time.monotonic()
        if now - self._restored > TOGETHER:
            self._transport.warn(f"the connection to {self.name} was cut, and is back")
        self._restored = now

    def _warn_given_up(self) -> None:
        """Warn after several connections in a row that were made, but on which no tensor arrived."""
        before, count = self._in_vain
        count = 1 if self.returned - before > LARGE else count + 1
        self._in_vain = (self.returned, count)
        if count == IN_VAIN:
            own = self._transport.who["process"]
            what = f"the link {own} - {self.name} passes small messages but drops large ones"
            why = "does something on the way drop large packets (path MTU)?"
            hint = "Try a smaller MTU on this host's interface (ip link set dev INTERFACE mtu 1280)"
            self._transport.warn(f"{what}: {why} {hint}")

    # Shared memory.

    def share_memory(self) -> None:
        """The link is a unix socket, and no emulated wide-area link. Lend large payloads, if the peer can map them.
        """
        submit, schedule_credit = self._transport.loop.submit, partial(self._transport.schedule_credit, self)
        self._memory = LinkMemory(lambda: self._transport.arena, self.control, partial(submit, schedule_credit))

    def stop_sharing(self) -> None:
        """The peer has left or is lost. Memory that was lent to it is free."""
        if self._memory is not None:
            self._memory.release()

    def received_at(self, place: memoryview) -> memoryview:
        """The payload at a place in the peer's arena. Raises BadMessage."""
        if self._memory is None:
            raise BadMessage("a payload in memory that is not shared")
        return self._memory.view(place)

    def _on_memory(self, topic: str, body: dict[str, Any]) -> None:
        if self._memory is None:
            raise BadMessage("an offer of memory from another host")
        if topic == "memory":
            self._memory.on_memory(body)
        elif topic == "freed":
            self._memory.on_freed(body)
        elif self._memory.on_mapped():
            self.window.stay_small()

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
        if self._memory is not None and len(payload) >= SMALL:
            place = self._memory.lend(payload, lasting=header.kind == Kind.RESULT)
        if place is not None:
            self.sent += len(payload) - PLACE.size
        header.place = Place.FRAME if place is None else Place.SHARED_MEMORY
        body = _as_received(payload) if place is None else place
        # Small tensors wait for others. A large tensor is sent with the small ones that wait. So tensors stay in order,
        # and a receiver that waits for the large one is not delayed. A new connection drops waiting tensors (`reset`):
        # for the window, and for the code that repeats messages, they were in flight.
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
    """The received frame, if it is exactly the payload. libzmq forwards a frame without copying it or calling back."""
    owner = payload.obj
    base = getattr(owner, "base", None)  # the payload of a numpy array
    if isinstance(base, memoryview):
        owner = base.obj
    return owner if isinstance(owner, zmq.Frame) and len(owner) == len(payload) else payload
