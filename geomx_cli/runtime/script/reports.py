"""The metrics that a script reports. `report` checks and queues them; a thread writes them to the event log.

So a step waits neither for a disk nor for a device: scalars of a framework, which may not be computed yet, are copied,
and converted by that thread. Outside a job that geomx launched nothing is kept.
"""

import math
import operator
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, SupportsFloat, SupportsIndex

from geomx_cli.core.agent_status import MAX_METRICS
from geomx_cli.core.events import MAX_COUNT, Reported, WarningRaised

if TYPE_CHECKING:
    from geomx_cli.core.event_log import EventLog

__all__ = [
    "Reporter", "begin", "close", "count_of", "is_share", "load", "number_of", "report", "checked_share", "state",
    "trained",
]  # fmt: skip

# Checks and conversions of the values that a script reports.


def count_of(name: str, value: SupportsIndex) -> int:
    """Return a number of steps or samples. Raises TypeError and ValueError."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {type(value).__name__}") from None
    if not 0 <= number < MAX_COUNT:
        raise ValueError(f"{name} must not be negative or 2**53 and more, as {number}")
    return number


def number_of(name: str, value: Any) -> Any:
    """Return a float, or a copy of a framework's scalar, as the script may change it. Raises TypeError."""
    kind = type(value)
    if kind is float:
        return value
    shape = getattr(value, "shape", None)
    if shape is None and hasattr(kind, "__float__"):
        return float(value)
    if shape is None or not (hasattr(kind, "item") or hasattr(kind, "asscalar")):
        raise TypeError(f"{name} must be a number, not {kind.__name__}")
    if tuple(shape) not in ((), (1,)):
        raise TypeError(f"{name} must be one number, not an array of shape {tuple(shape)}: report its mean")
    if not hasattr(value, "__array_interface__"):
        return value.copy() if hasattr(value, "copy") else value.detach().clone()
    try:
        return float(value.item())
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, not of dtype {value.dtype}") from None


def checked_share(value: Any) -> Any:
    """Return an accuracy, which is checked if it is a float. Raises ValueError."""
    if isinstance(value, float) and not is_share(value):
        raise ValueError(f"accuracy must be between 0 and 1, not {value:g}")
    return value


def is_share(value: float) -> bool:
    """Whether it is an accuracy: from 0 to 1, or NaN."""
    return math.isnan(value) or 0 <= value <= 1


INTERVAL = 0.5  # seconds between writes
QUEUED, EARLY = 1 << 16, 1 << 10  # reports that wait to be written; before the worker has joined
LIVE = 16  # events of a write that agents forward
WINDOW = 10.0  # seconds over which the rate of samples is averaged
_READY = 0.001  # seconds to convert a value that is computed already
CLOSING = 5.0  # seconds for the last values, which a failed job may never compute
NAME_CHARS = 64
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_Entry = tuple[float, int, int, Any, Any, dict[str, Any]]  # seconds, step, total samples, loss, accuracy, metrics


