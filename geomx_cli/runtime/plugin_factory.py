"""Creates the common parts of every process: its event log, and its parts of the selected plug-ins."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from geomx_cli.contract.settings import Settings
from geomx_cli.core import deliveries, plugins
from geomx_cli.core.conventions import JobClock, file_name
from geomx_cli.core.env_names import without_effect
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.event_log import EventLog
from geomx_cli.core.events import WarningRaised

__all__ = ["event_log", "part", "warn_of_variables"]


def event_log(settings: Settings) -> EventLog:
    """Return this process's event log in the job's directory; one that drops all events if there is no directory."""
    name = file_name(settings.process)
    path = Path(settings.job_dir, "events", f"{name}.jsonl") if settings.job_dir and name else None
    rank = -1 if settings.rank is None else settings.rank
    talk = None if settings.role == "worker" else sys.stderr
    clock = JobClock(settings.clock_ahead)
    return EventLog(path, party=settings.party, role=settings.role, rank=rank, talk=talk, clock=clock)


def warn_of_variables(events: EventLog, settings: Settings) -> None:
    """Report on stderr and in the event log which of the set variables have no effect."""
    for sentence in without_effect(os.environ):
        events.write(WarningRaised(message=sentence, common=True))
        if settings.role == "worker":  # other roles print their events on stderr
            print(f"warning: {sentence}", file=sys.stderr, flush=True)


def part(settings: Settings, option: Literal["algo", "delivery"], side: plugins.Side) -> Callable[..., Any]:
    """Return the factory of the selected plug-in's part. Raises InvalidSettings if it has none."""
    kind: plugins.Kind = "algorithm" if option == "algo" else "delivery"
    name = settings.text(option) if option == "algo" else deliveries.chosen(settings.options)
    factory = plugins.factory(plugins.find(kind, name), side)
    if factory is None:
        raise InvalidSettings(f"the {kind} {name!r} has no part in a {side}", "choose another")
    return factory
