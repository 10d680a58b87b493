"""The state server over HTTP, with the protocol of ESync's own workers, so that they can use it in any job.

    POST /init/    num_workers (default 6), epsilon (seconds, default 0.5)              empty; from rank 0 only, first
    POST /apply/   r, k, c, te                                                          {"ready": 0} or {"ready": 1}
    POST /reset/   r, t, te                                                             empty
    GET  /         {"num_workers", "t", "epsilon", "records": [[r, k, c, te, ready, round], ...]}

Fields are form-encoded, c and te in seconds. Errors are answered with one sentence. The protocol has no authentication:
anyone who can reach the port can use it, so it belongs on a private network of the job.
"""

import io
import json
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, TypeVar, cast
from urllib.parse import parse_qsl

from geomx_cli.core.bounded_http import LIMIT, MAX_HEAD, BoundedReader, BoundedThreads, Refusal
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.algorithms._esync_client import MAX_SECONDS, StateServer

__all__ = ["HttpServer", "serve"]

MAX_BODY = 1_024

Number = TypeVar("Number", int, float)
Action = Callable[[float, Mapping[str, str]], bytes]


class HttpServer:
    """A state server's HTTP listener; `port`: the actual port."""

    def __init__(self, listener: "_Listener") -> None:
        self.port: int = listener.server_address[1]
        self._listener = listener
        self._thread = threading.Thread(
            target=listener.serve_forever, kwargs={"poll_interval": 0.1}, name="esync-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Requests already received are answered, by daemon threads."""
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()


def serve(host: str, port: int, clock: Callable[[], float] = time.time) -> HttpServer:
    """Serve a new state server at host:port (0 for any free port) from a separate thread until `close`.

    `clock` gives all times passed to it. Raises InvalidSettings if it cannot listen.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return HttpServer(_Listener(family, address, _Service(clock)))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InvalidSettings(
            f"cannot listen for ESync's workers on {host} port {port}: {reason}",
            "another process holds the port, or this machine lacks the address; choose another",
        ) from None


class _Service:
    """The handlers by path, of which one runs at a time.

    Workers report `te` by their own clocks, whose error may exceed a step's duration. A worker reports the start of a
    round immediately, so that report gives its clock offset, by which the ends of its steps are corrected. Before the
    first such report, the smallest difference seen is used.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.routes: Mapping[str, tuple[str, Action]] = {
            "/": ("GET", self._home),
            "/init/": ("POST", self._init),
            "/apply/": ("POST", self._apply),
            "/reset/": ("POST", self._reset),
        }
        self._state = StateServer()
        self._clock = clock
        self._lock = threading.Lock()
        self._lag: dict[int, float] = {}
        self._reported: dict[int, float] = {}

    def answer(self, action: Action, body: bytes) -> bytes:
        """Carry out a request. Raises InvalidSettings for a body or a field that is none."""
        now = self._clock()
        with self._lock:
            return action(now, _fields(body))

    def _init(self, now: float, fields: Mapping[str, str]) -> bytes:
        epsilon = _read(fields, "epsilon", _seconds, "0.5")
        self._state.init(_read(fields, "num_workers", int, "6"), epsilon)
        self._lag, self._reported = {}, {}
        return b""

    def _apply(self, now: float, fields: Mapping[str, str]) -> bytes:
        rank, ended = _read(fields, "r", int), _read(fields, "te", _seconds)
        lag = min(now - ended, self._lag.get(rank, now - ended))
        steps, seconds = _read(fields, "k", int), _read(fields, "c", _seconds)
        decision = self._state.query(now, rank, steps, seconds, now - ended - lag)
        self._lag[rank], self._reported[rank] = lag, ended
        return json.dumps({"ready": int(decision.ready)}).encode()

    def _reset(self, now: float, fields: Mapping[str, str]) -> bytes:
        rank, began = _read(fields, "r", int), _read(fields, "te", _seconds)
        self._state.entered(now, rank, _read(fields, "t", int))
        self._lag[rank], self._reported[rank] = now - began, began
        return b""

    def _home(self, now: float, fields: Mapping[str, str]) -> bytes:
        known = self._state.home()
        for record in known["records"]:
            record[3] = self._reported.get(record[0], record[3])
        return json.dumps(known).encode()


class _Listener(BoundedThreads, socketserver.TCPServer):
    allow_reuse_address = True

    def __init__(self, family: int, address: Any, service: _Service) -> None:
        self.address_family = family
        self.service = service
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    """One connection, with one request: HTTP/1.0 closes it after the response."""

    server_version = "geomx"
    sys_version = ""
    default_request_version = "HTTP/1.0"

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(BoundedReader(self.connection, MAX_HEAD + MAX_BODY), 1024)

    def handle(self) -> None:
        self.command, self.requestline, self.request_version = "", "", self.default_request_version
        try:
            self.handle_one_request()
        except Refusal as refusal:
            self.send_error(*refusal.args)
        except ConnectionError:
            pass  # the client has disconnected

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        server = cast(_Listener, self.server)
        path = self.path.partition("?")[0]
        if path not in server.service.routes:
            raise Refusal(HTTPStatus.NOT_FOUND, f"there is no such path, but {', '.join(server.service.routes)}")
        method, action = server.service.routes[path]
        if method != self.command:
            raise Refusal(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} is for {method}")
        body = self._body() if method == "POST" else b""
        server.received(self.connection)
        try:
            self._send(HTTPStatus.OK, server.service.answer(action, body), "application/json")
        except InvalidSettings as error:
            raise Refusal(HTTPStatus.BAD_REQUEST, str(error)) from None

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"[0-9]{1,18}", length):
            raise Refusal(HTTPStatus.LENGTH_REQUIRED, "the header Content-Length must say how long the body is")
        if int(length) > MAX_BODY:
            raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body is at most {MAX_BODY} bytes")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ConnectionError
        return body

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Respond with one sentence, and drain the input: closing with unread data would lose the response."""
        content = (message or HTTPStatus(code).phrase).encode(errors="replace")
        try:
            self._send(HTTPStatus(code), content, "text/plain; charset=utf-8")
            self.connection.shutdown(socket.SHUT_WR)
            rest = BoundedReader(self.connection, 64 * MAX_HEAD)
            while rest.read(MAX_HEAD):
                pass
        except (OSError, Refusal):
            pass  # too much input, or the client has disconnected

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.connection.settimeout(LIMIT)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a worker sends many requests per second."""


def _fields(body: bytes) -> dict[str, str]:
    try:
        pairs = parse_qsl(body.decode(), keep_blank_values=True, strict_parsing=bool(body), max_num_fields=16)
    except ValueError:
        raise InvalidSettings("the body is no form", "write it as in r=0&k=1&c=0.25&te=1700000000.5") from None
    if len(dict(pairs)) < len(pairs):
        raise InvalidSettings("a field is given twice", "give each once")
    return dict(pairs)


def _read(fields: Mapping[str, str], name: str, parse: Callable[[str], Number], default: str | None = None) -> Number:
    text = fields.get(name, default)
    if text is None:
        raise InvalidSettings(f"the field {name} is missing", f"given: {', '.join(fields) or 'none'}")
    try:
        return parse(text)
    except ValueError:
        raise InvalidSettings(
            f"{name} is {text!r}", "c, te and epsilon are seconds, the others whole numbers"
        ) from None


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number <= MAX_SECONDS:
        raise ValueError(text)
    return number
