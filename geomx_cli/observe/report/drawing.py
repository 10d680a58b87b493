"""From runs to drawn figures."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from geomx_cli.core.errors import UsageError
from geomx_cli.core.nearest import nearest
from geomx_cli.observe.report import figures
from geomx_cli.observe.report.axes import Axes
from geomx_cli.observe.report.figures import Curves, Figures
from geomx_cli.observe.report.groups import grouped
from geomx_cli.observe.report.metric_curves import metric_names
from geomx_cli.observe.report.plots import Page, draw
from geomx_cli.observe.report.run_records import RunRecords
from geomx_cli.observe.report.tables import write_figure
from geomx_cli.observe.report.terminal import painted

__all__ = ["any_y", "empty", "figures_of", "in_terminal", "left_out", "to_files"]

_NO_METRICS = "these runs have none: a script reports its own with geomx.report(NAME=value)"


def figures_of(
    runs: Sequence[RunRecords], by: Sequence[str], only: Sequence[str] = (), metrics: Sequence[str] = ()
) -> Figures:
    """Return the figures of runs, grouped by the settings `by`; only those whose names begin with one of `only`, if
    any. metrics: draw these of scripts too. Raises UsageError for a name in `only` or `metrics` that there is not, and
    as `grouped`.
    """
    reported = sorted({name for run in runs for name in metric_names(run)})
    if unknown := [name for name in metrics if name not in reported]:
        hint = nearest(unknown[0], reported) if reported else _NO_METRICS
        raise UsageError(f"--metric {unknown[0]}: no run has it", hint)
    networks = sorted({run.network for run in runs})
    found = figures.of(", ".join(networks), grouped(runs, by), metrics)
    names = [figure.name for figure in found.found]
    for name in only:
        if not any(one.startswith(name) for one in (*names, *found.missing)):
            raise UsageError(f"--only {name}: there is no such figure", _known(name, names))
    wanted = tuple(only) or ("",)
    return Figures(
        [figure for figure in found.found if figure.name.startswith(wanted)],
        {name: why for name, why in found.missing.items() if name.startswith(wanted)},
        found.groups,
    )


def empty(found: Figures, axes: Axes) -> dict[str, str]:
    """Return, by name, why figures show no point within these axes."""
    curves = [figure for figure in found.found if isinstance(figure, Curves)]
    return {figure.name: why for figure in curves if (why := axes.of(figure).nothing(figure))}


def left_out(found: Figures, axes: Axes) -> dict[str, str]:
    """Return, by name, which curves of figures that show others have no part within the limits of x."""
    shown = [figure for figure in found.found if isinstance(figure, Curves) and not axes.of(figure).nothing(figure)]
    return {figure.name: ", ".join(hidden) for figure in shown if (hidden := axes.hidden(figure))}


def any_y(found: Figures) -> bool:
    """Whether limits of y are for all figures: none of the curves is one of the test accuracy."""
    return not any(isinstance(figure, Curves) and figure.is_accuracy for figure in found.found)


def _known(word: str, names: Sequence[str]) -> str:
    return nearest(word, names) if names else "there are none"


def to_files(found: Figures, folder: Path, page: Page, data: Path | None = None) -> Iterator[Path]:
    """Write figures to `folder`, and their data to `data` if given; yield each path. Raises as plots.draw."""
    for figure in found.found:
        yield draw(figure, folder, page)
    yield from _data(found, data)


def in_terminal(found: Figures, axes: Axes, data: Path | None = None) -> Iterator[str]:
    """Yield the figures as text, then the paths of their data, if wanted. Raises as terminal.painted."""
    for figure in found.found:
        yield painted(figure, axes)
    yield from map(str, _data(found, data))


def _data(found: Figures, folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        yield from (write_figure(figure, folder) for figure in found.found)