class Reporter:
    """The reports of one process. `report` may be called from any thread; the others from one.

    It keeps QUEUED reports, as while a disk hangs, and drops older ones. Before `begin`, in a script that may be
    running alone, it keeps the first EARLY. A warning at the end says how many were dropped. A forked child reports
    nothing.
    """

    def __init__(self) -> None:
        self._enabled = True
        self._queue: deque[_Entry] = deque(maxlen=QUEUED)
        self._events: EventLog | None = None
        self._has_failed: Callable[[], bool] = lambda: False
        self._on_loss: Callable[[float], None] = lambda _: None
        self._began: float | None = None
        self._names: set[str] = set()
        self.trained = False  # whether samples or a loss were reported
        self._steps = -1  # the step of a report that names none
        self._has_steps = False
        self._samples = self._dropped = 0
        self._warned: set[str] = set()
        self._rates: deque[tuple[float, int]] = deque([(0.0, 0)])
        self._counted = (0.0, 0)  # seconds and total samples of the last report that has samples
        self._newest = 0.0  # seconds of the last event
        self._lock = threading.Lock()  # of all above, never held for long
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def begin(
        self,
        events: "EventLog",
        has_failed: Callable[[], bool] = lambda: False,
        on_loss: Callable[[float], None] = lambda _: None,
        before: float = 0.0,
    ) -> None:
        """Write to `events` from now on. Seconds count from here, or from an earlier report, on from those `before` all
        workers began again. `has_failed`: whether the
        job has failed, called from a thread; reports with a framework's scalars that are read after that are dropped.
        `on_loss`: gets each loss, in that thread.
        """
        with self._lock:
            self._has_failed, self._on_loss = has_failed, on_loss
            self._enabled = events.is_kept
            if self._began is None:
                self._began = time.monotonic() - before
                self._counted = (before, 0)
                self._rates = deque([self._counted])
            self._events = events

    def report(
        self, step: SupportsIndex | None, samples: SupportsIndex | None, loss: SupportsFloat | None,
        accuracy: SupportsFloat | None, metrics: Mapping[str, SupportsFloat],
    ) -> None:  # fmt: skip
        """See the function `report`."""
        count = count_of("samples", samples) if samples is not None else 0
        number = count_of("step", step) if step is not None else None
        values = {name: number_of(name, value) for name, value in metrics.items() if self._is_known(name)}
        loss = number_of("loss", loss) if loss is not None else None
        accuracy = checked_share(number_of("accuracy", accuracy)) if accuracy is not None else None
        if not self._enabled:
            return
        with self._lock:
            now = time.monotonic()
            if number is not None:
                self._steps, self._has_steps = number, True
            elif not self._has_steps and (samples is not None or not self._samples):
                self._steps += 1
            self._samples += count
            self.trained = self.trained or count > 0 or loss is not None
            if self._began is None:
                self._began = now
            early = self._events is None
            if len(self._queue) == (EARLY if early else QUEUED):
                self._dropped += 1
                if early:
                    return
            self._queue.append((now - self._began, max(0, self._steps), self._samples, loss, accuracy, values))
            if self._thread is None and not early:
                self._thread = threading.Thread(target=self._run, name="geomx-reports", daemon=True)
                self._thread.start()

    def state(self) -> dict[str, int | bool | float]:
        """Return the numbers of steps and samples so far, and the seconds."""
        with self._lock:
            since = 0.0 if self._began is None else time.monotonic() - self._began
            return {
                "steps": self._steps, "has_steps": self._has_steps, "samples": self._samples, "trained": self.trained,
                "seconds": since,
            }  # fmt: skip

    def load(self, state: Mapping[str, Any]) -> None:
        """Count on from a `state`."""
        with self._lock:
            self._steps, self._has_steps = state["steps"], state["has_steps"]
            self._samples, self.trained = state["samples"], state["trained"]
            self._began = time.monotonic() - state["seconds"]
            self._counted = (state["seconds"], self._samples)
            self._rates = deque([self._counted])

    def close(self) -> None:
        """Write what is queued, within CLOSING seconds, and end the thread."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(CLOSING)
        elif self._queue:
            self.flush()
        if self._dropped and self._events is not None:
            why = "they came faster than they could be written, or before the worker had joined"
            self._warn("dropped", f"{self._dropped} reports were dropped: {why}")
        self._enabled = False

    def disable(self) -> None:
        """Report nothing any more, as in a forked child, where no thread releases the lock that another one held."""
        self._enabled = False
        self._lock = threading.Lock()

    def flush(self) -> None:
        """Write what is queued; without an event log it stays queued."""
        with self._writing:
            if self._events is None or self._began is None:
                return
            epoch = self._events.clock.time() - (time.monotonic() - self._began)
            with self._lock:
                entries = list(self._queue)
                self._queue.clear()
            newest = set(sorted({_kind(entry): index for index, entry in enumerate(entries)}.values())[-LIVE:])
            since = time.monotonic()
            shown: set[tuple[str | bool, ...]] | None = None  # before INTERVAL has passed, `newest` is enough
            for index, entry in enumerate(entries):
                ready, now = self._ready(entry), time.monotonic()
                if now - since >= INTERVAL:  # values become ready as slowly as the script trains
                    since, shown = now, set()
                is_shown = shown is not None and len(shown) < LIVE and _kind(entry) not in shown
                if shown is not None and is_shown:
                    shown.add(_kind(entry))
                if ready is not None:
                    self._write(self._events, ready, epoch, live=is_shown or index in newest)

    def _ready(self, entry: _Entry) -> _Entry | None:
        """Return the entry with numbers for a framework's scalars, once they are computed; None if the job has failed.

        Scripts may run far ahead of the device, so the time of such an entry is when it was ready: now if this waited
        for it, or if it is overdue; else it was ready before, and the time of the call is closer. Time never goes back.
        """
        seconds, step, samples, loss, accuracy, metrics = entry
        assert self._began is not None
        before = time.monotonic()
        computed = ((name, self._computed(name, value)) for name, value in metrics.items())
        numbers = {name: number for name, number in computed if number is not None}
        share = self._computed("accuracy", accuracy)
        if share is not None and not is_share(share):
            self._warn("accuracy", f"an accuracy of {share:g} is ignored: it must be between 0 and 1")
            share = None
        found = self._computed("loss", loss)
        waits = not all(isinstance(value, float | None) for value in (loss, accuracy, *metrics.values()))
        if waits and self._has_failed():  # MXNet raises a failure only once, and then returns wrong values
            return None
        seconds, now = max(seconds, self._newest), time.monotonic()
        is_late = now - before > _READY or now - self._began - seconds > 2 * INTERVAL
        if is_late and waits:
            seconds = now - self._began
        self._newest = seconds
        return seconds, step, samples, found, share, numbers

    def _write(self, events: "EventLog", entry: _Entry, epoch: float, *, live: bool) -> None:
        seconds, step, samples, loss, accuracy, metrics = entry
        if loss is not None:
            self._on_loss(loss)
            if not math.isfinite(loss):
                why = "does the learning rate fit the optimizer and the data?"
                self._warn("loss", f"the loss is {loss}: {why}", affects_result=True)
        if samples != self._counted[1]:
            self._counted = seconds, samples
        events.write(
            Reported(
                time=epoch + seconds, step=step, total_time=round(seconds, 6), samples=samples,
                samples_per_s=self._rate() if live else None, loss=loss, accuracy=accuracy,
                metrics=metrics, live=live,
            )
        )  # fmt: skip

    def _computed(self, name: str, value: Any) -> float | None:
        """Convert a framework's scalar, which may wait for it."""
        if value is None or isinstance(value, float):
            return value
        try:
            return float(value.asscalar() if hasattr(value, "asscalar") else value.item())
        except Exception as error:  # the script meets this failure too, where it uses the result
            if not self._has_failed():
                self._warn(name, f"a value of {name!r} could not be computed, and is not recorded: {error!r}"[:500])
            return None

    def _rate(self) -> float | None:
        """Samples per second over the WINDOW seconds until the last report that has samples, or since the one before;
        None if there has been none since the last rate.
        """
        if self._counted == self._rates[-1]:
            return None
        self._rates.append(self._counted)
        while len(self._rates) > 2 and self._rates[1][0] <= self._counted[0] - WINDOW:
            self._rates.popleft()
        (since, before), (until, after) = self._rates[0], self._rates[-1]
        return round((after - before) / (until - since), 2) if until > since else None

    def _is_known(self, name: str) -> bool:
        """Whether a metric of this name is kept. Raises ValueError for an invalid name."""
        if name in self._names:
            return True
        if len(name) > NAME_CHARS or not _NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} names no metric: use up to {NAME_CHARS} of A-Z a-z 0-9 _ . / -")
        with self._lock:
            if len(self._names) < MAX_METRICS:
                self._names.add(name)
            known = name in self._names
        if not known:
            self._warn("names", f"{name!r} and later metrics are ignored: there are {MAX_METRICS} others already")
        return known

    def _warn(self, about: str, message: str, *, affects_result: bool = False) -> None:
        """Warn in the log of the process and in the job's messages; once for each subject."""
        with self._lock:
            if not self._enabled or about in self._warned:
                return
            self._warned.add(about)
        print(f"warning: {message}", file=sys.stderr, flush=True)
        if self._events is not None:
            self._events.write(WarningRaised(message=message, affects_result=affects_result))

    def _run(self) -> None:
        while not self._over.wait(INTERVAL):
            self.flush()
        self.flush()


