"""Serves the page and its data over HTTP to browsers on this machine: loopback only, access by token."""

import contextlib
import functools
import hmac
import json
import secrets
import signal
import webbrowser
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import bottle

from geomx_cli.core.bounded_http import ADDRESS, LoopbackServer
from geomx_cli.core.errors import CheckFailed, GeomxError
from geomx_cli.core.events import Event
from geomx_cli.core.files import write_atomic
from geomx_cli.jobs.store.job_state import DASHBOARD, REDIRECT_PAGE, UNDECIDED, JobState
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.observe.dashboard.comparison import Comparison
from geomx_cli.observe.dashboard.job_model import EventReader, JobModel, LogSearch
from geomx_cli.observe.dashboard.job_rows import job_facts

__all__ = ["Answers", "Server", "page_rows", "page_state", "remembered", "show", "started", "write_private"]

# The data for the page: the model's snapshot, and this machine's knowledge of the job.

VERSION = 2


def page_state(job: KnownJob, model: JobModel, events: EventReader) -> dict[str, Any]:
    """Return one object for JSON."""
    state = JobState.read(job.directory)
    shown, over = _shown(state, events)
    cause, failed_first = _cause(state)
    known = model.snapshot(over=over, failed_first=failed_first)
    if over and shown in UNDECIDED:
        shown = model.end() if events.complete else f"{shown}, and not all hosts could be read"
    fields = {"job": job.id, "what": job.what, "state": shown, "over": over, "cause": cause}
    return {"schema_version": VERSION, **fields, **known}


def page_rows(job: KnownJob, model: JobModel, events: EventReader, party: str, first: int) -> dict[str, Any]:
    """Return one object for JSON: processes of a party, see JobModel.rows."""
    state = JobState.read(job.directory)
    return model.rows(party, first, over=_shown(state, events)[1], failed_first=_cause(state)[1])


def _shown(state: JobState | None, events: EventReader) -> tuple[str, bool]:
    """Return the job's state, and whether it is over."""
    shown = state.shown if state is not None else "orphaned"
    return shown, events.over or shown not in UNDECIDED


def _cause(state: JobState | None) -> tuple[str, str]:
    """Return the cause of the job's failure as a sentence, and the process that failed first; "" if there is none."""
    result: Mapping[str, Any] = (state.result if state is not None else None) or {}
    failure, error = result.get("failure") or {}, result.get("error") or {}
    return str(error.get("message") or ""), str(failure.get("process") or "")


Answers = Mapping[str, Callable[[Mapping[str, str]], dict[str, Any]]]

TOKEN = 24  # bytes, before encoding
STATIC = {"js": "text/javascript", "css": "text/css"}
LONGEST, MOST_PARAMETERS = 200, 8  # characters of a parameter; parameters
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Server(LoopbackServer):
    """Serves from its construction on, in separate threads. `url` is the page's URL. Must be closed.

    answers: maps paths to functions that compute an object for JSON from the query's parameters (at most 200 characters
        each). geomx's errors are answered with status 400 and their message.
    Raises CheckFailed if the port is in use.
    """

    def __init__(self, answers: Answers, port: int, token: str) -> None:
        self._answers = answers
        self._token = token
        super().__init__(self._app(), port, "choose another with --port, or leave it out")

    @property
    def url(self) -> str:
        """The page's URL, with the token."""
        return f"http://{ADDRESS}:{self.port}/?token={self._token}"

    def remember(self, folder: Path) -> None:
        """Save port and token for `remembered`; write errors are ignored."""
        write_private(folder / DASHBOARD, json.dumps({"port": self.port, "token": self._token}))

    def _app(self) -> Any:
        app = bottle.Bottle(catchall=True)
        app.route("/", callback=self._page)
        for path in self._answers:
            app.route(path, callback=self._answer)
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
        try:
            given = parse_qsl(bottle.request.query_string, errors="replace", max_num_fields=MOST_PARAMETERS)
        except ValueError as error:
            raise bottle.HTTPError(400, str(error)) from None
        try:
            found = self._answers[bottle.request.path]({name: value[:LONGEST] for name, value in given})
        except GeomxError as error:
            raise bottle.HTTPError(400, "; ".join(filter(None, (error.message, error.hint)))) from None
        bottle.response.content_type = "application/json"
        return json.dumps(found, separators=(",", ":"), allow_nan=False).encode()


