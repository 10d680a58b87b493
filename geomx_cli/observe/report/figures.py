"""The figures of groups of runs: their numbers, independent of drawing.

Nothing is smoothed, and unknown values are left out. Groups have the same order, and thus colour, in every figure.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from geomx_cli.core import plugins
from geomx_cli.core.conventions import shell_name
from geomx_cli.core.events import VALIDATION_LOSS
from geomx_cli.observe.report.groups import PHASES, Curve, Mean, RunGroup, Span, mean_curve, mean_of, one_round
from geomx_cli.observe.report.modes import NON_IID
from geomx_cli.observe.report.run_records import RunRecords
from geomx_cli.observe.report.summary import Summary

__all__ = [
    "Bars", "Curves", "Figure", "Figures", "LOSS", "Matrix", "Series", "Timeline", "metric_curve", "metric_names",
    "of",
]  # fmt: skip

# Curves of the loss and of scripts' own metrics over time, from a run's records.

LOSS = "loss"
"""The name of the loss. No metric has this name."""


def metric_names(run: RunRecords) -> list[str]:
    """Return the names of the metrics that its workers' scripts have reported."""
    return sorted({name for worker in run.each() for name in worker.metrics})


def metric_curve(run: RunRecords, name: str) -> Sequence[tuple[float, float]]:
    """Return (seconds, value) of LOSS or of a metric: the mean of the workers' curves over the time in which all of
    them have values; see mean_curve. Leaves out values that are not finite, and workers without any.
    """
    columns = [worker.losses if name == LOSS else worker.metrics.get(name) for worker in run.each()]
    curves = [
        sorted(point for point in zip(*column, strict=True) if math.isfinite(point[1]))
        for column in columns
        if column is not None
    ]
    known = [points for points in curves if points]
    if not known:
        return []
    mean = mean_curve(known)
    return list(zip(mean.x, mean.y, strict=True))


ACCURACY = "test accuracy"
VALIDATION = "validation loss"
SHORT = 180.0  # seconds; axes of shorter runs are in seconds


@dataclass(frozen=True)
class Series:
    """A group in a figure. Its label, its mode, and its number among the groups of this mode define its look."""

    label: str
    mode: str
    number: int = 0


@dataclass(frozen=True)
class Curves:
    """Curves, by series. `level`: a horizontal reference line, None for none."""

    name: str
    title: str
    x: str
    y: str
    curves: Mapping[Series, Curve]
    level: float | None = None

    @property
    def note(self) -> str:
        """A note that a reader of the curves needs; "" for none."""
        return "means until the first run ends" if any(curve.cut for curve in self.curves.values()) else ""

    @property
    def is_accuracy(self) -> bool:
        """Whether y is the test accuracy."""
        return self.y == ACCURACY


@dataclass(frozen=True)
class Bars:
    """Values by series, each with the label of its bar ("" if a series has only one)."""

    name: str
    title: str
    y: str
    bars: Mapping[Series, Sequence[tuple[str, Mean]]]


@dataclass(frozen=True)
class Timeline:
    """One round of a run, by worker."""

    name: str
    title: str
    workers: Mapping[str, Sequence[Span]]

    @property
    def phases(self) -> Sequence[str]:
        """The phases in PHASES that occur."""
        found = {span.phase for spans in self.workers.values() for span in spans}
        return [phase for phase in PHASES if phase in found]


@dataclass(frozen=True)
class Matrix:
    """Megabytes from each party (rows) to each party (columns), as the mean over the runs of a group."""

    name: str
    title: str
    parties: Sequence[str]
    megabytes: Sequence[Sequence[float]]


Figure = Curves | Bars | Timeline | Matrix


@dataclass
class Figures:
    """The figures.

    found: the figures for which there is data.
    missing: by name, why the others cannot be made.
    groups: the groups that the figures show.
    """

    found: list[Figure] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    groups: Sequence[RunGroup] = ()

    def add(self, name: str, figure: Figure | str, groups: Sequence[RunGroup] = ()) -> None:
        """Add a figure, or the reason why there is none. `groups`: the groups that should have a series in it."""
        if isinstance(figure, str):
            self.missing[name] = figure
            return
        self.found.append(figure)
        if isinstance(figure, Curves | Bars):
            shown = figure.curves if isinstance(figure, Curves) else figure.bars
            for group in groups:
                if _series(group) not in shown:
                    self.missing[f"{name} of {group.label}"] = "nothing of it is recorded"


