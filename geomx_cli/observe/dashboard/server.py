"""Serves the page and its data over HTTP to browsers on this machine: loopback only, access by token."""

import hmac
import json
import secrets
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import bottle

from geomx_cli.core.atomic import write_atomic
from geomx_cli.core.errors import CheckFailed
from geomx_cli.observe.loopback_http import ADDRESS, LoopbackServer

__all__ = ["Server", "remembered", "started", "write_private"]

FILE = "dashboard.json"
TOKEN = 24  # bytes, before encoding
STATIC = {
    "page.css": "text/css", "page.js": "text/javascript", "charts.js": "text/javascript", "map.js": "text/javascript",
    "uplot/uPlot.iife.min.js": "text/javascript", "uplot/uPlot.min.css": "text/css",
}  # fmt: skip
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Server(LoopbackServer):
    """Serves from its construction on, in separate threads; `url` is the page's. Must be closed.

    `data` returns the page's content, as an object for JSON. Raises CheckFailed if the port is in use.
    """

    def __init__(self, data: Callable[[], dict[str, Any]], port: int, token: str) -> None:
        self._data = data
        self._token = token
        super().__init__(self._app(), port, "choose another with --port, or leave it out")

    @property
    def url(self) -> str:
        """The page's URL, with the token."""
        return f"http://{ADDRESS}:{self.port}/?token={self._token}"

    def remember(self, folder: Path) -> None:
        """Save port and token for `remembered`; write errors are ignored."""
        write_private(folder / FILE, json.dumps({"port": self.port, "token": self._token}))

    def _app(self) -> Any:
        app = bottle.Bottle(catchall=True)
        app.route("/", callback=self._page)
        app.route("/data", callback=self._answer)
        app.route("/static/<name:path>", callback=_static)
        app.add_hook("before_request", self._check)
        app.add_hook("after_request", lambda: bottle.response.headers.update(HEADERS))
        app.default_error_handler = _error
        return app

    def _check(self) -> None:
        """Reject requests without the token, or with another host name (DNS rebinding)."""
        if bottle.request.get_header("Host") not in (f"{ADDRESS}:{self.port}", f"localhost:{self.port}"):
            raise bottle.HTTPError(403, "open the address that geomx dashboard printed")
        given = bottle.request.query.get("token", "")
        known = hmac.compare_digest(given.encode(errors="replace"), self._token.encode())
        if not known and not bottle.request.path.startswith("/static/"):
            raise bottle.HTTPError(403, "the token is missing or wrong: open the address that geomx dashboard printed")

    def _page(self) -> str:
        bottle.response.content_type = "text/html; charset=utf-8"
        return _read("page.html").decode()

    def _answer(self) -> bytes:
        bottle.response.content_type = "application/json"
        return json.dumps(self._data(), separators=(",", ":"), allow_nan=False).encode()


def remembered(folder: Path) -> tuple[int, str]:
    """Return the port and token of the last dashboard of the job in `folder`, so that an open page finds the next one;
    0 and a new token if there was none.
    """
    try:
        known = json.loads((folder / FILE).read_bytes())
        port, token = int(known["port"]), str(known["token"])
        if 0 < port < 65536 and len(token) >= TOKEN:
            return port, token
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        pass
    return 0, new_token()


def write_private(path: Path, text: str) -> bool:
    """Replace a file with one of mode 0600; return False on failure."""
    try:
        write_atomic(path, text.encode(), 0o600)
    except OSError:
        return False
    return True


def new_token() -> str:
    """Return an unguessable token."""
    return secrets.token_urlsafe(TOKEN)


def started(data: Callable[[], dict[str, Any]], port: int, last_port: int, token: str) -> Server:
    """Start a server at `port`; if that is 0, at the last port. If another process has that now, which may have
    received the token from an open page, use a free port with a new token.
    """
    if not port and last_port:
        try:
            return Server(data, last_port, token)
        except CheckFailed:
            return Server(data, 0, new_token())
    return Server(data, port, token)


def _static(name: str) -> bytes:
    if name not in STATIC:
        raise bottle.HTTPError(404, "there is no such file")
    bottle.response.content_type = f"{STATIC[name]}; charset=utf-8"
    return _read(name)


def _read(name: str) -> bytes:
    return (resources.files("geomx_cli.observe.dashboard") / "static" / name).read_bytes()


def _error(error: bottle.HTTPError) -> str:
    bottle.response.content_type = "text/plain; charset=utf-8"
    return f"{error.status_line}: {error.body}\n"
