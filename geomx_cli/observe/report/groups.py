"""Groups of runs, over which reports average."""

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from geomx_cli.core import plugins
from geomx_cli.core.conventions import shell_name
from geomx_cli.core.errors import UsageError
from geomx_cli.core.option import did_you_mean
from geomx_cli.core.options import text_of, with_usual_rate
from geomx_cli.observe.report.modes import place_of, title
from geomx_cli.observe.report.record import RoundRecord, WorkerRecords
from geomx_cli.observe.report.run_records import RunRecords

__all__ = [
    "Curve", "Mean", "PHASES", "Round", "RunGroup", "Span", "grouped", "mean_curve", "mean_of", "not_in_means",
    "one_round", "settings",
]  # fmt: skip

# One round of a run: which workers compute, evaluate, send and wait at what time.

PHASES = ("computes", "evaluates", "sends", "waits")
MOST_ROUNDS = 200


@dataclass(frozen=True)
class Span:
    """An activity of a worker from `begin` to `end`, in seconds since training began. It is one of PHASES. Sending may
    overlap with other activities.
    """

    begin: float
    end: float
    phase: str


@dataclass(frozen=True)
class Round:
    """The activities of the workers, by name, during one round.

    number: the round's number, counted from 1.
    rounds: the number of rounds.
    of: the worker whose round it is, if the workers do not have the same rounds; otherwise "".
    """

    number: int
    rounds: int
    of: str
    workers: Mapping[str, Sequence[Span]]

    def __str__(self) -> str:
        return f"Round {self.number} of {self.rounds}{f' of {self.of}' if self.of else ''}"


def one_round(run: RunRecords) -> Round | None:
    """Return a round in the middle of the run, of the worker with the fewest rounds. None if the round's times are not
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
    """Yield the steps, then the exchange, during which a part of the test set may be evaluated, and then the wait for
    the exchange. `start` is added to the worker's own seconds.
    """
    end = record.total_time
    exchange = max(begin, end - (record.communicate or 0.0))
    waiting = max(exchange, end - (record.wait or 0.0))
    evaluated = min(waiting, exchange + sum(step.get("evaluation", 0.0) for step in record.time.values()))
    cuts = (begin, exchange, evaluated, waiting, end)
    for phase, first, last in zip(PHASES, cuts, cuts[1:], strict=False):
        if last > first:
            yield Span(start + first, start + last, phase)


# Means and standard deviations over the runs of a group: of numbers, and of curves.

MOST_POINTS = 500

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Mean:
    """The mean over n runs; sd: the sample standard deviation, None for one run."""

    value: float
    sd: float | None
    n: int


@dataclass(frozen=True)
class Curve:
    """y over x, of one run, or the mean of n runs with the standard deviation at each x.

    cut: whether some runs continue beyond the curve's end, which is where the first run ends.
    """

    x: Sequence[float]
    y: Sequence[float]
    sd: Sequence[float] | None = None
    n: int = 1
    cut: bool = False


def mean_of(values: Iterable[float | None]) -> Mean | None:
    """Return the mean of the finite values; None if there are none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    return Mean(float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else None, len(known))


def mean_curve(runs: Sequence[Points]) -> Curve:
    """Return the mean of the runs' curves, with points sorted by x. The mean of a single run is the run.

    Each curve is interpolated linearly at the x of all curves' points (evenly thinned if there are very many), between
    the last first x and the first last x: where all runs have values. If there is no such x, for example because each
    run has only one point, the mean is one point: the mean of the runs' last points, in x and y.
    """
    if len(runs) == 1:
        return Curve([x for x, _ in runs[0]], [y for _, y in runs[0]])
    begin, end = max(points[0][0] for points in runs), min(points[-1][0] for points in runs)
    if begin >= end:
        xs, ys = ([points[-1][axis] for points in runs] for axis in (0, 1))
        return Curve([float(np.mean(xs))], [float(np.mean(ys))], [float(np.std(ys, ddof=1))], len(runs))
    grid = np.unique([begin, end, *(x for points in runs for x, _ in points if begin < x < end)])
    if len(grid) > MOST_POINTS:
        grid = grid[np.unique(np.linspace(0, len(grid) - 1, MOST_POINTS).round().astype(int))]
    matrix = np.array([np.interp(grid, [x for x, _ in points], [y for _, y in points]) for points in runs])
    means, sds = matrix.mean(axis=0), matrix.std(axis=0, ddof=1)
    cut = any(points[-1][0] > end for points in runs)
    return Curve(grid.tolist(), means.tolist(), sds.tolist(), len(runs), cut)


_ALIASES = {"codec": "compress", "job": "run", "mode": "algo"}
_NAMES = {"compress": "codec", "run": "job"}  # the names that users write
_IGNORED_SETTINGS = ("seed", "data_dir", "run", "algo")  # these divide runs into groups only on request
_LONGEST = 40
UNSURE = "see warnings"
"""Added to labels of runs whose figures may not represent their algorithm."""


@dataclass(frozen=True)
class RunGroup:
    """Runs of one script (or network of the bundled training) under one mode.

    differs: the values of the settings by which it differs from other groups of its mode.
    number: its place among these groups.
    network: set if the groups have several networks.
    unfinished: for a run that is not done, which is a group by itself; see RunRecords.unfinished.
    """

    mode: str
    number: int
    differs: Mapping[str, str]
    runs: tuple[RunRecords, ...]
    network: str = ""
    suffix: str = ""
    unfinished: str = ""

    @property
    def label(self) -> str:
        """The label, as in "HFA, seed 2"."""
        words = {name.replace("_", "-"): value for name, value in self.differs.items()}
        parts = [f"{name} {_short(value)}" if value else f"no {name}" for name, value in words.items()]
        if any(run.warnings for run in self.runs):
            parts.append(UNSURE)
        text = ", ".join([title(self.mode), *parts]) + self.suffix
        return f"{self.network}: {text}" if self.network else text

    @property
    def name(self) -> str:
        """The name for files, as in "hfa-seed-2"."""
        parts = [f"-{name.replace('_', '-')}-{_short(value)}" for name, value in self.differs.items()]
        network = f"{self.network}-" if self.network else ""
        return shell_name(f"{network}{self.mode}{''.join(parts)}{self.suffix.replace(', ', '-')}")


