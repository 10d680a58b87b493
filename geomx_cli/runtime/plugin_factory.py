"""Creates the common parts of every process: its event log, and its parts of the selected plug-ins."""

import importlib
import os
import sys
import traceback
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

__all__ = ["call", "event_log", "new_each_time", "part", "warn_of_variables"]

# Calls a user's own function, named MODULE:FUNCTION on the command line: a network, a data set.


def call(name: str, option: str, *arguments: Any) -> Any:
    """Return the result of MODULE:FUNCTION; the module is also searched in the working directory. It may import a
    framework, so the caller's process has prepared for that (frontends.prepare_imports).

    Raises InvalidSettings, which names `option`, if it does not exist or raises; its traceback is printed.
    """
    module_name, _, function = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.partition(".")[0]:
            raise _failed(name, option) from None
        hint = f"it is looked for in {here}; --sync {module_name.partition('.')[0]}.py brings it to other hosts"
        raise InvalidSettings(f"{option} {name}: there is no module {module_name!r}", hint) from None
    except (Exception, SystemExit):
        raise _failed(name, option) from None
    found = getattr(module, function, None)
    if not callable(found):
        raise InvalidSettings(f"{option} {name}: {module_name} has no function {function!r}", "correct the name")
    try:
        return found(*arguments)
    except (Exception, SystemExit):
        raise _failed(name, option) from None


def new_each_time(name: str, option: str, what: str) -> Callable[..., Any]:
    """Return a function that returns the result of MODULE:FUNCTION, as `call` does, for objects whose copies are to
    have weights of their own.

    It raises InvalidSettings if the user's function returns an object that it has returned before. `what`: the kind of
    object, for that message. All objects are kept.
    """
    made: list[Any] = []

    def make(*arguments: Any) -> Any:
        found = call(name, option, *arguments)
        if any(found is other for other in made):
            why = f"it returned the same {what} again, and copies are to have weights of their own"
            raise InvalidSettings(f"{option} {name}: {why}", "let it make a new one each time")
        made.append(found)
        return found

    return make


def _failed(name: str, option: str) -> InvalidSettings:
    """Build the error for the exception being handled."""
    traceback.print_exc()
    error = sys.exc_info()[1]
    text = (str(error).strip().splitlines() or [""])[0]
    return InvalidSettings(f"{option} {name}: it raised {type(error).__name__}: {text}", "its traceback is in the log")


def event_log(settings: Settings) -> EventLog:
    """Return this process's event log in the job's directory. If there is no directory, the log drops all events."""
    name = file_name(settings.process)
    path = Path(settings.job_dir, "events", f"{name}.jsonl") if settings.job_dir and name else None
    rank = -1 if settings.rank is None else settings.rank
    talk = None if settings.role == "worker" else sys.stderr
    clock = JobClock(settings.clock_ahead)
    who = {"party": settings.party, "role": settings.role}
    return EventLog(path, **who, rank=rank, talk=talk, clock=clock, incarnation=settings.incarnation)


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
