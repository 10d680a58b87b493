"""A dashboard of one job, from the first event that is read to the user's last word."""

import contextlib
import signal
import webbrowser
from collections.abc import Callable
from pathlib import Path

from geomx_cli.core.events import Event
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.observe.dashboard.feed import EventStream
from geomx_cli.observe.dashboard.live import JobModel
from geomx_cli.observe.dashboard.server import remembered, started, write_private
from geomx_cli.observe.dashboard.view import view

__all__ = ["show"]

DOOR = "dashboard.html"


def show(
    job: KnownJob, port: int, *, opens: bool, told: Callable[[str], None], heard: Callable[[str, Event], None]
) -> None:
    """Answer until SIGINT or SIGTERM; call it from the main thread. `told` hears the page's address, `heard` each
    event. Raises CheckFailed where the port is taken.
    """
    live = JobModel(job.plan, job.started)

    def take(process: str, event: Event) -> None:
        live.take(process, event)
        heard(process, event)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        feed = EventStream(job, take, live.say)
        stack.callback(feed.close)
        server = started(lambda: view(job, live, feed), port, *remembered(job.directory))
        stack.callback(server.close)
        server.remember(job.directory)
        told(server.url)
        if opens and (door := _door(job.directory, server.url)):
            webbrowser.open(door)
        while True:
            signal.pause()


def _door(folder: Path, url: str) -> str:
    """A file that leads to the page: a browser's command line is seen by everybody, and the token stands in the URL. ""
    where it cannot be written.
    """
    path = folder / DOOR
    text = f'<!doctype html><meta http-equiv="refresh" content="0; url={url}">\n'
    return path.as_uri() if write_private(path, text) else ""
