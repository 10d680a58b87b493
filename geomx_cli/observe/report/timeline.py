"""One round of a run: which workers compute, evaluate, send and wait."""

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from geomx_cli.observe.report.record import RoundRecord, WorkerRecords
from geomx_cli.observe.report.run_records import RunRecords

__all__ = ["PHASES", "Round", "Span", "one_round"]

PHASES = ("computes", "evaluates", "sends", "waits")
MOST_ROUNDS = 200


@dataclass(frozen=True)
class Span:
    """An activity of a worker from `begin` to `end`, seconds since training began: one of PHASES. Sending may overlap
    with other activities.
    """

    begin: float
    end: float
    phase: str


@dataclass(frozen=True)
class Round:
    """The activities of the workers, by name, during round `number`, counted from 1, of `rounds`; of the worker `of`,
    if the workers do not have the same rounds, else that is "".
    """

    number: int
    rounds: int
    of: str
    workers: Mapping[str, Sequence[Span]]

    def __str__(self) -> str:
        return f"Round {self.number} of {self.rounds}{f' of {self.of}' if self.of else ''}"


def one_round(run: RunRecords) -> Round | None:
    """Return a round in the middle of the run, of the worker with the fewest rounds; None if its times are not
    recorded.
    """
    workers = {f"{host}/{name}": one for host, devices in run.workers.items() for name, one in devices.items()}
    fewest = min(len(worker.samples) for worker in workers.values())
    number = (fewest + 1) // 2
    alike = all(len(worker.samples) == fewest for worker in workers.values())
    slowest = next(name for name, worker in workers.items() if len(worker.samples) == fewest)
    spans = dict(_round(run, workers, slowest, number, alike=alike)) if number else {}
    return Round(number, fewest, "" if alike else slowest, spans) if spans else None


def _round(
    run: RunRecords, workers: Mapping[str, WorkerRecords], slowest: str, number: int, *, alike: bool
) -> Iterator[tuple[str, Sequence[Span]]]:
    starts = run.metadata.starts if run.metadata is not None else {}
    begin, end = (_end(workers[slowest], index) + starts.get(slowest, 0.0) for index in (number - 1, number))
    for name, worker in workers.items():
        elapsed, start = worker.elapsed, starts.get(name, 0.0)
        first = number - 1 if alike else bisect.bisect_right(elapsed, begin - start)
        last = number if alike else min(bisect.bisect_left(elapsed, end - start) + 1, len(elapsed), first + MOST_ROUNDS)
        spans: list[Span] = []
        for record in run.rounds(name, first + 1, last):
            if record.communicate is not None and record.wait is not None:
                spans += _spans(_end(worker, record.num_iters - 1), record, start)
        if spans:
            yield name, spans


def _end(worker: WorkerRecords, rounds: int) -> float:
    """Return the time when a worker completed `rounds` rounds, by its own count of seconds."""
    return worker.elapsed[rounds - 1] if 0 < rounds <= len(worker.elapsed) else 0.0


def _spans(begin: float, record: RoundRecord, start: float) -> Iterator[Span]:
    """Yield the steps, then the exchange, during which a part of the test set may be evaluated, and the wait for its
    end; `start` is added to the worker's own seconds.
    """
    end = record.total_time
    exchange = max(begin, end - (record.communicate or 0.0))
    waiting = max(exchange, end - (record.wait or 0.0))
    evaluated = min(waiting, exchange + sum(step.get("evaluation", 0.0) for step in record.time.values()))
    cuts = (begin, exchange, evaluated, waiting, end)
    for phase, first, last in zip(PHASES, cuts, cuts[1:], strict=False):
        if last > first:
            yield Span(start + first, start + last, phase)
