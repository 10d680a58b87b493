"""Links: who is at the other end, what waits for it, and how much is under way.

Those who listen have one ROUTER socket, those who dial one DEALER socket for each link. High-water marks are off and
nothing ever blocks in a send: each link queues by priority (first in, first out among equals) and hands the socket
only what its window admits. Control messages never wait behind tensors.
"""

import ctypes
import heapq
import itertools
import secrets
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.utils.monitor

from geomx_cli.errors import GeomxError, InvalidSettings
from geomx_cli.events import EventLog
from geomx_cli.ps.loop import Loop
from geomx_cli.ps.security import Doorkeeper, KeyRing
from geomx_cli.ps.shaping import Shaper
from geomx_cli.ps.window import Window
from geomx_cli.ps.wire import (
    MAX_MESSAGE,
    BadMessage,
    Header,
    Kind,
    Place,
    decode_body,
    decode_header,
    encode_body,
    encode_header,
)

__all__ = ["Link", "Transport"]

Socket = zmq.Socket[bytes]
Handler = Callable[["Link", Header, memoryview | None], None]

BATCH = 64
CREDIT_STEP = 512 * 1024
MAX_LINKS = 4096
LOCAL_BUFFER = 2 * 2**20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


class Link:
    """One peer. `wide_area` says that it stands in another party; `sent` and `received` count bytes on the wire."""

    def __init__(self, transport: "Transport", socket: Socket, identity: bytes, name: str, wide_area: bool) -> None:
        self.name = name
        self.wide_area = wide_area
        self.sent = self.received = 0
        self.hello: dict[str, Any] = {}
        self._transport = transport
        self._socket = socket
        self._identity = identity
        self.window = Window(transport.slice_bytes, transport.window_bytes)
        self._queue: list[tuple[int, int, Header, memoryview]] = []
        self._wanted: set[tuple[int, int, int]] = set()
        self._owed = 0

    def send(self, header: Header, payload: memoryview | None = None) -> None:
        """Send `header` and `payload` (bytes that must not change until the receiver has them); returns at once.

        A payload waits for the window, and for what has a higher priority. Anything else leaves now.
        """
        if payload is None:
            self._emit(header, None)
            return
        header.place = Place.FRAME
        if (header.key, header.slice, header.round) in self._wanted:
            self._wanted.discard((header.key, header.slice, header.round))
            self._emit(header, payload)
            return
        heapq.heappush(self._queue, (-header.priority, self._transport.next_order(), header, payload))
        self._pump()

    def control(self, topic: str, body: dict[str, Any] | None = None, request: int = 0) -> None:
        """Send a CONTROL message; it overtakes every tensor."""
        payload = memoryview(encode_body(body)) if body else None
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
        self._wanted.add(wanted)

    def credit(self, size: int) -> None:
        """The peer has returned `size` bytes."""
        self.window.returned(size)
        self._pump()

    def _pump(self) -> None:
        queue, window = self._queue, self.window
        while queue and window.admits(len(queue[0][3])):
            _, _, header, payload = heapq.heappop(queue)
            self._emit(header, payload)

    def _emit(self, header: Header, payload: memoryview | None) -> None:
        if header.kind != Kind.CONTROL and payload is not None:
            self.window.sent(len(payload))
        header.credit, self._owed = self._owed, 0
        self._transport.fill(header)
        head = encode_header(header)
        size = len(head) + (len(payload) if payload is not None else 0)
        self.sent += size
        parts: list[Any] = [self._identity, head] if self._identity else [head]
        if payload is not None:
            parts.append(payload)
        self._transport.hand_over(self, parts, size)

    def write(self, parts: list[Any]) -> None:
        """Give the parts to the socket. A peer that is gone is only counted: its silence is somebody else's to notice."""
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._transport.counters["unreachable"] += 1


