"""Detects dead TCP connections from the kernel's acknowledgement counters.

The kernel itself gives up a connection only when a retransmission is due, and it doubles the interval each time: that
may be seconds after its limit.
"""

import contextlib
import socket
import struct
import time
from collections.abc import Iterator

__all__ = ["Connection"]

UNACKNOWLEDGED, BYTES_ACKED, BYTES_RECEIVED = 24, 120, 128
"""Where Linux's tcp_info has the number of segments that are not acknowledged (u32), and the bytes that are, and that
have been received (u64).
"""


class Connection:
    """A connected descriptor owned by other code, which may close it at any time. Used by one thread.

    `peer`: the remote address. `ended`: whether `end` was called. `counts`: whether the kernel tells its bytes, as of a
    TCP connection.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
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
        """Bytes received over it; 0 if the kernel does not tell."""
        return self._count(BYTES_RECEIVED)

    def acknowledged(self) -> int:
        """Bytes sent over it that the other end, or a proxy in its place, has acknowledged; 0 as `received`."""
        return self._count(BYTES_ACKED)

    def deaf(self) -> float:
        """Seconds without a received byte, as far as calls have observed; 0 if the kernel does not tell."""
        now, received = time.monotonic(), self.received()
        if received != self._received or not received:
            self._received, self._heard = received, now
        return now - self._heard

    def excuse(self, pause: float) -> None:
        """This process did not run for `pause` seconds: they do not count."""
        self._heard = min(time.monotonic(), self._heard + pause)

    def _count(self, place: int) -> int:
        info = self._info()
        return int(struct.unpack_from("Q", info, place)[0]) if len(info) >= place + 8 else 0

    def _info(self) -> bytes:
        """The kernel's TCP_INFO; empty once the owner has closed the descriptor."""
        with contextlib.suppress(OSError), _borrowed(self._descriptor) as stream:
            if _ends(stream) == self._ends and hasattr(socket, "TCP_INFO"):
                return stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return b""

    def quiet(self) -> float:
        """Seconds without any acknowledgement, as far as calls of `unanswered` have observed."""
        return time.monotonic() - self._moved

    def end(self) -> None:
        """Shut the connection down, for its owner too."""
        self.ended = True
        with contextlib.suppress(OSError), _borrowed(self._descriptor) as stream:
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
    """Both addresses: they reveal a descriptor that was closed and reused for another connection."""
    return stream.getsockname(), stream.getpeername()
