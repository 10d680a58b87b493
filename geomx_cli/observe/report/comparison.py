"""Results of runs side by side: one row for each group of runs, with means and standard deviations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geomx_cli.core.errors import GeomxError
from geomx_cli.core.units import format_bytes, format_duration
from geomx_cli.jobs.actions.sweep_jobs import Cell
from geomx_cli.observe.report.drawing import figures_of, to_files
from geomx_cli.observe.report.figures import Figures
from geomx_cli.observe.report.groups import Mean, RunGroup, grouped, mean_of
from geomx_cli.observe.report.plots import Page
from geomx_cli.observe.report.run_records import OnProgress, RunRecords
from geomx_cli.observe.report.sources import read
from geomx_cli.observe.report.summary import Summary

__all__ = [
    "ComparisonRow", "METRICS", "SweepReport", "cells", "compared", "csv_rows", "in_order", "report_of", "shown",
    "unlike",
]  # fmt: skip

ALIKE = ("parties", "workers", "central_workers", "network", "data", "split", "batch_size", "wan", "slowdown")
_TRAFFIC = ("compress", "compress_lan", "dgt")
"""Options that users often compare. A difference in one of these alone is not worth a note; beside another it is."""


@dataclass(frozen=True)
class Metric:
    """A metric in a table.

    heading: in tables, with {} for the target.
    of: its value in a run's summary, None if unknown.
    text: a value as text, in the units of another value.
    unit: in CSV.
    """

    heading: str
    of: Callable[[Summary], float | None]
    text: Callable[[float, float | None], str]
    unit: str = ""


METRICS: Mapping[str, Metric] = {
    "time_to_target": Metric(
        "time to {}", lambda one: one.reached.seconds if one.reached else None, format_duration, "s"
    ),
    "bytes_to_target": Metric(
        "bytes to {}", lambda one: one.reached.wan_bytes if one.reached else None, format_bytes, "B"
    ),
    "accuracy": Metric("accuracy", lambda one: one.accuracy, "{:.4f}".format),
    "validation_loss": Metric("validation loss", lambda one: one.validation_loss, "{:.4f}".format),
    "samples_per_s": Metric("samples/s", lambda one: one.samples_per_s, "{:.0f}".format),
    "busy": Metric("computing", lambda one: one.busy, lambda value, _: f"{100 * value:.0f} %"),
    "goodput": Metric("goodput", lambda one: one.goodput, lambda value, _: f"{100 * value:.1f} %"),
    "wan_bytes": Metric("bytes", lambda one: one.wan_bytes, format_bytes, "B"),
    "seconds": Metric("duration", lambda one: one.seconds or None, format_duration, "s"),
}


@dataclass(frozen=True)
class ComparisonRow:
    """A group, the summaries of its runs, and each metric's mean; None if unknown."""

    group: RunGroup
    summaries: Sequence[Summary]
    means: Mapping[str, Mean | None]

    @property
    def training(self) -> str:
        """The network or script that it trained, and its label, as in "cnn HFA, seed 2"."""
        return self.group.label if self.group.network else f"{self.group.runs[0].network} {self.group.label}"

    @property
    def n(self) -> int:
        """The number of runs in its means; 0 for a run that is not done."""
        return 0 if self.group.unfinished else len(self.group.runs)

    def to_json(self) -> dict[str, Any]:
        """The group for --json."""
        means = {name: None if one is None else _json(one) for name, one in self.means.items()}
        run = self.group.runs[0]
        return {
            "training": self.training, "network": run.network, "mode": run.mode, "n": self.n,
            "jobs": [run.name for run in self.group.runs], "differs": dict(self.group.differs), **means,
        }  # fmt: skip


def _json(mean: Mean) -> dict[str, float | int | None]:
    return {"mean": mean.value, "sd": mean.sd, "n": mean.n}


def compared(groups: Sequence[RunGroup], target: float) -> list[ComparisonRow]:
    """Return a row for each group."""
    rows = []
    for group in groups:
        summaries = [Summary.of(run, target, parity=False) for run in group.runs]
        means = {name: mean_of(metric.of(one) for one in summaries) for name, metric in METRICS.items()}
        rows.append(ComparisonRow(group, summaries, means))
    return rows