def grouped(runs: Iterable[RunRecords], by: Sequence[str] = ()) -> list[RunGroup]:
    """Divide runs into groups by their mode and the settings `by`. Without `by`, use all settings in which runs of a
    mode differ, except the seed. A run that is not done is a group by itself, after all others.

    Runs of different scripts, versions of a script, networks or modes are never in one group. Nor are runs of which no
    settings are known. A run that is listed twice counts once. Raises UsageError for a setting that no run has.
    """
    unique = list({run.name: run for run in runs}.values())
    wanted = [_ALIASES.get(name, name) for name in (name.strip().replace("-", "_") for name in by) if name]
    _check(wanted, unique)
    kinds: dict[tuple[str, ...], list[RunRecords]] = {}
    for run in sorted(unique, key=lambda run: (run.network, place_of(run.mode))):
        kinds.setdefault(_kind(run), []).append(run)
    found = [group for alike in kinds.values() for group in _divided(alike, wanted)]
    networks = {run.network for run in unique}
    if len(networks) > 1:
        found = [replace(group, network=group.runs[0].network) for group in found]
    return _unique(sorted(found, key=lambda group: bool(group.unfinished)))


def not_in_means(groups: Iterable[RunGroup]) -> str:
    """Return a sentence that names the runs that are not done, as in "not in the means: 20260729-17 (failed)". "" if
    all are done.
    """
    left = [f"{run.name} ({group.unfinished})" for group in groups if group.unfinished for run in group.runs]
    return f"not in the means: {', '.join(left)}" if left else ""


def settings(run: RunRecords) -> dict[str, str]:
    """Return the settings by which runs can be grouped: the options that affect the run's algorithm, the script's
    arguments, the topology and the job.
    """
    if run.metadata is None:
        return {"run": run.name}
    _, arguments = _split(run.metadata.script)
    options = run.metadata.options if run.metadata.script else with_usual_rate(run.metadata.options)
    algorithm = str(options.get("algo", ""))
    known = {name: text_of(value) for name, value in options.items() if plugins.affects(name, algorithm)}
    more = {"algo": run.mode, "topology": run.metadata.topology, "run": run.name}
    return {**known, **more, "args": " ".join(arguments)}


def _check(wanted: Sequence[str], runs: Sequence[RunRecords]) -> None:
    known = [settings(run) for run in runs]
    keys = sorted({key for one in known for key in one})
    for name in wanted:
        if name not in keys:
            # A setting that only some algorithms have is no difference between runs.
            differing = [key for key in keys if len({one[key] for one in known if key in one}) > 1]
            hint = f"they differ in {', '.join(map(_written, differing))}" if differing else "all settings are equal"
            near = did_you_mean(name, map(_written, keys))
            raise UsageError(f"--group-by {_written(name)}: no run has such a setting", near or hint)


def _written(key: str) -> str:
    return _NAMES.get(key, key).replace("_", "-")


def _kind(run: RunRecords) -> tuple[str, ...]:
    """Return the settings that all runs of a group have in common."""
    if run.metadata is None:
        return run.network, run.mode, str(run.folder)
    program, _ = _split(run.metadata.script)
    return run.network, run.mode, run.metadata.script_digest or " ".join(program)


def _split(script: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return a script's command up to the script, and its arguments."""
    end = next((place for place, word in enumerate(script, 1) if word.endswith(".py")), 1)
    return script[:end], script[end:]


def _divided(runs: Sequence[RunRecords], wanted: Sequence[str]) -> list[RunGroup]:
    known = [settings(run) for run in runs]
    differing = [
        name for name in dict.fromkeys(key for one in known for key in one)
        if len({one.get(name, "") for one in known}) > 1
    ]  # fmt: skip
    keys = [name for name in (wanted or differing) if name in differing and (wanted or name not in _IGNORED_SETTINGS)]
    found: dict[tuple[str, ...], list[RunRecords]] = {}
    for run, one in zip(runs, known, strict=True):
        found.setdefault(tuple(one.get(name, "") for name in keys), []).append(run)
    ordered = sorted(found.items(), key=lambda item: [(len(value), value) for value in item[0]])  # 2 before 10
    return [
        part
        for values, alike in ordered
        for part in _by_outcome(RunGroup(alike[0].mode, 0, dict(zip(keys, values, strict=True)), tuple(alike)))
    ]


def _by_outcome(group: RunGroup) -> Iterator[RunGroup]:
    """Yield the group's finished runs together, and each other run by itself."""
    if done := tuple(run for run in group.runs if not run.unfinished):
        yield replace(group, runs=done)
    for run in group.runs:
        if run.unfinished:
            suffix = f", {run.name} ({run.unfinished})"
            yield replace(group, runs=(run,), unfinished=run.unfinished, suffix=suffix)


def _unique(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Add the first run's name to labels that would be equal, for example with two versions of a script."""
    labels = Counter(group.label for group in groups)
    numbers = Counter[str]()
    found = []
    for group in groups:
        suffix = f" ({group.runs[0].name})" if labels[group.label] > 1 else group.suffix
        found.append(replace(group, number=numbers[group.mode], suffix=suffix))
        numbers[group.mode] += 1
    return found


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST else value[: _LONGEST - 1] + "…"
