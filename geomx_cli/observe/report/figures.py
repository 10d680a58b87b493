"""The figures of a network's trials: their numbers, independent of drawing.

Nothing is smoothed. Modes have the same order, and thus color, in every figure.
"""

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from geomx_cli.core import plugins
from geomx_cli.observe.report.record import RoundRecord, WorkerRecords, read_record
from geomx_cli.observe.report.run_records import NON_IID, RunRecords, place_of
from geomx_cli.observe.report.summary import Summary

__all__ = ["Bars", "Curves", "Figure", "Matrix", "Span", "Timeline", "of"]

PHASES = ("computes", "evaluates", "sends", "waits")
MOST_ROUNDS = 200
SHORT = 180.0  # seconds; axes of shorter trials are in seconds


@dataclass(frozen=True)
class Curves:
    """Lines of (x, y), by mode. `level`: a horizontal reference line, None for none."""

    name: str
    title: str
    x: str
    y: str
    curves: Mapping[str, Sequence[tuple[float, float]]]
    level: float | None = None


@dataclass(frozen=True)
class Bars:
    """Values by mode, each with the label of its bar ("" if a mode has only one)."""

    name: str
    title: str
    y: str
    bars: Mapping[str, Sequence[tuple[str, float]]]


@dataclass(frozen=True)
class Span:
    """An activity of a worker from `begin` to `end`, seconds since training began: one of PHASES. Sending may overlap
    with other activities.
    """

    begin: float
    end: float
    phase: str


@dataclass(frozen=True)
class Timeline:
    """One round of a trial, by worker."""

    name: str
    title: str
    workers: Mapping[str, Sequence[Span]]


@dataclass(frozen=True)
class Matrix:
    """Megabytes from each party (rows) to each (columns)."""

    name: str
    title: str
    parties: Sequence[str]
    megabytes: Sequence[Sequence[float]]


Figure = Curves | Bars | Timeline | Matrix


def of(network: str, trials: Sequence[RunRecords], target: float) -> Iterator[Figure]:
    """Yield all figures that these trials of a network have data for."""
    ordered = sorted(trials, key=lambda trial: place_of(trial.mode))
    alike = [trial for trial in ordered if not trial.mode.endswith(NON_IID)]
    unlike = [trial for trial in ordered if trial.mode.endswith(NON_IID)]
    summaries = {trial.mode: Summary.of(trial, target, parity=False) for trial in ordered}
    for name, which, data in (("accuracy", alike, "i.i.d."), ("accuracy-niid", unlike, "non-i.i.d.")):
        unit, scale = ("minutes", 60.0) if _longest(which) > SHORT else ("seconds", 1.0)
        curves = _curves(which, lambda trial, seconds, scale=scale: seconds / scale)
        if curves:
            title = f"Test accuracy of {network} on {data} data"
            yield Curves(name, title, f"time ({unit})", "test accuracy", curves, _standalone(which))
    counted = [trial for trial in ordered if trial.metadata is not None and trial.metadata.seconds]
    curves = _curves(counted, _wan_megabytes_until)
    if curves:
        title = f"Test accuracy of {network} by traffic"
        yield Curves("bytes", title, "between parties (MB, both ways)", "test accuracy", curves)
    yield _bars("throughput", f"Data throughput of {network}", "samples per second", summaries, "samples_per_s")
    yield _bars("traffic", f"Traffic of {network}'s workers", "MB per second, both ways", summaries, "traffic")
    yield Bars(
        "computing", f"Computing time ratio of {network}", "part of the time",
        {trial.mode: [(name, _busy(trial, name)) for name in _names(trial)] for trial in ordered},
    )  # fmt: skip
    for trial in ordered:
        workers = dict(_round(trial))
        if workers:
            yield Timeline(f"timeline-{trial.mode}", f"One round of {network}, {trial.title}", workers)
        if trial.metadata is not None and any(trial.metadata.traffic.values()):
            yield _matrix(network, trial)


