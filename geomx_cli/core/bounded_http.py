"""HTTP listeners that strangers may reach. They bound their connections, and the time and bytes of a request."""

import io
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from geomx_cli.core.errors import CheckFailed

__all__ = ["ADDRESS", "App", "BoundedReader", "BoundedThreads", "LIMIT", "LoopbackServer", "MAX_HEAD", "Refusal"]

MAX_HEAD = 16_384
LIMIT = 5.0
"""Time limit in seconds for receiving a request, and again for sending the response."""


class Refusal(Exception):
    """A rejected request; its arguments are an HTTP status and a sentence."""


class BoundedThreads(socketserver.ThreadingMixIn):
    """For a TCPServer: one thread per connection, at most `most` at a time.

    If `most` connections are open, a new connection replaces the one that has been sending its request for longest. So
    slow senders cannot block others. `received` must be called when a request is complete.
    """

    daemon_threads = True
    request_queue_size = 128
    most = 128

    def __init__(self, *args: Any, **named: Any) -> None:
        self._free = threading.BoundedSemaphore(self.most)
        self._lock = threading.Lock()
        self._receiving: dict[Any, None] = {}
        super().__init__(*args, **named)

    def received(self, request: Any) -> None:
        """The request on this connection is complete. So the connection is kept, even if new ones arrive."""
        with self._lock:
            self._receiving.pop(request, None)

    def process_request(self, request: Any, client_address: Any) -> None:
        """See BaseServer.process_request."""
        if not self._free.acquire(blocking=False):
            self._close_oldest()
            self._free.acquire()
        with self._lock:
            self._receiving[request] = None
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._release(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """See ThreadingMixIn.process_request_thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._release(request)

    def _release(self, request: Any) -> None:
        self.received(request)
        self._free.release()

    def _close_oldest(self) -> None:
        with self._lock, suppress(OSError):
            if (oldest := next(iter(self._receiving), None)) is not None:
                del self._receiving[oldest]
                oldest.shutdown(socket.SHUT_RDWR)  # this ends its thread


class BoundedReader(io.RawIOBase):
    """Reads from a socket with a deadline of LIMIT seconds and at most `most` bytes. Raises Refusal beyond."""

    def __init__(self, connection: socket.socket, most: int = MAX_HEAD) -> None:
        self._connection = connection
        self._end = time.monotonic() + LIMIT
        self._left = most

    def readable(self) -> bool:
        """See RawIOBase.readable."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See RawIOBase.readinto."""
        remaining = self._end - time.monotonic()
        try:
            if remaining <= 0:
                raise TimeoutError
            self._connection.settimeout(remaining)
            count = self._connection.recv_into(buffer)
        except TimeoutError:
            raise Refusal(HTTPStatus.REQUEST_TIMEOUT, f"the request did not end within {LIMIT:g} s") from None
        self._left -= count
        if self._left < 0:
            raise Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"a head is at most {MAX_HEAD} bytes")
        return count


# HTTP for programs on this machine: a server on its loopback interface.

ADDRESS = "127.0.0.1"
App = Callable[[dict[str, Any], Any], Iterable[bytes]]


class LoopbackServer:
    """Serves a WSGI application from its construction on, in separate threads. Must be closed.

    port: 0 for a free port. Raises CheckFailed with `hint` if the port is in use.
    """

    def __init__(self, app: App, port: int, hint: str) -> None:
        try:
            self._http = make_server(ADDRESS, port, app, _Server, _Quiet)
        except OSError as error:
            raise CheckFailed(f"cannot listen on {ADDRESS}:{port}: {error.strerror}", hint) from None
        self.port: int = self._http.server_port
        threading.Thread(target=self._http.serve_forever, name="http", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._http.shutdown()
        self._http.server_close()


class _Server(BoundedThreads, WSGIServer):
    most = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of clients that disconnect during a response, or send no request in time."""


class _Quiet(WSGIRequestHandler):
    def setup(self) -> None:
        """See StreamRequestHandler.setup."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(BoundedReader(self.connection), 1024)

    def parse_request(self) -> bool:
        """See BaseHTTPRequestHandler.parse_request."""
        complete = super().parse_request()
        cast(_Server, self.server).received(self.connection)
        self.connection.settimeout(LIMIT)
        return complete

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: requests may contain a token."""
