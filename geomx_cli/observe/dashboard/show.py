"""Runs the dashboard of one job until the user ends it."""

import contextlib
import signal
import webbrowser
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from geomx_cli.core.events import Event
from geomx_cli.jobs.store.own_files import REDIRECT_PAGE
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.observe.dashboard.comparison import Comparison
from geomx_cli.observe.dashboard.event_reader import EventReader
from geomx_cli.observe.dashboard.job_facts import job_facts
from geomx_cli.observe.dashboard.job_model import JobModel
from geomx_cli.observe.dashboard.log_search import LogSearch
from geomx_cli.observe.dashboard.page_state import page_rows, page_state
from geomx_cli.observe.dashboard.server import Answers, remembered, started, write_private

__all__ = ["show"]


def show(
    job: KnownJob, model: JobModel, port: int, *, opens: bool, on_url: Callable[[str], None],
    on_event: Callable[[str, Event], None],
) -> str:  # fmt: skip
    """Serve until SIGINT or SIGTERM; call it from the main thread. `on_url` is called with the page's URL, `on_event`
    with each event once it is in `model`. Return the job's state then. Raises CheckFailed if the port is in use.
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
    """What the page can ask for. All that it sends is checked here or where it is used."""

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
    """Write a file that redirects to the page: command lines are visible to all users, and the URL contains the token.
    Return "" if it cannot be written.
    """
    path = folder / REDIRECT_PAGE
    text = f'<!doctype html><meta http-equiv="refresh" content="0; url={url}">\n'
    return path.as_uri() if write_private(path, text) else ""