class Transport:
    """The sockets of one process. `on_message` gets every message that is well formed, of this job, and not transport's own.

    `counters` counts what was refused, by reason; the first of each reason and peer is written to the event log.
    """

    def __init__(
        self,
        loop: Loop,
        *,
        job: int,
        who: dict[str, Any],
        keys: KeyRing | None,
        on_message: Handler,
        events: EventLog,
        slice_bytes: int,
        window_bytes: int = 0,
        shaper: Shaper | None = None,
    ) -> None:
        self.loop = loop
        self.job = job
        self.who = who
        self.incarnation = secrets.randbits(32)
        self.slice_bytes = slice_bytes
        self.window_bytes = window_bytes
        self.counters: Counter[str] = Counter()
        self.links: list[Link] = []
        self._keys = keys
        self._on_message = on_message
        self._events = events
        self._shaper = shaper or None
        self._order = itertools.count()
        self._owing: set[Link] = set()
        self._context: zmq.Context[Socket] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65_000)
        _keep_freed_memory()
        self._sockets: list[Socket] = []
        self._accepted: dict[bytes, Link] = {}
        self._doorkeeper: Doorkeeper | None = None
        loop.each_turn(self._flush_credit)

    def listen(self, endpoints: tuple[str, ...]) -> tuple[str, ...]:
        """Bind one ROUTER to all `endpoints` ("tcp://host:port", port 0 for any, or "ipc://path"); returns them as bound.

        Raises InvalidSettings naming the endpoint if one cannot be bound.
        """
        router = self._socket(zmq.ROUTER)
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.set(zmq.ROUTER_HANDOVER, 1)
        self._watch_handshakes(router)
        bound = []
        for endpoint in endpoints:
            self._secure_listener(router, endpoint)
            self._widen(router, endpoint)
            try:
                router.bind(endpoint)
            except zmq.ZMQError as error:
                raise InvalidSettings(
                    f"cannot listen on {endpoint}: {error.strerror.lower()}",
                    "another process holds the port, or this machine lacks the address; choose another",
                ) from None
            bound.append(bytes(router.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode())
        self.loop.watch(router, lambda: self._read_router(router))
        return tuple(bound)

    def dial(self, endpoint: str, name: str, *, wide_area: bool, **hello: Any) -> Link:
        """A link to whoever listens at `endpoint`. It says hello first; the peer may come up later."""
        dealer = self._socket(zmq.DEALER)
        dealer.set(zmq.ROUTING_ID, secrets.token_bytes(12).replace(b"\0", b"\1"))
        if self._keys is not None and endpoint.startswith("tcp:"):
            dealer.set(zmq.CURVE_SERVERKEY, self._keys.server_public.encode())
            dealer.set(zmq.CURVE_PUBLICKEY, self._keys.public.encode())
            dealer.set(zmq.CURVE_SECRETKEY, self._keys.private.encode())
        self._widen(dealer, endpoint)
        dealer.connect(endpoint)
        link = Link(self, dealer, b"", name, wide_area)
        self.links.append(link)
        self.loop.watch(dealer, lambda: self._read_dealer(dealer, link))
        link.control("hello", {**self.who, **hello})
        return link

    def close(self, linger: float = 1.0) -> None:
        """Close all sockets; what was handed to them may leave within `linger` seconds."""
        for socket in self._sockets:
            self.loop.unwatch(socket)
            socket.close(int(linger * 1e3))
        if self._doorkeeper is not None:
            self.loop.unwatch(self._doorkeeper.socket)
            self._doorkeeper.socket.close(0)
        self._context.term()

    def traffic(self) -> dict[str, list[int]]:
        """Bytes of messages sent and received so far: {"lan": [sent, received], "wan": [sent, received]}."""
        total = {"lan": [0, 0], "wan": [0, 0]}
        for link in self.links:
            pair = total["wan" if link.wide_area else "lan"]
            pair[0] += link.sent
            pair[1] += link.received
        return total

    def refuse(self, link: Link | None, reason: str, text: str) -> None:
        """Count a message that is dropped; write the first of each reason and peer to the event log."""
        peer = link.name if link else "a stranger"
        self.counters[reason] += 1
        self.counters[f"{reason} from {peer}"] += 1
        if self.counters[f"{reason} from {peer}"] == 1 and len(self.counters) < 2 * MAX_LINKS:
            self._events.write("warning", message=f"refused a message from {peer}: {text}", reason=reason)

    # What follows is for Link only.

    def next_order(self) -> int:
        """Serial number of a queued message."""
        return next(self._order)

    def fill(self, header: Header) -> None:
        """Write into `header` what is the same in all messages of this process."""
        header.job = self.job
        header.sender = self.who["process"]
        header.incarnation = self.incarnation

    def owes(self, link: Link) -> None:
        """Remember to return this link's credit before the loop sleeps."""
        self._owing.add(link)

    def hand_over(self, link: Link, parts: list[Any], size: int) -> None:
        """Write to the socket, now or when the emulated link lets it through."""
        if self._shaper is None or not link.wide_area:
            link.write(parts)
        else:
            self.loop.call_at(self._shaper.leaves(size), lambda: link.write(parts))

    # Reading.

    def _read_router(self, router: Socket) -> None:
        for _ in range(BATCH):
            try:
                identity, *frames = router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._receive(self._accepted.get(identity.bytes), frames, router, identity.bytes)

    def _read_dealer(self, dealer: Socket, link: Link) -> None:
        for _ in range(BATCH):
            try:
                frames = dealer.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._receive(link, frames, dealer, b"")

    def _receive(self, link: Link | None, frames: list[zmq.Frame], socket: Socket, identity: bytes) -> None:
        size = sum(len(frame) for frame in frames)
        try:
            if not 1 <= len(frames) <= 2:
                raise BadMessage(f"{len(frames)} parts")
            header = decode_header(frames[0].buffer, self.job)
            payload = frames[1].buffer if len(frames) == 2 else None
            if link is None:
                link = self._accept(header, payload, socket, identity)
        except BadMessage as error:
            self.refuse(link, "malformed", str(error))
            return
        link.received += size
        if self._shaper is not None and link.wide_area:
            self.loop.call_at(self._shaper.arrives(size), lambda: self._deliver(link, header, payload))
        else:
            self._deliver(link, header, payload)

    def _deliver(self, link: Link, header: Header, payload: memoryview | None) -> None:
        if header.credit:
            link.credit(header.credit)
        if header.kind == Kind.CONTROL and header.topic in ("credit", "hello"):
            return
        if header.kind == Kind.CONTROL and header.topic == "want":
            link.want(header.key, header.slice, header.round)
            return
        try:
            self._on_message(link, header, payload)
        except (BadMessage, msgspec.ValidationError) as error:
            self.refuse(link, "malformed", str(error))
            if header.kind != Kind.CONTROL and payload is not None:
                link.consumed(len(payload))

    def _accept(self, header: Header, payload: memoryview | None, router: Socket, identity: bytes) -> Link:
        if header.kind != Kind.CONTROL or header.topic != "hello" or payload is None:
            raise BadMessage("a message before the hello")
        hello = decode_body(payload)
        try:
            name, party = str(hello["process"])[:128], str(hello["party"])[:128]
        except KeyError as error:
            raise BadMessage(f"a hello without {error}") from None
        if len(self._accepted) >= MAX_LINKS:
            raise BadMessage("too many links")
        link = Link(self, router, identity, name, party != self.who["party"])
        link.hello = hello
        self._accepted[identity] = link
        self.links.append(link)
        return link

    def _flush_credit(self) -> None:
        while self._owing:
            self._owing.pop().flush_credit()

    # Sockets.

    def _socket(self, kind: int) -> Socket:
        socket = self._context.socket(kind)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.LINGER, 1000)
        socket.set(zmq.IPV6, 1)
        socket.set(zmq.TCP_KEEPALIVE, 1)
        socket.set(zmq.RECONNECT_IVL, 50)
        socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE)
        self._sockets.append(socket)
        return socket

    def _widen(self, socket: Socket, endpoint: str) -> None:
        """A unix socket's buffer is small, and a slice would take many turns; TCP sizes its own."""
        size = LOCAL_BUFFER if endpoint.startswith("ipc:") else -1
        socket.set(zmq.SNDBUF, size)
        socket.set(zmq.RCVBUF, size)

    def _secure_listener(self, router: Socket, endpoint: str) -> None:
        tcp = endpoint.startswith("tcp:")
        router.set(zmq.CURVE_SERVER, int(tcp and self._keys is not None))
        if not tcp or self._keys is None:
            return
        if not self._keys.server_secret:
            raise GeomxError(f"the key file has no server key, yet this process listens on {endpoint}")
        router.set(zmq.CURVE_SECRETKEY, self._keys.server_secret.encode())
        if self._doorkeeper is None:
            self._doorkeeper = Doorkeeper(self._context, self._keys)
            self.loop.watch(self._doorkeeper.socket, self._open_the_door)

    def _open_the_door(self) -> None:
        assert self._doorkeeper is not None
        before = self._doorkeeper.refused
        self._doorkeeper.answer()
        if self._doorkeeper.refused > before:
            self.refuse(None, "key", "its key is not of this job")

    def _watch_handshakes(self, router: Socket) -> None:
        failures = (
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        monitor = router.get_monitor_socket(failures)
        self._sockets.append(monitor)

        def report() -> None:
            zmq.utils.monitor.recv_monitor_message(monitor)
            self.refuse(None, "handshake", "it does not speak this protocol, or has no key of this job")

        self.loop.watch(monitor, report)


def _keep_freed_memory() -> None:
    """Let malloc reuse slices instead of mapping and unmapping (and faulting in) each anew."""
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_MMAP_THRESHOLD, 32 * 2**20)
    mallopt(M_TRIM_THRESHOLD, 512 * 2**20)