def shown(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return the names of the metrics for a table: the validation loss if a run has it, and the metrics of the accuracy
    unless runs have only validation losses.
    """
    known = {name for row in rows for name, mean in row.means.items() if mean is not None}
    left_out = {"validation_loss"}
    if "validation_loss" in known:
        left_out = set() if "accuracy" in known else {"time_to_target", "bytes_to_target", "accuracy"}
    return [name for name in METRICS if name not in left_out]


def cells(row: ComparisonRow, names: Sequence[str]) -> list[str]:
    """Return these metrics as text: mean ± standard deviation. If not all runs reached the target, also how many did.
    For a run that is not done, its values so far.
    """
    return [_cell(METRICS[name], row.means[name], len(row.group.runs)) for name in names]


def _cell(metric: Metric, mean: Mean | None, runs: int) -> str:
    if mean is None:
        return "-"
    if mean.sd is None:
        text = metric.text(mean.value, None)
    else:
        text = f"{metric.text(mean.value, mean.value)} ± {metric.text(mean.sd, mean.value)}"
    return text if mean.n == runs else f"{text} ({mean.n} of {runs})"


def csv_rows(rows: Sequence[ComparisonRow], target: float) -> list[list[Any]]:
    """Return heading and rows of a CSV file: mean, sd and n of each metric. A run that is not done has none."""
    heading: list[Any] = ["training", "mode", "n", "jobs"]
    for name, metric in METRICS.items():
        full = name.replace("target", f"{target:g}") + (f" ({metric.unit})" if metric.unit else "")
        heading += [full, f"{full} sd", f"{full} n"]
    found = [heading]
    for row in rows:
        jobs = " ".join(run.name for run in row.group.runs)
        fields: list[Any] = [row.training, row.group.mode, row.n, jobs]
        for name in METRICS:
            mean = row.means[name] if row.n else None
            fields += [None, None, 0] if mean is None else [mean.value, mean.sd, mean.n]
        found.append(fields)
    return found


def unlike(groups: Sequence[RunGroup]) -> list[str]:
    """Return the flags of options in which the runs of the groups differ, except options of algorithms. Includes
    [[link]] if the emulated networks differ. Flags of codecs and datagrams are included only beside others.
    """
    known = [run.metadata for group in groups for run in group.runs if run.metadata is not None]
    differing = [name for name in (*ALIKE, *_TRAFFIC) if len({str(one.options.get(name)) for one in known}) > 1]
    links = ["[[link]]"] if "wan" not in differing and len({one.emulated_network for one in known}) > 1 else []
    if not links and not set(differing) & set(ALIKE):
        return []
    return [*links, *sorted(f"--{name.replace('_', '-')}" for name in differing)]


# The table and the figure at the end of a sweep.

_FIGURES = ("accuracy", "accuracy-niid", "throughput")  # the first of these for which there is data


@dataclass(frozen=True)
class SweepReport:
    """The table and the figure at the end of a sweep.

    rows: one for each algorithm, in the given order.
    figure: None if there is no data for it.
    notes: why there is no figure, and what else is missing.
    unreadable: a sentence for each job whose records cannot be read.
    """

    rows: Sequence[ComparisonRow] = ()
    figure: Path | None = None
    notes: list[str] = field(default_factory=list)
    unreadable: Sequence[str] = ()


def report_of(cells: Sequence[Cell], folder: Path, target: float, on_progress: OnProgress) -> SweepReport:
    """Compare the jobs that are done, and draw a figure to `folder`/figures. `on_progress`: see RunRecords.read."""
    done = [cell for cell in cells if cell.state in ("done", "collected in part")]
    found = read([folder / cell.records for cell in done if cell.records], on_progress)
    if not found.runs:
        notes = ["there is nothing to compare: no records of jobs have been collected"] if done else []
        return SweepReport(notes=notes, unreadable=found.unreadable)
    figure, notes = _drawn(found.runs, folder / "figures")
    groups = in_order(grouped(found.runs), list(dict.fromkeys(cell.algo for cell in cells)))
    return SweepReport(compared(groups, target), figure, notes, found.unreadable)


def in_order(groups: Sequence[RunGroup], algorithms: Sequence[str]) -> list[RunGroup]:
    """Sort groups by the place of their algorithm in this list. Groups of runs that are not done remain last."""
    places = {name: place for place, name in enumerate(algorithms)}

    def place(group: RunGroup) -> tuple[bool, int]:
        metadata = group.runs[0].metadata
        algorithm = "" if metadata is None else str(metadata.options.get("algo", ""))
        return bool(group.unfinished), places.get(algorithm, len(places))

    return sorted(groups, key=place)


def _drawn(runs: Sequence[RunRecords], folder: Path) -> tuple[Path | None, list[str]]:
    figures = figures_of(runs, ())
    main = next((one for one in figures.found if one.name in _FIGURES), None)
    if main is None:
        return None, [f"no figure {name}: {figures.missing[name]}" for name in _FIGURES if name in figures.missing]
    notes = [f"no {name}: {why}" for name, why in figures.missing.items() if name.startswith(f"{main.name} of ")]
    try:
        return next(to_files(Figures([main]), folder, Page())), notes
    except GeomxError as error:  # no reason to lose the table after days of training
        return None, [f"no figure: {error}"]
