"""Runs the dashboard of one job until the user ends it."""

import contextlib
import signal
import webbrowser
from collections.abc import Callable
from pathlib import Path

from geomx_cli.core.events import Event
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.observe.dashboard.event_reader import EventReader
from geomx_cli.observe.dashboard.job_model import JobModel
from geomx_cli.observe.dashboard.page_state import page_state
from geomx_cli.observe.dashboard.server import remembered, started, write_private

__all__ = ["show"]

REDIRECT_PAGE = "dashboard.html"


def show(
    job: KnownJob, model: JobModel, port: int, *, opens: bool, on_url: Callable[[str], None],
    on_event: Callable[[str, Event], None],
) -> None:  # fmt: skip
    """Serve until SIGINT or SIGTERM; call it from the main thread. `on_url` is called with the page's URL, `on_event`
    with each event once it is in `model`. Raises CheckFailed if the port is in use.
    """

    def take(process: str, event: Event) -> None:
        model.take(process, event)
        on_event(process, event)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        events = EventReader(job, take, model.say)
        stack.callback(events.close)
        server = started(lambda: page_state(job, model, events), port, *remembered(job.directory))
        stack.callback(server.close)
        server.remember(job.directory)
        on_url(server.url)
        if opens and (page := _redirect_page(job.directory, server.url)):
            webbrowser.open(page)
        while True:
            signal.pause()


def _redirect_page(folder: Path, url: str) -> str:
    """Write a file that redirects to the page: command lines are visible to all users, and the URL contains the token.
    Return "" if it cannot be written.
    """
    path = folder / REDIRECT_PAGE
    text = f'<!doctype html><meta http-equiv="refresh" content="0; url={url}">\n'
    return path.as_uri() if write_private(path, text) else ""
