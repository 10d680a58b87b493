"""TensorBoard event files, by tensorboardX."""

import contextlib
import math
import queue
import sys
import threading
from pathlib import Path
from typing import Any

from geomx_cli.core.errors import CheckFailed, InvalidSettings
from geomx_cli.core.events import Evaluated, Event, ProcessFinished, Telemetry

__all__ = ["Board"]

SCALARS = ("loss", "samples_per_s", "waiting")
FLUSH = 5  # seconds between flushes to disk
AHEAD = 10_000
LIMIT = 10.0

_Scalar = tuple[str, float, int, float]


class Board:
    """Scalars by round, in a new `folder`: accuracy, and loss, samples_per_s, waiting and wan_MB of each process.

    A separate thread writes, as a disk may hang: `take` never blocks, and drops events if the queue is full. Must be
    closed: pending events are written within 10 seconds or discarded.
    """

    def __init__(self, folder: Path) -> None:
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
        self._rounds: dict[str, int] = {}
        self._scalars: queue.Queue[_Scalar | None] = queue.Queue(AHEAD)
        self._thread = threading.Thread(target=self._write, name="tensorboard", daemon=True)
        self._thread.start()

    def take(self, process: str, event: Event) -> None:
        """Queue an event's scalars; events without any are ignored."""
        match event:
            case Evaluated(round=number, accuracy=accuracy) | ProcessFinished(rounds=number, accuracy=accuracy):
                self._add("accuracy", accuracy, number, event.time)
            case Telemetry(round=number) if number != self._rounds.get(process):
                self._rounds[process] = number
                for name in SCALARS:
                    self._add(f"{name}/{process}", getattr(event, name), number, event.time)
                if event.bytes is not None and any(event.bytes.wan):
                    self._add(f"wan_MB/{process}", sum(event.bytes.wan) / 1e6, number, event.time)

    def close(self) -> None:
        """Write the pending events."""
        with contextlib.suppress(queue.Full):
            self._scalars.put(None, timeout=LIMIT)
        self._thread.join(LIMIT)

    def _add(self, tag: str, value: float | None, step: int | None, when: float) -> None:
        if value is not None and step is not None and math.isfinite(value):
            with contextlib.suppress(queue.Full):
                self._scalars.put_nowait((tag.replace(":", "-"), value, step, when))

    def _write(self) -> None:
        try:
            while (scalar := self._scalars.get()) is not None:
                tag, value, step, when = scalar
                self._writer.add_scalar(tag, value, step, walltime=when)
            self._writer.close()
        except Exception as error:  # the disk is full, gone, or read-only; training continues after any error
            print(f"warning: no more figures are written for TensorBoard: {error!r}", file=sys.stderr, flush=True)


def _new(folder: Path) -> Path:
    """Return `folder`, or a numbered one if it is not empty: two writers in one folder would yield one mixed curve."""
    place, number = folder, 1
    while place.is_dir() and any(place.iterdir()):
        number += 1
        place = folder.with_name(f"{folder.name}-{number}")
    return place
