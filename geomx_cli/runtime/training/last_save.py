"""Saving at the end of training, which cannot be repeated later."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from geomx_cli.core.errors import TrainingFailed
from geomx_cli.core.units import format_duration

__all__ = ["LIMIT", "Warn", "save_at_last"]

LIMIT = 8.0  # seconds of further attempts; launch waits little longer for servers to end
_PAUSE = 0.5
_HINT = "make room there, or give the host another state_dir"

Warn = Callable[[str], object]


def save_at_last(folder: Path, write: Callable[[Path], None], warn: Warn, what: str) -> Path:
    """Save with `write(folder)`. If that raises OSError, warn and try again for 8 s, then in a folder of the same name
    on other disks: of temporary files, the working directory, the home directory. Return the folder that was used, and
    warn of another one, from which `geomx fetch` brings nothing.

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
    for place in _elsewhere(folder):
        try:
            write(place)
        except OSError:
            continue
        warn(f"{what} is in {place} of host {os.uname().nodename}, as {folder} cannot be written ({first})")
        return place
    raise TrainingFailed(f"cannot save {what} in {folder}: {first}", _HINT)


def _elsewhere(folder: Path) -> Iterator[Path]:
    """Yield folders for this process of this job: its output folder is JOB/outputs/PROCESS."""
    process, job = folder.name, folder.parent.parent.name
    for base in (Path(tempfile.gettempdir()), Path.cwd(), Path(os.path.expanduser("~"))):  # noqa: PTH111  # no error
        yield base / f"geomx-{job}" / process
