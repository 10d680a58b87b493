"""The connections under the sockets: dead connections, connections without identification, and the kernel's counters.

The kernel itself gives up a connection only when a retransmission is due. It doubles the interval each time, so that
may be seconds after its limit. So this module detects dead connections by TCP's acknowledgement counters.
"""

import contextlib
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from geomx_cli.contract.security import KeyRing
from geomx_cli.ps.net.loop import Loop

if TYPE_CHECKING:
    import zmq

__all__ = ["MAX_SECONDS", "Connection", "UnknownPeers", "ZapAuthenticator"]

UNACKNOWLEDGED, BYTES_ACKED, BYTES_RECEIVED = 24, 120, 128
"""Offsets in Linux's tcp_info: of the number of unacknowledged segments (u32), and of the bytes that were acknowledged
and received (u64).
"""


class Connection:
    """A connected descriptor owned by other code, which may close it at any time. Used by one thread.

    descriptor: its number.
    peer: the remote address; None if it is closed already.
    ended: whether `shut_down` was called.
    counts: whether the kernel reports its bytes, as for a TCP connection.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._acked = -1
        self._since = self._moved = self._heard = time.monotonic()
        self._received = -1
        self._ends: tuple[object, object] | None = None
        self.ended = False
        with contextlib.suppress(OSError), _borrowed(descriptor) as stream:
            self._ends = _ends(stream)
        self.peer = self._ends and self._ends[1]
        self.counts = bool(self._info())

    def unanswered(self) -> float:
        """Seconds for which data has been pending without any acknowledgement, as far as calls have observed."""
        now, info = time.monotonic(), self._info()
        if len(info) < BYTES_ACKED + 8:
            return 0.0
        (waiting,), (acked,) = struct.unpack_from("I", info, UNACKNOWLEDGED), struct.unpack_from("Q", info, BYTES_ACKED)
        if acked != self._acked:
            self._acked, self._moved = acked, now
        if self._moved == now or not waiting:
            self._since = now
        return now - self._since

    def received(self) -> int:
        """Bytes received over it; 0 if the kernel does not report them."""
        return self._count(BYTES_RECEIVED)

    def acknowledged(self) -> int:
        """Bytes sent over it that the other end, or a proxy in its place, has acknowledged. 0 if the kernel does not
        report them.
        """
        return self._count(BYTES_ACKED)

    def deaf(self) -> float:
        """Seconds without a received byte, as far as calls have observed; 0 if the kernel does not report bytes."""
        now, received = time.monotonic(), self.received()
        if received != self._received or not received:
            self._received, self._heard = received, now
        return now - self._heard

    def excuse(self, pause: float) -> None:
        """This process did not run for `pause` seconds. They do not count."""
        self._heard = min(time.monotonic(), self._heard + pause)

    def _count(self, place: int) -> int:
        info = self._info()
        return int(struct.unpack_from("Q", info, place)[0]) if len(info) >= place + 8 else 0

    def _info(self) -> bytes:
        """The kernel's TCP_INFO; empty once the owner has closed the descriptor."""
        with contextlib.suppress(OSError), _borrowed(self.descriptor) as stream:
            if _ends(stream) == self._ends and hasattr(socket, "TCP_INFO"):
                return stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return b""

    def quiet(self) -> float:
        """Seconds without any acknowledgement, as far as calls of `unanswered` have observed."""
        return time.monotonic() - self._moved

    def shut_down(self) -> None:
        """Shut the connection down, for its owner too."""
        self.ended = True
        with contextlib.suppress(OSError), _borrowed(self.descriptor) as stream:
            if _ends(stream) == self._ends:
                stream.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """The descriptor as a socket object that does not close it. Raises OSError if it is not a socket."""
    stream = socket.socket(fileno=descriptor)
    try:
        yield stream
    finally:
        stream.detach()


def _ends(stream: socket.socket) -> tuple[object, object]:
    """Both addresses. They reveal a descriptor that was closed and reused for another connection."""
    return stream.getsockname(), stream.getpeername()