def _kind(entry: _Entry) -> tuple[str | bool, ...]:
    """Which values it has."""
    return (*entry[5], entry[3] is None, entry[4] is None)


_reporter = Reporter()
os.register_at_fork(after_in_child=_reporter.disable)
begin, close = _reporter.begin, _reporter.close
state, load = _reporter.state, _reporter.load


def trained() -> bool:
    """Whether this process has reported training: samples or a loss."""
    return _reporter.trained


def report(
    step: SupportsIndex | None = None,
    samples: SupportsIndex | None = None,
    loss: SupportsFloat | None = None,
    accuracy: SupportsFloat | None = None,
    **metrics: SupportsFloat,
) -> None:
    """Report this worker's metrics, up to once per step. geomx shows and records them like the bundled job's.

    A call takes some microseconds and waits for nothing. In a script that runs alone it has no effect. Values are
    numbers (also NaN), numpy scalars, or scalars of a framework. A framework's scalar takes 100 microseconds. geomx
    copies it, and the framework may compute it later.

    Args:
        step: By default the last reported step. If a script reports no steps, the number of earlier reports that have
            `samples`; if no report has samples, the number of all earlier reports.
        samples: The number of samples that this worker has trained on since its last report.
        loss: The loss of these samples.
        accuracy: From 0 to 1.
        metrics: Other values, 64 names in all. A name has up to 64 letters, digits and ``_ . / -``.

    Raises:
        TypeError: A value has another type.
        ValueError: A name is invalid, a count is negative, or the accuracy is not between 0 and 1.

    Examples:
        >>> geomx.report(samples=len(labels), loss=loss, lr=0.1)
        >>> geomx.report(accuracy=0.81)
    """
    _reporter.report(step, samples, loss, accuracy, metrics)
