"""HTTP for programs on this machine: a server on its loopback interface."""

import io
import threading
from collections.abc import Callable, Iterable
from typing import Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from geomx_cli.core.bounded_http import LIMIT, BoundedReader, BoundedThreads
from geomx_cli.core.errors import CheckFailed

__all__ = ["ADDRESS", "App", "LoopbackServer"]

ADDRESS = "127.0.0.1"
App = Callable[[dict[str, Any], Any], Iterable[bytes]]


class LoopbackServer:
    """Serves a WSGI application from its construction on, in separate threads. Must be closed.

    port: 0 for a free one. Raises CheckFailed with `hint` if the port is in use.
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
