"""Throughput of a connection, measured at the receiver without the first quarter of the time."""

import select
import socket
import time

__all__ = ["receive", "send"]

_CHUNK = 1 << 18
_UNSENT = 1 << 17  # maximum unsent bytes in the send buffer; TCP controls the bytes in flight


def send(stream: socket.socket, limit: float) -> None:
    """Send zeros until the peer closes or responds, for at most `limit` seconds."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
    stream.setblocking(False)
    data = memoryview(bytes(_CHUNK))
    end = time.monotonic() + limit
    while (left := end - time.monotonic()) > 0:
        readable, writable, _ = select.select([stream], [stream], [], left)
        if readable:
            return
        if writable:
            try:
                stream.send(data)
            except BlockingIOError:
                continue
            except OSError:
                return


def receive(stream: socket.socket, seconds: float) -> float:
    """Return the bytes per second received during `seconds` after the first byte; 0 if none arrives within `seconds`.
    """
    buffer = bytearray(_CHUNK)
    stream.settimeout(seconds)
    try:
        if not stream.recv_into(buffer):
            return 0.0
    except OSError:
        return 0.0
    began = start = time.monotonic()
    total = before = 0
    while (now := time.monotonic()) < began + seconds:
        if start == began and now - began >= seconds / 4:
            start, before = now, total
        stream.settimeout(began + seconds - now)
        try:
            count = stream.recv_into(buffer)
        except OSError:
            break
        if not count:
            break
        total += count
    return (total - before) / (time.monotonic() - start)
