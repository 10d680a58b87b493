"""One worker's records of its rounds, one JSON object each. They are lines of a file DEVICE.jsonl or, in ESync's
layout, files iter-1.txt, iter-2.txt, ... of a folder.
"""

import itertools
import math
import os
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from geomx_cli.core.agent_status import MAX_METRICS
from geomx_cli.core.events import MAX_COUNT, MAX_SECONDS, VALIDATION_LOSS, Reported, RoundCompleted

__all__ = ["SUFFIX", "RoundRecord", "WorkerRecords", "read_rounds"]

SUFFIX = ".jsonl"
MAX_BYTES = 4 << 20
PIECE = 1 << 15
_COMPUTING = ("forward and backward", "local update")
_NAME = re.compile(r"iter-([0-9]{1,9})\.txt", re.ASCII)


class RoundRecord(msgspec.Struct, omit_defaults=True):
    """A round. Records of ESync's own workers lack the fields after `accuracy`.

    time: seconds by phase of each local step.
    total_time: seconds since the worker began to train.
    accuracy: present only if evaluated.
    evaluation_on_clock: whether total_time includes evaluations.
    recorded: the algorithm's own metrics. In the file they have their own names. They are not read back.
    step, metrics: of a script's report. `metrics` also has the validation loss. A metric is None if it is not finite.
    """

    num_iters: int
    time: dict[str, dict[str, float]]
    num_samples: int
    total_time: float
    accuracy: float | None = None
    bytes_sent: int | None = None
    bytes_received: int | None = None
    compute: float | None = None
    communicate: float | None = None
    wait: float | None = None
    loss: float | None = None
    evaluation_on_clock: bool | None = None
    recorded: dict[str, float] = {}
    step: int | None = None
    metrics: Annotated[dict[str, float | None], msgspec.Meta(max_length=MAX_METRICS)] = {}

    @classmethod
    def of(
        cls, event: RoundCompleted, accuracy: float | None, validation_loss: float | None = None
    ) -> "RoundRecord":
        """Return the record of a round whose weights have this test accuracy or validation loss."""
        return cls(
            num_iters=event.num_iters, time=event.times, num_samples=event.num_samples, total_time=event.total_time,
            accuracy=accuracy, bytes_sent=event.bytes_sent, bytes_received=event.bytes_received, compute=event.compute,
            communicate=event.communicate, wait=event.wait, loss=event.loss, evaluation_on_clock=True,
            recorded=event.recorded, metrics={} if validation_loss is None else {VALIDATION_LOSS: validation_loss},
        )  # fmt: skip

    @classmethod
    def reported(cls, number: int, event: Reported, samples: int, sent: int, received: int) -> "RoundRecord":
        """Return the record of a script's report, with the samples and bytes since the report before."""
        finite = event.accuracy is not None and math.isfinite(event.accuracy)
        return cls(
            num_iters=number, time={}, num_samples=samples, total_time=event.total_time,
            accuracy=event.accuracy if finite else None, bytes_sent=sent, bytes_received=received, loss=event.loss,
            step=event.step, metrics=dict(event.metrics),
        )  # fmt: skip

    def encode(self) -> bytes:
        """Return the file content."""
        fields = msgspec.to_builtins(self)
        return msgspec.json.encode({**fields.pop("recorded", {}), **fields})

    def aggregation(self) -> float:
        """Duration of the round's exchange in seconds."""
        last = self.time[max(self.time, key=int)] if self.time else {}
        return last.get("global update", last.get("global aggregate", 0.0))

    def computing(self) -> float | None:
        """Seconds of computing: the reported seconds, or the sum of the computing phases. None if neither is recorded.
        """
        phases = [step[name] for step in self.time.values() for name in _COMPUTING if name in step]
        return sum(phases) if self.compute is None and phases else self.compute


Column = tuple["array[float]", "array[float]"]  # seconds of training, and the values then
_DECODER = msgspec.json.Decoder(RoundRecord)


