"""One worker's records of its rounds: a folder of files iter-1.txt, iter-2.txt, ..., each one JSON object."""

import os
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from geomx_cli.core.events import MAX_COUNT, MAX_SECONDS, RoundCompleted

__all__ = ["RoundRecord", "WorkerRecords", "read_record"]

MAX_BYTES = 4 << 20
PIECE = 1 << 15
_NAME = re.compile(r"iter-([0-9]{1,9})\.txt", re.ASCII)


class RoundRecord(msgspec.Struct, omit_defaults=True):
    """A round. `time`: seconds by phase of each local step; total_time: seconds since the worker began to train.

    accuracy is present only if evaluated; the fields after it are not in records of ESync's own workers.
    evaluation_on_clock: whether total_time includes evaluations. recorded: the algorithm's own metrics, which have
    their own names in the file, and are not read back.
    """

    num_iters: int
    time: dict[str, dict[str, float]]
    num_samples: int
    total_time: float
    accuracy: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    compute: float | None = None
    communicate: float | None = None
    wait: float | None = None
    loss: float | None = None
    evaluation_on_clock: bool | None = None
    recorded: dict[str, float] = {}

    @classmethod
    def of(cls, event: RoundCompleted, accuracy: float | None) -> "RoundRecord":
        """Return the record of a round whose weights have this test accuracy."""
        return cls(
            num_iters=event.num_iters, time=event.times, num_samples=event.num_samples, total_time=event.total_time,
            accuracy=accuracy, bytes_sent=event.bytes_sent, bytes_received=event.bytes_received, compute=event.compute,
            communicate=event.communicate, wait=event.wait, loss=event.loss, evaluation_on_clock=True,
            recorded=event.recorded,
        )  # fmt: skip

    def encode(self) -> bytes:
        """Return the file content."""
        fields = msgspec.to_builtins(self)
        return msgspec.json.encode({**fields.pop("recorded", {}), **fields})

    def aggregation(self) -> float:
        """Duration of the round's exchange in seconds."""
        last = self.time[max(self.time, key=int)] if self.time else {}
        return last.get("global update", last.get("global aggregate", 0.0))

    def computing(self) -> float:
        """Seconds of computing: as reported, or else the sum of the computing phases."""
        if self.compute is not None:
            return self.compute
        return sum(step.get("forward and backward", 0.0) + step.get("local update", 0.0) for step in self.time.values())


_DECODER = msgspec.json.Decoder(RoundRecord)


@dataclass
class WorkerRecords:
    """The rounds of one worker, in order, as columns; `problems`: a sentence per file that was skipped.

    elapsed, accuracies: seconds of training, and the accuracy then. traffic: bytes, in both directions.
    """

    samples: "array[int]" = field(default_factory=lambda: array("q"))
    steps: "array[int]" = field(default_factory=lambda: array("q"))
    elapsed: "array[float]" = field(default_factory=lambda: array("d"))
    aggregation: "array[float]" = field(default_factory=lambda: array("d"))
    traffic: "array[int]" = field(default_factory=lambda: array("q"))
    accuracies: list[tuple[float, float]] = field(default_factory=list)
    sent: int = 0
    received: int = 0
    compute: float = 0.0
    communicate: float = 0.0
    wait: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From the start of training to the last record."""
        return max(self.elapsed, default=0.0)

    @classmethod
    def read(cls, folder: Path) -> "WorkerRecords":
        """Read all records. Errors in a file are among the problems; raises OSError only for the folder."""
        worker, last = cls(), 0
        for number, name in sorted(_numbered(folder)):
            if number == last:
                worker.problems.append(f"{folder / name}: there is another file of round {number}")
                continue
            if number > last + 1:
                missing = f"{last + 1} to {number - 1}" if number > last + 2 else str(last + 1)
                worker.problems.append(f"{folder}: there is no file of round {missing}")
            last = number
            try:
                worker.add(read_record(f"{folder}/{name}", number))
            except ValueError as error:
                worker.problems.append(f"{folder / name}: {error}")
        return worker

    def add(self, record: RoundRecord) -> None:
        """Append the next round."""
        exchange = record.aggregation()
        self.samples.append(record.num_samples)
        self.steps.append(len(record.time))
        self.elapsed.append(record.total_time)
        self.aggregation.append(exchange)
        self.traffic.append(record.bytes_sent + record.bytes_received)
        self.sent += record.bytes_sent
        self.received += record.bytes_received
        self.compute += record.computing()
        self.communicate += exchange if record.communicate is None else record.communicate
        self.wait += exchange if record.wait is None else record.wait
        if record.accuracy is not None:
            self.accuracies.append((record.total_time, record.accuracy))


def _numbered(folder: Path) -> Iterator[tuple[int, str]]:
    """Yield the files of rounds with their numbers; files with other names are ignored."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if match := _NAME.fullmatch(entry.name):
                yield int(match[1]), entry.name


def read_record(path: str, number: int) -> RoundRecord:
    """Read the record of a round. Raises ValueError with the reason if it is invalid."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            data = os.read(file, PIECE)
            if len(data) == PIECE:  # rare: a buffer for the largest record would cost more than everything else
                data += os.read(file, MAX_BYTES + 1 - PIECE)
        finally:
            os.close(file)
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB")
    try:
        record = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is no whole record: {error}" if data.strip() else "it is empty") from None
    if record.num_iters != number:
        raise ValueError(f"it is a record of round {record.num_iters}")
    _check(record)
    return record


def _check(record: RoundRecord) -> None:
    """Raise ValueError for implausible numbers, so that no report fails on them."""
    counts = (record.num_iters, record.num_samples, record.bytes_sent, record.bytes_received)
    told = (record.total_time, record.compute, record.communicate, record.wait, record.accuracy)
    times = [seconds for seconds in told if seconds is not None]
    for step in record.time.values():
        times += step.values()
    if (
        any(not 0 <= count < MAX_COUNT for count in counts)
        or any(not 0 <= seconds < MAX_SECONDS for seconds in times)
        or not all(map(_is_number, record.time))
    ):
        raise ValueError("its numbers make no sense")


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) < 10
