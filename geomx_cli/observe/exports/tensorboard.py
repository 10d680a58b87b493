"""TensorBoard event files, by tensorboardX."""

import math
import sys
import threading
from pathlib import Path
from typing import Any

from geomx_cli.core.errors import CheckFailed, InvalidSettings
from geomx_cli.core.events import Event
from geomx_cli.observe.exports.scalars import Backlog, Scalars

__all__ = ["Board"]

FLUSH = 5  # seconds between flushes to disk
LIMIT = 10.0


class Board:
    """The finite scalars of a job by round or step, in a new `folder`; see Scalars.

    A separate thread writes, as a disk may hang: `take` never blocks, except with `waits`; see Backlog. Must be closed:
    pending events are written within 10 seconds or discarded.
    """

    def __init__(self, folder: Path, *, waits: bool = False) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            hint = "pip install 'geomx-cli[tensorboard]'"
            raise InvalidSettings("--tensorboard needs tensorboardX", hint) from None
        try:
            self.folder = _new(folder)
            self._writer: Any = SummaryWriter(logdir=str(self.folder), flush_secs=FLUSH)
        except OSError as error:
            raise CheckFailed(f"cannot write to {folder}: {error.strerror}", "choose another folder") from None
        self._known = Scalars()
        self._backlog = Backlog(waits=waits)
        self._thread = threading.Thread(target=self._write, name="tensorboard", daemon=True)
        self._thread.start()

    def take(self, process: str, event: Event) -> None:
        """Queue an event's scalars; events without any are ignored."""
        for scalar in self._known.of(process, event):
            if math.isfinite(scalar.value):
                self._backlog.put(scalar)

    def close(self) -> None:
        """Write the pending events."""
        self._backlog.close()
        self._thread.join(LIMIT)
        if self._thread.is_alive():
            print(f"warning: {self.folder} was not written within {LIMIT:g} s", file=sys.stderr, flush=True)
        self._backlog.report(str(self.folder))

    def _write(self) -> None:
        try:
            for batch in self._backlog.batches():
                for scalar in batch:
                    self._writer.add_scalar(scalar.tag, scalar.value, scalar.step, walltime=scalar.when)
            self._writer.close()
        except Exception as error:  # the disk is full, gone, or read-only; training continues after any error
            print(f"warning: no more figures are written for TensorBoard: {error!r}", file=sys.stderr, flush=True)
            self._backlog.abandon()


def _new(folder: Path) -> Path:
    """Return `folder`, or a numbered one if it is not empty: two writers in one folder would yield one mixed curve."""
    place, number = folder, 1
    while place.is_dir() and any(place.iterdir()):
        number += 1
        place = folder.with_name(f"{folder.name}-{number}")
    return place