def remembered(folder: Path) -> tuple[int, str]:
    """Return the port and token of the last dashboard of the job in `folder`, so that an open page finds the next
    dashboard. If there was none, return 0 and a new token.
    """
    try:
        known = json.loads((folder / DASHBOARD).read_bytes())
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


def started(answers: Answers, port: int, last_port: int, token: str) -> Server:
    """Start a server at `port`, or, if that is 0, at the last port. If another process now has the last port, it may
    have received the token from an open page. Then use a free port with a new token.
    """
    if not port and last_port:
        try:
            return Server(answers, last_port, token)
        except CheckFailed:
            return Server(answers, 0, new_token())
    return Server(answers, port, token)


def _static(name: str) -> bytes:
    if name not in _static_names():
        raise bottle.HTTPError(404, "there is no such file")
    bottle.response.content_type = f"{STATIC[name.rpartition('.')[2]]}; charset=utf-8"
    return _read(name)


@functools.cache
def _static_names() -> frozenset[str]:
    """Return the names under which the page's scripts and styles are served."""
    folder = resources.files("geomx_cli.observe.dashboard") / "static"
    files = [("", folder), ("uplot/", folder / "uplot")]
    names = [prefix + entry.name for prefix, where in files for entry in where.iterdir()]
    return frozenset(name for name in names if name.rpartition(".")[2] in STATIC)


def _read(name: str) -> bytes:
    return (resources.files("geomx_cli.observe.dashboard") / "static" / name).read_bytes()


def _error(error: bottle.HTTPError) -> str:
    bottle.response.content_type = "text/plain; charset=utf-8"
    return f"{error.status_line}: {error.body}\n"


# Runs the dashboard of one job until the user ends it.

def show(
    job: KnownJob, model: JobModel, port: int, *, opens: bool, on_url: Callable[[str], None],
    on_event: Callable[[str, Event], None],
) -> str:  # fmt: skip
    """Serve until SIGINT or SIGTERM. Call it from the main thread. Return the job's state at the end. Raises
    CheckFailed if the port is in use.

    on_url: called with the page's URL.
    on_event: called with each event once it is in `model`.
    """

    def take(process: str, event: Event) -> None:
        model.take(process, event)
        on_event(process, event)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        events = EventReader(job, take, model.say, model.use)
        stack.callback(events.close)
        others = stack.enter_context(contextlib.closing(Comparison(job.id)))
        log = stack.enter_context(contextlib.closing(LogSearch(job)))
        server = started(_answers(job, model, events, others, log), port, *remembered(job.directory))
        stack.callback(server.close)
        server.remember(job.directory)
        on_url(server.url)
        if opens and (page := _redirect_page(job.directory, server.url)):
            webbrowser.open(page)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                signal.pause()
        return str(page_state(job, model, events)["state"])
    return ""


def _answers(job: KnownJob, model: JobModel, events: EventReader, others: Comparison, log: LogSearch) -> Answers:
    """The answers to the page's requests. Everything in a request is checked here or where it is used."""

    def data(given: Mapping[str, str]) -> dict[str, Any]:
        wanted = [name for name in given.get("with", "").split(",") if name]
        own = model.overall() if wanted else None
        drawn = others.overlays(wanted)
        labels = others.labels(job, [name for name, one in drawn.items() if "curves" in one])
        return {**page_state(job, model, events), "overall": own, "others": drawn, "labels": labels}

    def rows(given: Mapping[str, str]) -> dict[str, Any]:
        first = given.get("first", "0")
        number = int(first) if first.isascii() and first.isdecimal() and len(first) < 10 else 0
        return page_rows(job, model, events, given.get("party", ""), number)

    return {
        "/data": data,
        "/rows": rows,
        "/job": lambda _: job_facts(job),
        "/jobs": lambda _: {"jobs": others.choices()},
        "/log": lambda given: log.find(given.get("process", ""), given.get("search", "")),
    }


def _redirect_page(folder: Path, url: str) -> str:
    """Write a file that redirects to the page. It exists because command lines are visible to all users, and the URL
    contains the token. Return "" if it cannot be written.
    """
    path = folder / REDIRECT_PAGE
    text = f'<!doctype html><meta http-equiv="refresh" content="0; url={url}">\n'
    return path.as_uri() if write_private(path, text) else ""
