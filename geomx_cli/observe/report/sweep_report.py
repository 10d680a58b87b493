"""The table and the figure at the end of a sweep."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from geomx_cli.core.errors import GeomxError
from geomx_cli.jobs.store.sweep_manifest import Cell
from geomx_cli.observe.report.comparison import ComparisonRow, compared
from geomx_cli.observe.report.drawing import figures_of, to_files
from geomx_cli.observe.report.figures import Figures
from geomx_cli.observe.report.groups import RunGroup, grouped
from geomx_cli.observe.report.plots import Page
from geomx_cli.observe.report.run_records import OnProgress, RunRecords
from geomx_cli.observe.report.sources import read

__all__ = ["SweepReport", "in_order", "report_of"]

_FIGURES = ("accuracy", "accuracy-niid", "throughput")  # the first of these that there are data for


@dataclass(frozen=True)
class SweepReport:
    """rows: one for each algorithm, in the order given. figure: None if there are no data for it; notes: why, and what
    else is missing. unreadable: a sentence for each job whose records cannot be read.
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
    """Sort groups by the place of their algorithm in this list; those of runs that are not done remain last."""
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
