"""From runs to drawn figures."""

import csv
import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from geomx_cli.core.errors import CheckFailed, InvalidSettings, UsageError
from geomx_cli.core.files import write_atomic
from geomx_cli.core.option import nearest
from geomx_cli.observe.report import figures
from geomx_cli.observe.report.figures import Bars, Curves, Figure, Figures, Matrix, Timeline, metric_names
from geomx_cli.observe.report.groups import PHASES, grouped
from geomx_cli.observe.report.plots import Page, draw
from geomx_cli.observe.report.run_records import RunRecords
from geomx_cli.observe.report.styles import Axes

__all__ = [
    "any_y", "empty", "figures_of", "in_terminal", "left_out", "painted", "to_files", "write_csv", "write_figure",
]  # fmt: skip

# Draws figures in a terminal: curves in braille with plotille, others in block characters.

WIDTH, HEIGHT = 64, 20
FULL = "█"
MARKERS = "ox*+#@%&s"
LETTERS: Mapping[str, str] = dict(zip(PHASES, (FULL, "▓", "░", "·"), strict=True))


def painted(figure: Figure, axes: Axes) -> str:
    """Return a figure as text of about 80 columns, in one colour. Raises InvalidSettings without plotille."""
    painter = next(paint for kind, paint in _PAINTERS.items() if isinstance(figure, kind))
    return "\n".join([figure.title, *painter(figure, axes), ""])


def _curves(figure: Curves, axes: Axes) -> Iterator[str]:
    try:
        import plotille
    except ImportError:
        raise InvalidSettings("curves in a terminal need plotille", "pip install 'geomx-cli[draw]'") from None
    axes = axes.of(figure)
    if why := axes.nothing(figure):
        yield f"({why})"
        return
    canvas: Any = plotille.Figure()
    canvas.width, canvas.height, canvas.with_colors = WIDTH, HEIGHT, False
    canvas.register_label_formatter(float, _label)
    canvas.x_label, canvas.y_label = figure.x, figure.y
    if figure.note:
        yield f"({figure.note})"
    canvas.set_x_limits(*axes.x_limits(figure))
    canvas.set_y_limits(*axes.y_limits(figure))
    for (series, curve), marker in zip(figure.curves.items(), itertools.cycle(MARKERS), strict=False):
        if not axes.shows(figure, curve):
            continue
        label = f"{series.label} (mean of {curve.n})" if curve.n > 1 else series.label
        canvas.plot(curve.x, curve.y, label=label, marker=marker)
    if axes.target is not None:
        canvas.plot(axes.x_limits(figure), (axes.target, axes.target), label=f"target {axes.target:g}")
    yield canvas.show(legend=True)


def _label(value: float, chars: int, delta: float, left: bool = False) -> str:
    """Formatter with the signature that plotille expects."""
    return f"{value:.3g}".ljust(chars) if left else f"{value:.3g}".rjust(chars)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _bars(figure: Bars, _: Axes) -> Iterator[str]:
    rows = [
        (" ".join(filter(None, (series.label, label))), mean)
        for series, bars in figure.bars.items()
        for label, mean in bars
    ]
    width = max(len(name) for name, _ in rows)
    most = max(mean.value for _, mean in rows) or 1.0
    for name, mean in rows:
        bar = FULL * round(max(WIDTH - width, 10) * mean.value / most)
        yield f"{name:<{width}}  {bar} {_number(mean.value)}" + ("" if mean.sd is None else f" ± {_number(mean.sd)}")
    yield f"({figure.y})"


def _timeline(figure: Timeline, _: Axes) -> Iterator[str]:
    begin = min(span.begin for spans in figure.workers.values() for span in spans)
    end = max(span.end for spans in figure.workers.values() for span in spans)
    width, scale = max(map(len, figure.workers)), (WIDTH - 1) / max(end - begin, 1e-9)
    for name, spans in figure.workers.items():
        line = [" "] * WIDTH
        for span in spans:
            for place in range(round((span.begin - begin) * scale), round((span.end - begin) * scale) + 1):
                line[place] = LETTERS[span.phase]
        yield f"{name:<{width}}  {''.join(line)}"
    legend = ", ".join(f"{LETTERS[phase]} {phase}" for phase in figure.phases)
    yield f"{'':<{width}}  0 to {end - begin:.3g} seconds: {legend}"


