"""Calls a user's own function, named MODULE:FUNCTION on the command line: a network, a data set."""

import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from geomx_cli.core.errors import InvalidSettings

__all__ = ["call", "new_each_time"]


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
