"""Whether what is sent over a TCP connection arrives, as the kernel knows.

The kernel itself gives up a connection only when it is about to repeat something, and it waits twice as long before
each repeat: that may be seconds after its limit.
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
    """A connected descriptor that something else owns, and may close at any time. Used by one thread.

    `peer` is the other end's address, `ended` whether `end` was called.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._acked = -1
        self._since = self._moved = time.monotonic()
        self._ends: tuple[object, object] | None = None
        self.ended = False
        with contextlib.suppress(OSError), _borrowed(descriptor) as stream:
            self._ends = _ends(stream)
        self.peer = self._ends and self._ends[1]

    def unanswered(self) -> float:
        """For how many seconds something has waited to be acknowledged, and nothing was; as far as calls have seen."""
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
        """Bytes that have come over it; 0 where the kernel does not tell."""
        info = self._info()
        return int(struct.unpack_from("Q", info, BYTES_RECEIVED)[0]) if len(info) >= BYTES_RECEIVED + 8 else 0

    def _info(self) -> bytes:
        """What the kernel knows of it; empty once its owner has closed it."""
        with contextlib.suppress(OSError), _borrowed(self._descriptor) as stream:
            if _ends(stream) == self._ends and hasattr(socket, "TCP_INFO"):
                return stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return b""

    def quiet(self) -> float:
        """For how many seconds nothing was acknowledged; as far as calls of `unanswered` have seen."""
        return time.monotonic() - self._moved

    def end(self) -> None:
        """Have it end now, for its owner too."""
        self.ended = True
        with contextlib.suppress(OSError), _borrowed(self._descriptor) as stream:
            if _ends(stream) == self._ends:
                stream.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """The descriptor as a socket, which does not close it. Raises OSError if it is none."""
    stream = socket.socket(fileno=descriptor)
    try:
        yield stream
    finally:
        stream.detach()


def _ends(stream: socket.socket) -> tuple[object, object]:
    """Both addresses: by them a descriptor is known that has been closed and is another connection's by now."""
    return stream.getsockname(), stream.getpeername()
