"""Draws figures to files with matplotlib."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geomx_cli.core.errors import CheckFailed, InvalidSettings
from geomx_cli.observe.report.figures import Bars, Curves, Figure, Matrix, Timeline
from geomx_cli.observe.report.run_records import title
from geomx_cli.observe.report.styles import PHASES, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

SIZE = (7.2, 4.4)
DPI = 150
MOST_MARKERS = 12


def draw(figure: Figure, folder: Path, form: str) -> Path:
    """Write a figure to `folder`/NAME.`form`; return the path. Raises InvalidSettings without matplotlib, CheckFailed
    if the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise InvalidSettings("figures need matplotlib", "pip install 'geomx-cli[draw]'") from None
    canvas = Canvas(figsize=SIZE, layout="constrained")
    axes = canvas.add_subplot()
    axes.set_title(figure.title, fontsize=11)
    for kind, paint in _PAINTERS.items():
        if isinstance(figure, kind):
            paint(axes, figure)
    path = folder / f"{figure.name}.{form}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        canvas.savefig(path, dpi=DPI)
    except OSError as error:
        raise CheckFailed(f"cannot write {path}: {error.strerror}", "free space or fix permissions") from None
    return path


def _curves(axes: "Axes", figure: Curves) -> None:
    for mode, points in figure.curves.items():
        look = style(mode)
        xs, ys = zip(*points, strict=True)
        axes.plot(
            xs, ys, color=look.colour, marker=look.marker, linestyle=look.line, label=title(mode), linewidth=1.6,
            markersize=5, markevery=max(1, len(points) // MOST_MARKERS),
        )  # fmt: skip
    if figure.level is not None:
        axes.axhline(figure.level, color="black", linestyle="--", linewidth=1, label="standalone")
    axes.set(xlabel=figure.x, ylabel=figure.y, ylim=(0, 1))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)


def _bars(axes: "Axes", figure: Bars) -> None:
    """Draw groups of bars, one group per mode, with the bars in the same order."""
    place, ticks, labels = 0.0, [], []
    for mode, bars in figure.bars.items():
        look = style(mode)
        places = [place + number for number in range(len(bars))]
        values = [value for _, value in bars]
        drawn = axes.bar(places, values, 0.85, color=look.colour, hatch=look.hatch, edgecolor="white")
        if len(bars) == 1:
            axes.bar_label(drawn, [_number(value) for value in values], fontsize=9, padding=2)
        ticks.append(sum(places) / len(places))
        labels.append(title(mode))
        place += len(bars) + (1 if len(bars) > 1 else 0.4)
    axes.set_xticks(ticks, labels, fontsize=9, rotation=25 if len(labels) > 5 else 0)
    axes.set_ylabel(figure.y)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    if any(label for bars in figure.bars.values() for label, _ in bars):
        axes.set_ylim(0, 1)
        devices = ", ".join(label for label, _ in next(iter(figure.bars.values())))
        axes.set_xlabel(f"from left to right in each: {devices}", fontsize=8)
    else:
        axes.margins(y=0.12)


def _timeline(axes: "Axes", figure: Timeline) -> None:
    begin = min(span.begin for spans in figure.workers.values() for span in spans)
    for row, spans in enumerate(figure.workers.values()):
        for span in spans:
            axes.barh(row, span.end - span.begin, left=span.begin - begin, height=0.6, color=PHASES[span.phase])
    for phase, colour in PHASES.items():
        axes.barh(0, 0, color=colour, label=phase)
    axes.set_yticks(range(len(figure.workers)), list(figure.workers), fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("time (seconds)")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, frameon=False)


def _matrix(axes: "Axes", figure: Matrix) -> None:
    from matplotlib import colormaps

    count = len(figure.parties)
    most = max(max(row) for row in figure.megabytes) or 1.0
    axes.imshow(figure.megabytes, cmap=colormaps["cividis"], vmin=0)
    for row in range(count):
        for column in range(count):
            value = figure.megabytes[row][column]
            text = "" if row == column else _number(value)
            axes.text(column, row, text, ha="center", va="center", color="black" if value > 0.6 * most else "white")
    axes.set_xticks(range(count), figure.parties)
    axes.set_yticks(range(count), figure.parties)
    axes.set(xlabel="to (MB)", ylabel="from")


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


_PAINTERS: Mapping[type, Callable[["Axes", Any], None]] = {
    Curves: _curves, Bars: _bars, Timeline: _timeline, Matrix: _matrix,
}  # fmt: skip