@dataclass
class WorkerRecords:
    """The rounds of one worker, in order, as columns.

    problems: a sentence for each record that was skipped.
    rounds: for a script, its reports with samples or a higher step. Reports of only an accuracy do not count.
    elapsed, accuracies: seconds of training, and the accuracy then.
    traffic: bytes, in both directions.
    sent, received, compute: None if no round has them.
    losses, metrics: as recorded, NaN for a metric that was not finite.
    """

    rounds: int = 0
    samples: "array[int]" = field(default_factory=lambda: array("q"))
    steps: "array[int]" = field(default_factory=lambda: array("q"))
    elapsed: "array[float]" = field(default_factory=lambda: array("d"))
    aggregation: "array[float]" = field(default_factory=lambda: array("d"))
    traffic: "array[int]" = field(default_factory=lambda: array("q"))
    accuracies: list[tuple[float, float]] = field(default_factory=list)
    losses: Column = field(default_factory=lambda: (array("d"), array("d")))
    metrics: dict[str, Column] = field(default_factory=dict)
    sent: int | None = None
    received: int | None = None
    compute: float | None = None
    communicate: float = 0.0
    wait: float = 0.0
    problems: list[str] = field(default_factory=list)
    _step: int = -1

    @property
    def seconds(self) -> float:
        """Seconds from the start of training to the last record."""
        return max(self.elapsed, default=0.0)

    @property
    def busy(self) -> float | None:
        """The fraction of its seconds in which it computed; None if unknown."""
        return self.compute / self.seconds if self.compute is not None and self.seconds else None

    @classmethod
    def read(cls, place: Path) -> "WorkerRecords":
        """Read all records. An error in a record is among the problems. Raises OSError if the place cannot be read."""
        worker, last = cls(), 0
        for where, number, found in _lines(place) if place.suffix == SUFFIX else _files(place):
            if number <= last:
                worker.problems.append(f"{where}: there is another record of round {number}")
                continue
            if number > last + 1:
                missing = f"{last + 1} to {number - 1}" if number > last + 2 else str(last + 1)
                worker.problems.append(f"{place}: there is no record of round {missing}")
            last = number
            if isinstance(found, str):
                worker.problems.append(f"{where}: {found}")
            else:
                worker.add(found)
        return worker

    def add(self, record: RoundRecord) -> None:
        """Append the next round."""
        exchange = record.aggregation()
        step = record.step
        if step is None or record.num_samples or step > max(self._step, 0):
            self.rounds += 1
        self._step = max(self._step, step or 0)
        self.samples.append(record.num_samples)
        self.steps.append(len(record.time))
        self.elapsed.append(record.total_time)
        self.aggregation.append(exchange)
        self.traffic.append((record.bytes_sent or 0) + (record.bytes_received or 0))
        self.sent = _plus(self.sent, record.bytes_sent)
        self.received = _plus(self.received, record.bytes_received)
        self.compute = _plus(self.compute, record.computing())
        self.communicate += exchange if record.communicate is None else record.communicate
        self.wait += exchange if record.wait is None else record.wait
        if record.accuracy is not None:
            self.accuracies.append((record.total_time, record.accuracy))
        if record.loss is not None:
            _append(self.losses, record.total_time, record.loss)
        for name, value in record.metrics.items():
            if name in self.metrics or len(self.metrics) < MAX_METRICS:
                column = self.metrics.setdefault(name, (array("d"), array("d")))
                _append(column, record.total_time, math.nan if value is None else value)


def _append(column: Column, seconds: float, value: float) -> None:
    column[0].append(seconds)
    column[1].append(value)


_Amount = TypeVar("_Amount", int, float)
_Found = tuple[str, int, RoundRecord | str]  # where it is, its number, and the record or why it cannot be read


def _plus(total: _Amount | None, amount: _Amount | None) -> _Amount | None:
    return total if amount is None else amount if total is None else total + amount


def read_rounds(place: Path, first: int, last: int) -> Iterator[RoundRecord]:
    """Yield a worker's readable records of rounds `first` to `last`, in order."""
    if place.suffix == SUFFIX:
        found = (one for one in itertools.takewhile(lambda one: one[1] <= last, _lines(place)) if one[1] >= first)
    else:
        found = (("", number, _read_file(f"{place}/iter-{number}.txt", number)) for number in range(first, last + 1))
    return (record for _, _, record in found if not isinstance(record, str))


def _lines(path: Path) -> Iterator[_Found]:
    """Yield the records of a file. A damaged record counts as the next round."""
    number = 0
    with path.open("rb") as file:
        for line in itertools.count(1):
            if not (data := file.readline(MAX_BYTES + 1)):
                return
            found = _decode(data)
            number = number + 1 if isinstance(found, str) else found.num_iters
            yield f"{path}, line {line}", number, found
            if len(data) > MAX_BYTES:  # the rest of the line is no record either
                return


def _files(folder: Path) -> Iterator[_Found]:
    """Yield the records of a folder by number; files with other names are ignored."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries]
    for number, name in sorted((int(match[1]), name) for name in names if (match := _NAME.fullmatch(name))):
        yield f"{folder / name}", number, _read_file(f"{folder}/{name}", number)


def _read_file(path: str, number: int) -> RoundRecord | str:
    """Return the record of a round, or why it is invalid."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            data = os.read(file, PIECE)
            if len(data) == PIECE:  # rare: a buffer for the largest record would cost more than everything else
                data += os.read(file, MAX_BYTES + 1 - PIECE)
        finally:
            os.close(file)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    found = _decode(data)
    if not isinstance(found, str) and found.num_iters != number:
        return f"it is a record of round {found.num_iters}"
    return found


def _decode(data: bytes) -> RoundRecord | str:
    """Return the record, or why it is invalid."""
    if len(data) > MAX_BYTES:
        return f"it has more than {MAX_BYTES >> 20} MiB"
    try:
        record = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"it is no whole record: {error}" if data.strip() else "it is empty"
    return record if _is_plausible(record) else "its numbers make no sense"


def _is_plausible(record: RoundRecord) -> bool:
    """Check that reports can compute with its numbers."""
    counts = (record.num_iters, record.num_samples, record.bytes_sent or 0, record.bytes_received or 0)
    seconds_of = (record.total_time, record.compute, record.communicate, record.wait, record.accuracy)
    times = [seconds for seconds in seconds_of if seconds is not None]
    for step in record.time.values():
        times += step.values()
    return (
        all(0 <= count < MAX_COUNT for count in counts)
        and all(0 <= seconds < MAX_SECONDS for seconds in times)
        and all(map(_is_number, record.time))
    )


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) < 10