def _matrix(figure: Matrix, _: Axes) -> Iterator[str]:
    width = max(9, *(len(party) for party in figure.parties)) + 1
    yield f"{'from / to':<{width}}" + "".join(f"{party:>{width}}" for party in figure.parties)
    for party, row in zip(figure.parties, figure.megabytes, strict=True):
        yield f"{party:<{width}}" + "".join(f"{_number(value):>{width}}" for value in row)
    yield "(MB)"


_PAINTERS: Mapping[type, Callable[[Any, Axes], Iterator[str]]] = {
    Curves: _curves, Bars: _bars, Timeline: _timeline, Matrix: _matrix,
}  # fmt: skip


# The data of figures as CSV files.

Row = Sequence[Any]


def write_figure(figure: Figure, folder: Path) -> Path:
    """Write a figure's data to `folder`/NAME.csv. Return the path. Raises the same errors as write_csv."""
    path = folder / f"{figure.name}.csv"
    write_csv(path, list(_rows(figure)))
    return path


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows, of which the first is the heading. None becomes an empty field. Raises CheckFailed on failure."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.getvalue().encode())
    except OSError as error:
        raise CheckFailed(f"cannot write {path}: {error.strerror}", "free space or fix permissions") from None


def _rows(figure: Figure) -> Iterator[Row]:
    match figure:
        case Curves():
            yield "series", figure.x, figure.y, "sd", "n"
            for series, curve in figure.curves.items():
                for place, x in enumerate(curve.x):
                    yield series.label, x, curve.y[place], curve.sd[place] if curve.sd else None, curve.n
        case Bars():
            yield "series", "worker", figure.y, "sd", "n"
            for series, bars in figure.bars.items():
                yield from ((series.label, name, mean.value, mean.sd, mean.n) for name, mean in bars)
        case Timeline():
            yield "worker", "phase", "begin (seconds)", "end (seconds)"
            for worker, spans in figure.workers.items():
                yield from ((worker, span.phase, span.begin, span.end) for span in spans)
        case Matrix():
            yield "from", "to", "megabytes"
            for sender, row in zip(figure.parties, figure.megabytes, strict=True):
                for receiver, value in zip(figure.parties, row, strict=True):
                    if receiver != sender:
                        yield sender, receiver, value


_NO_METRICS = "these runs have none: a script reports its own with geomx.report(NAME=value)"


def figures_of(
    runs: Sequence[RunRecords], by: Sequence[str], only: Sequence[str] = (), metrics: Sequence[str] = ()
) -> Figures:
    """Return the figures of runs, grouped by the settings `by`.

    only: return only figures whose names begin with one of these, if any.
    metrics: draw these metrics of scripts too.
    Raises UsageError for an unknown name in `only` or `metrics`, and the errors of `grouped`.
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
    """Return, by name, which curves have no part within the limits of x, in figures that show other curves."""
    shown = [figure for figure in found.found if isinstance(figure, Curves) and not axes.of(figure).nothing(figure)]
    return {figure.name: ", ".join(hidden) for figure in shown if (hidden := axes.hidden(figure))}


def any_y(found: Figures) -> bool:
    """Whether limits of y are for all figures, because no curve is a curve of the test accuracy."""
    return not any(isinstance(figure, Curves) and figure.is_accuracy for figure in found.found)


def _known(word: str, names: Sequence[str]) -> str:
    return nearest(word, names) if names else "there are none"


def to_files(found: Figures, folder: Path, page: Page, data: Path | None = None) -> Iterator[Path]:
    """Write figures to `folder`, and their data to `data` if given. Yield each path. Raises the errors of plots.draw.
    """
    for figure in found.found:
        yield draw(figure, folder, page)
    yield from _data(found, data)


def in_terminal(found: Figures, axes: Axes, data: Path | None = None) -> Iterator[str]:
    """Yield the figures as text, then the paths of their data, if wanted. Raises the errors of terminal.painted."""
    for figure in found.found:
        yield painted(figure, axes)
    yield from map(str, _data(found, data))


def _data(found: Figures, folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        yield from (write_figure(figure, folder) for figure in found.found)
