"""Data for reports from one process's event log."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from geomx_cli.core import events
from geomx_cli.core.conventions import life_of
from geomx_cli.core.events import Event, Reported, RoundCompleted, Sent, Telemetry, Traffic
from geomx_cli.core.jsonlines import read_objects
from geomx_cli.core.untrusted import first_line
from geomx_cli.jobs.view.reducer import ProcessState
from geomx_cli.observe.report.goodput import Goodput
from geomx_cli.observe.report.record import RoundRecord
from geomx_cli.plan import Process

__all__ = ["ProcessLog"]

MOST_COUNTS = 4096


@dataclass
class ProcessLog:
    """Data from one process's event log. It lacks the rounds, because they may be very many: `records` reads them.

    state: the process's state after all its events.
    sent: (time, cumulative bytes sent to other parties) each time that these had grown, subsampled for long logs.
    counts_sent: whether the bytes were counted at all.
    problems: a sentence for each damaged event.
    repeated: the number of the first round of each later life of the worker, oldest first.
    goodput: of a training worker.
    """

    path: Path
    state: ProcessState
    sent: list[tuple[float, int]] = field(default_factory=list)
    counts_sent: bool = False
    problems: list[str] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)
    goodput: Goodput = field(default_factory=Goodput)
    _life: int = 0
    _before: int = 0  # bytes that earlier lives of the process have sent

    @classmethod
    def read(cls, path: Path, process: Process) -> "ProcessLog":
        """Read everything but the rounds."""
        log, last = cls(path, ProcessState(process)), 0
        for event in log._events(log._complain):
            log.state.apply(event, event.time)
            log.goodput.add(event)
            if isinstance(event, RoundCompleted):
                if event.num_iters <= last:
                    log.repeated.append(event.num_iters)
                last = event.num_iters
            if isinstance(event, Sent):
                log._note_sent(event, event.wan)
            elif isinstance(event, Telemetry) and event.bytes is not None:
                log._note_sent(event, event.bytes.wan[0])
        return log

    def records(self) -> Iterator[RoundRecord]:
        """Yield a training worker's rounds in order. An accuracy or validation loss is in the record of the round whose
        weights were evaluated. The final one is in the last record. A script has no rounds. Its reports are its
        records, numbered from 1, with the bytes that telemetry had counted by then.
        """
        if self.state.first_step is None:
            yield from self._reports()
            return
        accuracies, finished = dict(self.state.evaluations), self.state.finished
        if finished is not None and finished.accuracy is not None:
            accuracies[self.state.round] = finished.accuracy
        losses = dict(self.state.validation_losses)
        if finished is not None and finished.validation_loss is not None:
            losses[self.state.round] = finished.validation_loss
        for event in self._last_of_rounds():
            yield RoundRecord.of(event, accuracies.get(event.num_iters), losses.get(event.num_iters))

    def _last_of_rounds(self) -> Iterator[RoundCompleted]:
        """The last event of each round. The events of a worker's life end where a later life continues."""
        last, life = 0, 0
        ends = [min(self.repeated[index:]) for index in range(len(self.repeated))]
        for event in self._events(lambda problem: None):  # `read` has reported them already
            if isinstance(event, RoundCompleted):
                life, last = life + (event.num_iters <= last), event.num_iters
                if life >= len(ends) or event.num_iters < ends[life]:
                    yield event

    def _note_sent(self, event: Event, count: int) -> None:
        """Add the count of an event if it is higher than the last count. Each life of the process counts from 0."""
        self.counts_sent = True
        last = self.sent[-1][1] if self.sent else 0
        if (life := life_of(event.number)) > self._life:
            self._life, self._before = life, last
        if self._before + count <= last:
            return
        self.sent.append((event.time, self._before + count))
        if len(self.sent) > MOST_COUNTS:
            self.sent = self.sent[1::2]  # with the last one

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