def _curves(
    trials: Sequence[RunRecords], x: Callable[..., float]
) -> dict[str, Sequence[tuple[float, float]]]:
    return {
        trial.mode: [(x(trial, seconds), accuracy) for seconds, accuracy in trial.evaluator.accuracies]
        for trial in trials
        if trial.evaluator.accuracies
    }


def _longest(trials: Sequence[RunRecords]) -> float:
    return max((trial.evaluator.seconds for trial in trials), default=0.0)


def _wan_megabytes_until(trial: RunRecords, seconds: float) -> float:
    """Return the megabytes between parties up to that time."""
    sent = trial.metadata.bytes_by(seconds) if trial.metadata is not None else None
    return (sent or 0) / 1e6


def _standalone(trials: Sequence[RunRecords]) -> float | None:
    """Return the final accuracy of a single worker, if that was tried too."""
    standalone = [name for name, algorithm in plugins.algorithms().items() if algorithm.standalone]
    for trial in trials:
        if trial.mode.removesuffix(NON_IID) in standalone and trial.evaluator.accuracies:
            return trial.evaluator.accuracies[-1][1]
    return None


def _bars(name: str, title: str, y: str, summaries: Mapping[str, Summary], field: str) -> Bars:
    return Bars(name, title, y, {mode: [("", getattr(summary, field))] for mode, summary in summaries.items()})


def _names(trial: RunRecords) -> list[str]:
    return [f"{host}/{device}" for host, devices in trial.workers.items() for device in devices]


def _busy(trial: RunRecords, name: str) -> float:
    worker = _worker(trial, name)
    return worker.compute / worker.seconds if worker.seconds else 0.0


def _round(trial: RunRecords) -> Iterator[tuple[str, Sequence[Span]]]:
    """Yield each worker's activity during one round, in the middle of the trial, of the worker with the fewest rounds;
    if all have the same rounds, that is a common round.
    """
    fewest = min(len(worker.samples) for worker in trial.each())
    number = (fewest + 1) // 2
    if not number:
        return
    starts = trial.metadata.starts if trial.metadata is not None else {}
    alike = all(len(worker.samples) == fewest for worker in trial.each())
    slowest = next(name for name in _names(trial) if len(_worker(trial, name).samples) == fewest)
    begin, end = (_end(trial, slowest, index) + starts.get(slowest, 0.0) for index in (number - 1, number))
    for name in _names(trial):
        elapsed, start = _worker(trial, name).elapsed, starts.get(name, 0.0)
        first = number - 1 if alike else bisect.bisect_right(elapsed, begin - start)
        last = number if alike else min(bisect.bisect_left(elapsed, end - start) + 1, len(elapsed), first + MOST_ROUNDS)
        spans: list[Span] = []
        for index in range(first, last):
            record = _record(trial.folder / name, index + 1)
            if record is not None and record.communicate is not None and record.wait is not None:
                spans += _spans(_end(trial, name, index), record, start)
        if spans:
            yield name, spans


def _worker(trial: RunRecords, name: str) -> WorkerRecords:
    host, device = name.split("/", 1)
    return trial.workers[host][device]


def _end(trial: RunRecords, name: str, rounds: int) -> float:
    """Return the time when a worker completed `rounds` rounds, by its own count of seconds."""
    return _worker(trial, name).elapsed[rounds - 1] if rounds else 0.0


def _record(folder: Path, number: int) -> RoundRecord | None:
    try:
        return read_record(f"{folder}/iter-{number}.txt", number)
    except ValueError:
        return None


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


def _matrix(network: str, trial: RunRecords) -> Matrix:
    assert trial.metadata is not None
    traffic = trial.metadata.traffic
    parties = list(traffic)
    rows = [[traffic[sender].get(receiver, 0) / 1e6 for receiver in parties] for sender in parties]
    return Matrix(f"matrix-{trial.mode}", f"Traffic between parties: {network}, {trial.title}", parties, rows)
