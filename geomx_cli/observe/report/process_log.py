"""Data for reports from one process's event log."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from geomx_cli.core import events
from geomx_cli.core.events import Event, Reported, RoundCompleted, Telemetry, Traffic
from geomx_cli.core.jsonlines import read_objects
from geomx_cli.core.untrusted import first_line
from geomx_cli.jobs.view.reducer import ProcessState
from geomx_cli.observe.report.record import RoundRecord
from geomx_cli.plan import Process

__all__ = ["ProcessLog"]

MOST_COUNTS = 4096


@dataclass
class ProcessLog:
    """state: the process's state after all its events. sent: (Unix seconds, cumulative bytes sent to other parties),
    subsampled for long logs. problems: a sentence per damaged event.

    Rounds are not kept, as there may be very many: `records` reads them.
    """

    path: Path
    state: ProcessState
    sent: list[tuple[float, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, process: Process) -> "ProcessLog":
        """Read everything but the rounds."""
        log = cls(path, ProcessState(process))
        for event in log._events(log._complain):
            log.state.take(event, event.time)
            if isinstance(event, Telemetry) and event.bytes is not None:
                log.sent.append((event.time, event.bytes.wan[0]))
                if len(log.sent) > MOST_COUNTS:
                    log.sent = log.sent[::2]
        return log

    def records(self) -> Iterator[RoundRecord]:
        """Yield a training worker's rounds in order. An accuracy is in the record of the round whose weights were
        evaluated, the final one in the last record. A script has no rounds: its reports are its records, numbered from
        1, with the bytes that telemetry has counted by then.
        """
        if self.state.first_round is None:
            yield from self._reports()
            return
        accuracies, finished = dict(self.state.evaluations), self.state.finished
        if finished is not None and finished.accuracy is not None:
            accuracies[self.state.round] = finished.accuracy
        for event in self._events(lambda problem: None):  # `read` has reported them already
            if isinstance(event, RoundCompleted):
                yield RoundRecord.of(event, accuracies.get(event.num_iters))

    def _reports(self) -> Iterator[RoundRecord]:
        counts, samples, number = Traffic(), 0, 0
        before = (0, 0)
        for event in self._events(lambda problem: None):
            if isinstance(event, Telemetry) and event.bytes is not None:
                counts = event.bytes
            elif isinstance(event, Reported):
                number += 1
                total = counts.lan[0] + counts.wan[0], counts.lan[1] + counts.wan[1]
                sent, received = (max(0, now - old) for now, old in zip(total, before, strict=True))
                yield RoundRecord.reported(number, event, max(0, event.samples - samples), sent, received)
                before, samples = total, max(samples, event.samples)

    def _events(self, complain: Callable[[str], None]) -> Iterator[Event]:
        try:
            for fields, _ in read_objects(self.path):
                try:
                    event = events.parse(fields)
                except ValueError as error:
                    kind = str(fields.get("event"))
                    complain(f"an event {kind!r} in its event log is damaged: {first_line(error)}")
                else:
                    if event is not None:
                        yield event
        except OSError as error:
            complain(f"its event log cannot be read: {error.strerror}")

    def _complain(self, problem: str) -> None:
        sentence = f"{self.state.process.name}: {problem}"
        if sentence not in self.problems[-1:]:
            self.problems.append(sentence)
