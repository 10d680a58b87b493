"""What reports take from one process's event log."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from geomx_cli.core.events import Event, read_events
from geomx_cli.observe.report.record import MAX_SECONDS, MOST_COUNTED, Record, Worker, check

__all__ = ["ProcessLog"]

MOST_COUNTS = 4096


@dataclass
class ProcessLog:
    """problems: a sentence for each event that is damaged. training: when that began, Unix seconds; None where it has
    not. accuracies: of the weights after each round that was evaluated. sent: (Unix seconds, bytes sent to other
    parties by then), of a long log not all. peers: bytes sent to each process of another party. epsilon: ESync's in the
    last round, seconds.

    Rounds are not kept, for there may be very many: `records` reads them.
    """

    path: Path
    process: str = ""
    problems: list[str] = field(default_factory=list)
    training: float | None = None
    accuracies: dict[int, float] = field(default_factory=dict)
    sent: list[tuple[float, int]] = field(default_factory=list)
    peers: Mapping[str, int] = field(default_factory=dict)
    last: int = 0
    epsilon: float | None = None

    @classmethod
    def read(cls, path: Path, process: str = "") -> "ProcessLog":
        """All but its rounds."""
        log = cls(path, process)
        for event in log._events():
            try:
                log._take(event)
            except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
                log._complain(event, error)
        return log

    def records(self) -> Iterator[Record]:
        """Its rounds, in order, where it is a worker that trains. An accuracy stands in the record of the round whose
        weights were evaluated, and that of the end in the last.
        """
        for event in self._events():
            if event.get("event") == "round":
                try:
                    accuracy = self.accuracies.get(event["num_iters"])
                    fields = {**event, "time": event["times"], "accuracy": accuracy, "evaluation_on_clock": True}
                    record = msgspec.convert(fields, Record)
                    check(record)
                except (KeyError, TypeError, ValueError) as error:
                    self._complain(event, error)
                else:
                    yield record

    def worker(self) -> Worker:
        """Its rounds, as those of a worker of a trial."""
        worker = Worker()
        for record in self.records():
            worker.add(record)
        worker.problems = list(self.problems)
        return worker

    def _events(self) -> Iterator[Event]:
        try:
            for event, _ in read_events(self.path):
                yield event
        except OSError as error:
            self._tell(f"its event log cannot be read: {error.strerror}")

    def _take(self, event: Event) -> None:
        match event["event"]:
            case "round":  # what is wrong with one `records` says
                self.last = event["num_iters"] if isinstance(event.get("num_iters"), int) else self.last
                self.epsilon = _within(event["epsilon"], MAX_SECONDS) if "epsilon" in event else self.epsilon
            case "evaluation":
                self.accuracies[int(event["round"])] = _within(event["accuracy"], 1.0)
            case "finished" if self.last and event.get("accuracy") is not None:
                self.accuracies[self.last] = _within(event["accuracy"], 1.0)
            case "state" if event["state"] == "training":
                self.training = _within(event["time"], MAX_SECONDS)
            case "telemetry":
                counts = event["bytes"]
                when, sent = _within(event["time"], MAX_SECONDS), int(_within(counts["wan"][0], MOST_COUNTED))
                self.sent.append((when, sent))
                self.peers = {str(peer): int(_within(pair[0], MOST_COUNTED)) for peer, pair in counts["peers"].items()}
                if len(self.sent) > MOST_COUNTS:
                    self.sent = self.sent[::2]

    def _complain(self, event: Event, error: Exception) -> None:
        self._tell(f"an event {event.get('event')!r} in its event log is damaged: {error}")

    def _tell(self, problem: str) -> None:
        sentence = f"{self.process or self.path}: {problem}"
        if sentence not in self.problems[-2:]:  # the log is read twice
            self.problems.append(sentence)


def _within(value: float, most: float) -> float:
    """A number from 0 to `most`. Raises ValueError for another one."""
    if not 0 <= value <= most:
        raise ValueError(f"{value!r:.40} is no number from 0 to {most:g}")
    return float(value)
