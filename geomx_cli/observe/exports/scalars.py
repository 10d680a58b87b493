"""The scalars of a job's events, under the same tags for TensorBoard, W&B and MLflow."""

import math
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from geomx_cli.core.conventions import life_of
from geomx_cli.core.errors import CheckFailed, InvalidSettings
from geomx_cli.core.events import VALIDATION_LOSS, Evaluated, Event, ProcessFinished, Reported, Telemetry

__all__ = ["Backlog", "Board", "Scalar", "Scalars"]

# TensorBoard event files, by tensorboardX.

FLUSH = 5  # seconds between flushes to disk
LIMIT = 10.0


class Board:
    """The finite scalars of a job by round or step, in a new `folder`; see Scalars.

    A separate thread writes, because a disk may hang. `take` never blocks, except with `waits`; see Backlog. Must be
    closed: pending events are then written within 10 seconds or discarded.
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
        """Queue an event's scalars. Events without scalars are ignored."""
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


NAMES = ("loss", "samples_per_s", "waiting")


class Scalar(NamedTuple):
    """step: a round of the bundled job, or a script's own step. when: see JobClock."""

    tag: str
    value: float
    step: int
    when: float


class Scalars:
    """Tags: accuracy, validation_loss, loss/PROCESS, samples_per_s/PROCESS, waiting/PROCESS and wan_MB/PROCESS. Scripts
    have accuracy/PROCESS, and metric/NAME/PROCESS for their own metrics. A metric named "loss" is not the loss.
    """

    def __init__(self) -> None:
        self._rounds: dict[str, int] = {}
        self._wan: dict[str, dict[int, int]] = {}  # bytes of each life of a process

    def of(self, process: str, event: Event) -> Iterator[Scalar]:
        """Yield the scalars of an event, which may be NaN or infinite."""
        for tag, value, step in self._values(process, event):
            if value is not None and step is not None:
                yield Scalar(tag.replace(":", "-"), value, step, event.time)

    def _values(self, process: str, event: Event) -> Iterator[tuple[str, float | None, int | None]]:
        match event:
            case Evaluated(round=number) | ProcessFinished(rounds=number):
                yield "accuracy", event.accuracy, number
                yield VALIDATION_LOSS, event.validation_loss, number
            case Telemetry(round=number) if number != self._rounds.get(process):
                self._rounds[process] = number
                for name in NAMES:
                    yield f"{name}/{process}", getattr(event, name), number
                if event.bytes is not None and any(event.bytes.wan):
                    lives = self._wan.setdefault(process, {})
                    lives[life_of(event.number)] = sum(event.bytes.wan)
                    yield f"wan_MB/{process}", sum(lives.values()) / 1e6, number
            case Reported(step=step):
                for name in ("loss", "accuracy", "samples_per_s"):
                    yield f"{name}/{process}", getattr(event, name), step
                for name, value in event.metrics.items():
                    yield f"metric/{name}/{process}", value, step


# The scalars that wait for the thread that writes them.

AHEAD = 10_000
EVERY = 1.0  # seconds between batches
PATIENCE = 60.0  # seconds of a wait for room, longer than a client takes to start


class Backlog:
    """Takes scalars from one thread, and passes them on in batches to another, the writer.

    With `waits`, as for the events of a finished job, `put` waits for room, at most a minute. After one wait in vain it
    waits no more. Scalars that find no room are dropped, and counted for `report`.
    """

    def __init__(self, *, waits: bool = False) -> None:
        self._patience = PATIENCE if waits else 0.0
        self._queue: queue.Queue[Scalar] = queue.Queue(AHEAD)
        self._over = threading.Event()
        self._abandoned = False
        self._dropped = 0

    def put(self, scalar: Scalar) -> None:
        """Add a scalar."""
        if self._abandoned:
            return
        try:
            self._queue.put(scalar, timeout=self._patience)
        except queue.Full:
            self._patience = 0.0
            self._dropped += 1

    def batches(self) -> Iterator[list[Scalar]]:
        """Yield the queued scalars, each second or as soon as the queue is full, until `close` was called and all are
        out.
        """
        over = False
        while not over:
            over = self._over.wait(0 if self._queue.full() else EVERY)  # read first: nothing is put after it
            if batch := [self._queue.get() for _ in range(self._queue.qsize())]:
                yield batch

    def close(self) -> None:
        """No further scalars follow."""
        self._over.set()

    def abandon(self) -> None:
        """Drop all further values, and end a waiting `put`. The writer has ended early, and has reported the reason."""
        self._abandoned = True
        for _ in range(self._queue.qsize()):
            self._queue.get()

    def report(self, where: str) -> None:
        """Report how many scalars `where` lacks, if any."""
        if self._dropped and not self._abandoned:
            what = f"{self._dropped} values of this job, which came faster than they could be written"
            print(f"warning: {where} lacks {what}", file=sys.stderr, flush=True)
