"""Listens on the planned ports and answers diallers that present the token."""

import hmac
import socket
import threading
from collections.abc import Callable

from geomx_cli.probe import bandwidth
from geomx_cli.probe.ports import bound

__all__ = ["GREETING", "WRONG_TOKEN", "Listeners", "read_line"]

GREETING = b"geomx-probe"
WRONG_TOKEN = GREETING + b" wrong-token\n"
_LINE = 256
_PATIENCE = 5.0
_AT_ONCE = 128
_LONGEST = 10.0


class Listeners:
    """Listening sockets, each with a thread. A dialler sends one line:

        geomx-probe TOKEN NONCE WHAT SECONDS

    The response is "geomx-probe NONCE". With WHAT "echo" nothing follows. "sink" then receives bytes for SECONDS and
    responds "geomx-probe RATE" (bytes per second); "source" sends bytes for SECONDS. The response to a wrong token is
    "geomx-probe wrong-token"; other input gets none. A UDP socket answers each datagram "geomx-probe TOKEN NONCE" with
    the right token by "geomx-probe NONCE", and others not at all.
    """

    def __init__(self) -> None:
        self._open: list[tuple[socket.socket, threading.Thread]] = []
        self._slots = threading.BoundedSemaphore(_AT_ONCE)

    def open(self, address: str, port: int, token: str) -> None:
        """Listen for diallers with `token`. Raises OSError if the address cannot be bound."""
        made = bound(address, port)
        try:
            made.listen(_AT_ONCE)
        except OSError:
            made.close()
            raise
        self._start(self._accept, made, token)

    def open_udp(self, address: str, port: int, token: str) -> None:
        """Answer datagrams with `token`. Raises OSError if the address cannot be bound."""
        self._start(_echo, bound(address, port, socket.SOCK_DGRAM), token)

    def close(self) -> int:
        """Close all sockets, and return their number; their ports are free on return."""
        count = 0
        while self._open:
            made, thread = self._open.pop()
            try:
                made.shutdown(socket.SHUT_RDWR)  # wakes its thread, unlike close alone
            except OSError:
                pass
            thread.join(_PATIENCE)  # the kernel keeps the port until the thread has left accept or recvfrom
            made.close()
            count += 1
        return count

    def _start(self, serve: Callable[[socket.socket, bytes], None], made: socket.socket, token: str) -> None:
        thread = threading.Thread(target=serve, args=(made, token.encode()), daemon=True)
        self._open.append((made, thread))
        thread.start()

    def _accept(self, listener: socket.socket, token: bytes) -> None:
        while True:
            try:
                stream, _ = listener.accept()
            except OSError:
                return
            if not self._slots.acquire(blocking=False):
                stream.close()
                continue
            threading.Thread(target=self._serve, args=(stream, token), daemon=True).start()

    def _serve(self, stream: socket.socket, token: bytes) -> None:
        try:
            with stream:
                stream.settimeout(_PATIENCE)
                greeting, given, nonce, what, seconds = read_line(stream).split()
                if greeting != GREETING:
                    return
                if not hmac.compare_digest(given, token):
                    stream.sendall(WRONG_TOKEN)
                    return
                stream.sendall(GREETING + b" " + nonce + b"\n")
                _carry_out(stream, what, min(float(seconds), _LONGEST))
                stream.settimeout(_PATIENCE)
                stream.recv(1)  # the dialler closes first, so that TIME_WAIT is not on our port
        except (OSError, ValueError):
            return
        finally:
            self._slots.release()


def _echo(datagrams: socket.socket, token: bytes) -> None:
    while True:
        try:
            words, sender = datagrams.recvfrom(_LINE)
            if sender is None:  # shut down
                return
            greeting, given, nonce = words.split()
            if greeting == GREETING and hmac.compare_digest(given, token):
                datagrams.sendto(GREETING + b" " + nonce, sender)
        except ValueError:
            continue
        except OSError:
            return


def read_line(stream: socket.socket) -> bytes:
    """Read one line of at most 256 bytes, without the newline. Raises ValueError if it is longer or incomplete, and
    OSError.
    """
    line = b""
    while len(line) < _LINE and (byte := stream.recv(1)):  # byte by byte, as later bytes belong to the caller
        if byte == b"\n":
            return line
        line += byte
    raise ValueError("no whole line")


def _carry_out(stream: socket.socket, what: bytes, seconds: float) -> None:
    if what == b"sink":
        rate = bandwidth.receive(stream, seconds)
        stream.settimeout(_PATIENCE)
        stream.sendall(GREETING + b" %d\n" % rate)
    elif what == b"source":
        bandwidth.send(stream, 2 * seconds)