def of(what: str, groups: Sequence[RunGroup], metrics: Sequence[str] = ()) -> Figures:
    """Return all figures of these groups of runs. `what`: the network or script, for titles. `metrics`: of scripts."""
    figures = Figures(groups=groups)
    has_loss = any(VALIDATION_LOSS in metric_names(run) for group in groups for run in group.runs)
    scored = not has_loss or any(run.evaluator.accuracies for group in groups for run in group.runs)
    alike = [group for group in groups if not group.mode.endswith(NON_IID)]
    unlike = [group for group in groups if group.mode.endswith(NON_IID)]
    for name, which, data in (("accuracy", alike, "i.i.d."), ("accuracy-niid", unlike, "non-i.i.d.")):
        if which and scored:
            unit, scale = ("minutes", 60.0) if _longest(which) > SHORT else ("seconds", 1.0)
            of_scripts = any(run.metadata and run.metadata.script for group in which for run in group.runs)
            title, x = f"Test accuracy of {what}" + ("" if of_scripts else f" on {data} data"), f"time ({unit})"
            curves = _curves(which, lambda run, seconds, scale=scale: seconds / scale)
            figures.add(name, _accuracy(name, title, x, curves, _standalone(which)), which)
    x = "between parties (MB, both ways)"
    if scored:
        title, curves = f"Test accuracy of {what} by traffic", _curves(groups, _wan_megabytes_until)
        figures.add("bytes", _accuracy("bytes", title, x, curves), groups)
    else:
        figures.add("bytes", _loss_by_traffic(f"Validation loss of {what} by traffic", x, groups), groups)
    names = {LOSS: (LOSS, "Training loss"), VALIDATION_LOSS: ("validation-loss", "Validation loss")}
    for metric in dict.fromkeys((LOSS, *([VALIDATION_LOSS] if has_loss else []), *metrics)):
        name, title = names.get(metric, (f"metric-{shell_name(metric)}", metric))
        figures.add(name, _metric(name, f"{title} of {what}", metric, groups), groups)
    summaries = {_series(group): [Summary.of(run, 1.0, parity=False) for run in group.runs] for group in groups}

    def bars(name: str, title: str, y: str, attribute: str, why: str) -> None:
        means = {series: mean_of(getattr(one, attribute) for one in known) for series, known in summaries.items()}
        found = {series: [("", mean)] for series, mean in means.items() if mean is not None}
        figures.add(name, Bars(name, title, y, found) if found else why, groups)

    title, why = f"Data throughput of {what}", "no run has recorded a round, and no script has called geomx.report"
    bars("throughput", title, "samples per second", "samples_per_s", why)
    bars("traffic", f"Traffic of {what}'s workers", "MB per second, both ways", "traffic", "no record has bytes")
    busy = {_series(group): found for group in groups if (found := list(_busy(group)))}
    title = f"Computing time ratio of {what}"
    why = "no record has the time of computing"
    figures.add("computing", Bars("computing", title, "part of the time", busy) if busy else why, groups)
    for group in groups:
        figures.add(f"timeline-{group.name}", _timeline(what, group))
        figures.add(f"matrix-{group.name}", _matrix(what, group))
    return figures


def _series(group: RunGroup) -> Series:
    return Series(group.label, group.mode, group.number)


def _accuracy(
    name: str, title: str, x: str, curves: Mapping[Series, Curve] | str, level: float | None = None
) -> Curves | str:
    return curves if isinstance(curves, str) else Curves(name, title, x, ACCURACY, curves, level)


def _curves(groups: Sequence[RunGroup], x: Callable[..., float | None]) -> dict[Series, Curve] | str:
    """Return the accuracies of each group over `x` of a run and its seconds, or the reason why there are none."""
    found: dict[Series, Curve] = {}
    why = "no test accuracy was recorded"
    for group in groups:
        points = [
            [(at, accuracy) for seconds, accuracy in run.evaluator.accuracies if (at := x(run, seconds)) is not None]
            for run in group.runs
        ]
        if any(run.evaluator.accuracies for run in group.runs) and not any(points):
            why = "no run with a test accuracy has recorded its traffic between parties"
        if known := [one for one in points if one]:
            found[_series(group)] = mean_curve(known)
    return found or why