# Limits the cost of connections whose peer is not yet identified. libzmq reads all that a connection sends, up to the
# largest message size, before the key is checked. So this class watches unidentified connections, and closes those that
# send too much or take too long.

LOOK_AT_UNKNOWN = 0.02
"""Seconds between checks of how much they have sent."""
MAX_SECONDS = 30.0
"""Seconds for key and hello: about five round trips, each of several seconds if a slow link's queues are full."""
MAX_BYTES = 64 * 1024
MAX_CONNECTIONS = 1024  # a large job dials within seconds


class _Unknown(NamedTuple):
    connection: Connection
    since: float  # time.monotonic seconds


class UnknownPeers:
    """The unidentified connections of one listening socket, by file descriptor. Used by the loop's thread only.

    on_refused: receives a text for each connection that this class closes.
    """

    def __init__(self, loop: Loop, on_refused: Callable[[str], None]) -> None:
        self._loop = loop
        self._on_refused = on_refused
        self._unknown: dict[int, _Unknown] = {}
        # Connections without a hello so far, whether they stand or have ended. The system gives a descriptor to several
        # connections in turn, and their hellos may be read after the last of them was accepted.
        self._without_hello = Counter[int]()

    def accepted(self, descriptor: int) -> None:
        """Register an accepted connection. If there are too many unidentified ones, close it at once."""
        self._without_hello[descriptor] += 1
        unknown = _Unknown(Connection(descriptor), time.monotonic())
        if len(self._unknown) >= MAX_CONNECTIONS:
            self._close(unknown, f"more than {MAX_CONNECTIONS} connections had not authenticated")
            return
        if not self._unknown:
            self._loop.call_later(LOOK_AT_UNKNOWN, self._poll)
        self._unknown[descriptor] = unknown

    def awaits_hello(self, descriptor: int) -> bool:
        """Whether fewer hellos than connections have come with this descriptor."""
        return self._without_hello[descriptor] > 0

    def identified(self, descriptor: int) -> None:
        """A connection with this descriptor has sent an accepted hello."""
        self.forget(descriptor)
        if self._without_hello[descriptor] > 0:
            self._without_hello[descriptor] -= 1

    def forget(self, descriptor: int) -> None:
        """The connection has been identified, or has ended."""
        self._unknown.pop(descriptor, None)

    def _poll(self) -> None:
        """Close the connections that have exceeded the byte or time limit."""
        now = time.monotonic()
        for descriptor, unknown in list(self._unknown.items()):
            if now - unknown.since > MAX_SECONDS:
                text = f"a connection had not authenticated within {MAX_SECONDS:g} s"
            elif unknown.connection.received() > MAX_BYTES:
                text = f"a connection had sent more than {MAX_BYTES} bytes before authentication"
            else:
                continue
            del self._unknown[descriptor]
            self._close(unknown, text)
        if self._unknown:
            self._loop.call_later(LOOK_AT_UNKNOWN, self._poll)

    def _close(self, unknown: _Unknown, text: str) -> None:
        unknown.connection.shut_down()
        self._on_refused(text)


class ZapAuthenticator:
    """Answers libzmq's authentication requests (ZAP, RFC 27) in the loop's own thread, and counts refusals.

    Messages on accepted connections carry, as "User-Id", the name of the process for which the key was made.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: KeyRing) -> None:
        import zmq.utils.z85

        self._allowed = {zmq.utils.z85.decode(key): known.process.encode() for key, known in keys.allowed.items()}
        self.socket = context.socket(zmq.REP)
        self.socket.bind("inproc://zeromq.zap.01")
        self.refused = 0

    def answer(self) -> None:
        """Handle one request; called by the loop when the socket is readable."""
        version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
        welcome = mechanism == b"CURVE" and bool(credentials) and credentials[0] in self._allowed
        self.refused += not welcome
        status = (b"200", b"OK") if welcome else (b"400", b"this key may not come in here")
        name = self._allowed[credentials[0]] if welcome else b""
        self.socket.send_multipart([version, request, *status, name, b""])
