"""Saving at the end of training, which cannot be repeated later."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from geomx_cli.agent import outputs
from geomx_cli.core.errors import TrainingFailed
from geomx_cli.core.private import is_own_folder
from geomx_cli.core.units import format_duration

__all__ = ["LIMIT", "Warn", "save_at_last"]

LIMIT = 8.0  # seconds of further attempts; a job that is stopped leaves the option `grace` for all of this
_PAUSE = 0.5
_HINT = "make room there, or give the host another state_dir"

Warn = Callable[[str], object]


def save_at_last(folder: Path, write: Callable[[Path], None], warn: Warn, what: str) -> Path:
    """Save with `write(folder)`. If that raises OSError, warn and try again for 8 s, then in a folder on other disks
    (`outputs.elsewhere`), where `geomx fetch` finds it too. Return the folder that was used, and warn of another one.

    `what`: what is saved, for messages, as "the model". Raises TrainingFailed if no disk takes it.
    """
    limit, first = time.monotonic() + LIMIT, ""
    while True:
        try:
            write(folder)
        except OSError as error:
            if not first:
                first = error.strerror or str(error)
                warn(f"cannot save {what} in {folder}: {first}; trying again, for {format_duration(LIMIT)}")
            if time.monotonic() > limit:
                break
            time.sleep(_PAUSE)
        else:
            if first:
                warn(f"{what} could be saved in {folder} now")
            return folder
    for place in outputs.elsewhere(folder):
        try:
            place.mkdir(mode=0o700, exist_ok=True)
            if not is_own_folder(place):  # another account may have made it, as in /tmp
                continue
            write(place)
        except OSError:
            continue
        where = f"{place} of host {os.uname().nodename}, from where geomx fetch brings it"
        warn(f"{what} is in {where}: {folder} cannot be written ({first})")
        return place
    raise TrainingFailed(f"cannot save {what} in {folder}: {first}", _HINT)
