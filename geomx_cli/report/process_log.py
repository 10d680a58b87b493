"""What reports take from one process's event log."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from geomx_cli.events import Event, read_events
from geomx_cli.report.record import Record, Worker

__all__ = ["ProcessLog"]


@dataclass
class ProcessLog:
    """records: of its rounds, in order, where it is a worker that trains. problems: a sentence for each event that is
    damaged. training: when that began, Unix seconds; None where it has not.

    sent: (Unix seconds, bytes sent to other parties by then). peers: bytes sent to each process of another party.
    """

    records: list[Record] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    training: float | None = None
    sent: list[tuple[float, int]] = field(default_factory=list)
    peers: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "ProcessLog":
        """All of it. An accuracy goes into the record of the round whose weights were evaluated, that of the end into
        the last record.
        """
        log, rounds, accuracies = cls(), dict[int, Record](), dict[int, float]()
        try:
            for event, _ in read_events(path):
                try:
                    log._take(event, rounds, accuracies)
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    log.problems.append(f"{path}: an event {event.get('event')!r} in it is damaged: {error}")
        except OSError as error:
            log.problems.append(f"{path}: it cannot be read: {error.strerror}")
        for number, accuracy in accuracies.items():
            if number in rounds:
                rounds[number].accuracy = accuracy
        log.records = [record for _, record in sorted(rounds.items())]
        return log

    def worker(self) -> Worker:
        """Its rounds, as those of a worker of a trial."""
        worker = Worker(problems=list(self.problems))
        for record in self.records:
            worker.add(record)
        return worker

    def _take(self, event: Event, rounds: dict[int, Record], accuracies: dict[int, float]) -> None:
        match event["event"]:
            case "round":
                record = msgspec.convert({**event, "time": event["times"], "accuracy": None}, Record)
                rounds[record.num_iters] = record
            case "evaluation":
                accuracies[int(event["round"])] = float(event["accuracy"])
            case "finished" if rounds and event.get("accuracy") is not None:
                accuracies.setdefault(max(rounds), float(event["accuracy"]))
            case "state" if event["state"] == "training":
                self.training = float(event["time"])
            case "telemetry":
                counts = event["bytes"]
                self.sent.append((float(event["time"]), int(counts["wan"][0])))
                self.peers = {str(peer): int(pair[0]) for peer, pair in counts["peers"].items()}