def _loss_by_traffic(title: str, x: str, groups: Sequence[RunGroup]) -> Curves | str:
    """Return the figure of the validation loss over the megabytes between parties, or the reason why there is none."""
    found: dict[Series, Curve] = {}
    for group in groups:
        points = [
            [(at, loss) for seconds, loss in metric_curve(run, VALIDATION_LOSS)
             if (at := _wan_megabytes_until(run, seconds)) is not None]
            for run in group.runs
        ]  # fmt: skip
        if known := [one for one in points if one]:
            found[_series(group)] = mean_curve(known)
    if not found:
        return "no run with a validation loss has recorded its traffic between parties"
    return Curves("bytes", title, x, VALIDATION, found)


def _metric(name: str, title: str, metric: str, groups: Sequence[RunGroup]) -> Curves | str:
    """Return the figure of LOSS or of a script's metric over time, or the reason why there is none."""
    unit, scale = ("minutes", 60.0) if _longest(groups) > SHORT else ("seconds", 1.0)
    found: dict[Series, Curve] = {}
    for group in groups:
        points = [[(seconds / scale, value) for seconds, value in metric_curve(run, metric)] for run in group.runs]
        known = [one for one in points if one]
        if known:
            found[_series(group)] = mean_curve(known)
    if not found:
        return f"no run has recorded {'a loss' if metric == LOSS else metric}"
    y = VALIDATION if metric == VALIDATION_LOSS else f"{metric}, mean over workers"
    return Curves(name, title, f"time ({unit})", y, found)


def _longest(groups: Sequence[RunGroup]) -> float:
    return max((run.evaluator.seconds for group in groups for run in group.runs), default=0.0)


def _wan_megabytes_until(run: RunRecords, seconds: float) -> float | None:
    """Return the megabytes between parties up to that time; None if unknown."""
    sent = run.wan_bytes_by(seconds)
    return None if sent is None else sent / 1e6


def _standalone(groups: Sequence[RunGroup]) -> float | None:
    """Return the final accuracy of a single worker, if such a run exists."""
    standalone = [name for name, algorithm in plugins.algorithms().items() if algorithm.standalone]
    for group in groups:
        if group.mode.removesuffix(NON_IID) in standalone and not group.unfinished:
            last = [run.evaluator.accuracies[-1][1] for run in group.runs if run.evaluator.accuracies]
            return mean.value if (mean := mean_of(last)) is not None else None
    return None


def _busy(group: RunGroup) -> Iterator[tuple[str, Mean]]:
    """Yield the computing part of each worker of a group's runs."""
    parts: dict[str, list[float | None]] = {}
    for run in group.runs:
        for host, devices in run.workers.items():
            for device, worker in devices.items():
                parts.setdefault(f"{host}/{device}", []).append(worker.busy)
    for name, values in parts.items():
        if (mean := mean_of(values)) is not None:
            yield name, mean


def _timeline(what: str, group: RunGroup) -> Timeline | str:
    run = group.runs[0]
    shown = one_round(run)
    of_which = f", run {run.name}" if len(group.runs) > 1 else ""
    if shown is None:
        return "the times of its rounds are not recorded"
    return Timeline(f"timeline-{group.name}", f"{shown}: {what}, {group.label}{of_which}", shown.workers)


def _matrix(what: str, group: RunGroup) -> Matrix | str:
    recorded = [run.metadata.traffic for run in group.runs if run.metadata is not None]
    known = [traffic for traffic in recorded if any(traffic.values())]
    if not known:
        return "no traffic between its parties is recorded"
    parties = list(dict.fromkeys(party for traffic in known for party in traffic))
    rows = [
        [sum(traffic.get(sender, {}).get(receiver, 0) for traffic in known) / len(known) / 1e6 for receiver in parties]
        for sender in parties
    ]
    of_which = f"mean of {len(known)} runs" if len(known) > 1 else "one run"
    title = f"Traffic between parties: {what}, {group.label} ({of_which})"
    return Matrix(f"matrix-{group.name}", title, parties, rows)
