"""Draws figures to files with matplotlib."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geomx_cli.core.errors import CheckFailed, InvalidSettings
from geomx_cli.observe.report.figures import Bars, Curves, Figure, Matrix, Timeline
from geomx_cli.observe.report.styles import PHASE_COLOURS, Axes, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Plot

__all__ = ["Page", "draw"]

DPI = 150
MOST_MARKERS = 12
_FEWEST_MARKS = 3
_COVERED = 0.2  # of the axes, by a legend
_FEWEST_PLACES = 6.0  # of bars on the x axis, so that a single bar is no wider than one of several
_NAMED = 8  # characters; if a label is longer, the labels of several bars are tilted


@dataclass(frozen=True)
class Page:
    """The settings that all figures share. size: width and height in inches. font_size: in points."""

    form: str = "png"
    size: tuple[float, float] = (7.2, 4.4)
    font_size: float = 10.0
    axes: Axes = field(default_factory=Axes)


def draw(figure: Figure, folder: Path, page: Page) -> Path:
    """Write a figure to `folder`/NAME.FORM. Return the path. Raises InvalidSettings without matplotlib, and for a page
    that has no room. Raises CheckFailed if the file cannot be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise InvalidSettings("figures need matplotlib", "pip install 'geomx-cli[draw]'") from None
    path = folder / f"{figure.name}.{page.form}"
    # Type 42 fonts: journals refuse matplotlib's usual Type 3.
    with (
        rc_context({"font.size": page.font_size, "axes.titlesize": "medium", "pdf.fonttype": 42}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("error", "constrained_layout not applied")
        canvas = Canvas(figsize=page.size, layout="constrained")
        plot = canvas.add_subplot()
        plot.set_title(figure.title)
        try:
            for kind, paint in _PAINTERS.items():
                if isinstance(figure, kind):
                    paint(plot, figure, page)
            folder.mkdir(parents=True, exist_ok=True)
            canvas.savefig(path, dpi=DPI)
        except OSError as error:
            raise CheckFailed(f"cannot write {path}: {error.strerror}", "free space or fix permissions") from None
        except UserWarning:
            width, height = page.size
            what = f"{figure.name} has no room on {width:g} x {height:g} inches with font size {page.font_size:g}"
            raise InvalidSettings(what, "choose a larger --size or a smaller --font-size") from None
    return path


def _curves(plot: "Plot", figure: Curves, page: Page) -> None:
    """Draw the curves. If a later curve covers an earlier one exactly, the later one is dashed, so that both can be
    seen. If there is no point to draw, write the reason.
    """
    axes = page.axes.of(figure)
    if why := axes.nothing(figure):
        plot.set_axis_off()
        plot.text(0.5, 0.5, why, transform=plot.transAxes, ha="center", va="center", wrap=True)
        return
    drawn: list[tuple[Any, Any]] = []
    for index, (series, curve) in enumerate(figure.curves.items()):
        if not axes.shows(figure, curve):
            continue
        look = style(series.mode, series.number)
        covers = (curve.x, curve.y) in drawn
        drawn.append((curve.x, curve.y))
        every = max(1, len(curve.x) // MOST_MARKERS)
        plot.plot(
            curve.x, curve.y, color=look.colour, marker=look.marker, linestyle=(0, (3, 3)) if covers else look.line,
            label=f"{series.label} (n = {curve.n})" if curve.n > 1 else series.label, linewidth=1.6,
            markersize=5 if not covers else 8, markevery=(index * every // len(figure.curves), every),
            fillstyle="none" if covers else "full",
        )  # fmt: skip
        if curve.sd is not None and len(curve.x) == 1:
            plot.errorbar(curve.x, curve.y, yerr=curve.sd, color=look.colour, capsize=3)
        elif curve.sd is not None:
            low, high = ([y + side * sd for y, sd in zip(curve.y, curve.sd, strict=True)] for side in (-1, 1))
            plot.fill_between(curve.x, low, high, color=look.colour, alpha=0.18, linewidth=0)
    if figure.level is not None:
        plot.axhline(figure.level, color="black", linestyle="--", linewidth=1, label="standalone")
    if axes.target is not None:
        plot.axhline(axes.target, color="grey", linestyle=":", linewidth=1.2, label=f"target {axes.target:g}")
    note = f"\n({figure.note})" if figure.note else ""
    plot.set(
        xlabel=figure.x + note, ylabel=figure.y, xscale="log" if axes.logx else "linear",
        yscale="log" if axes.logy else "linear", ylim=axes.y_limits(figure),
    )  # fmt: skip
    plot.set_xlim(*axes.x_limits(figure))
    for is_log, axis, limits in ((axes.logx, plot.xaxis, plot.get_xlim()), (axes.logy, plot.yaxis, plot.get_ylim())):
        if is_log:
            _mark(axis, *limits)
    plot.grid(alpha=0.3)
    _explain(plot)


def _explain(plot: "Plot") -> None:
    """Draw the legend where it covers least. If it would cover much of small axes, draw it below them."""
    legend = plot.legend(fontsize="small")
    canvas: Any = plot.figure  # no SubFigure
    canvas.draw_without_rendering()
    needed, room, page = (one.get_window_extent() for one in (legend, plot, canvas))
    if needed.width * needed.height > _COVERED * room.width * room.height:
        legend.remove()
        columns = max(1, int(page.width // needed.width))
        canvas.legend(fontsize="small", loc="outside lower center", ncols=columns, frameon=False)


def _mark(axis: Any, low: float, high: float) -> None:
    """Mark a logarithmic axis with plain numbers, in the coarsest division that has three of them. If none has, mark it
    like a linear axis.
    """
    from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullFormatter

    locator: Locator
    powers = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    for digits in ((1,), (1, 3), (1, 2, 5)):
        if sum(low <= digit * power <= high for digit in digits for power in powers) >= _FEWEST_MARKS:
            locator = LogLocator(subs=digits, numticks=7)
            break
    else:
        locator = MaxNLocator(5)
    axis.set_major_locator(locator)
    axis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))
    axis.set_minor_formatter(NullFormatter())


def _bars(plot: "Plot", figure: Bars, _: Page) -> None:
    """Draw groups of bars, one group for each series, with the bars in the same order. Hatches distinguish series."""
    place, ticks, labels = 0.0, [], []
    for series, bars in figure.bars.items():
        look = style(series.mode, series.number)
        places = [place + number for number in range(len(bars))]
        means = [mean for _, mean in bars]
        values, sds = [mean.value for mean in means], [mean.sd or 0.0 for mean in means]
        error: dict[str, Any] = {"yerr": sds, "ecolor": "grey", "capsize": 3, "error_kw": {"elinewidth": 1}}
        drawn = plot.bar(
            places, values, 0.85, color=look.colour, hatch=look.hatch if len(figure.bars) > 1 else "",
            edgecolor="white", **(error if any(sds) else {}),
        )  # fmt: skip
        if len(bars) == 1:  # above the error bar
            plot.bar_label(drawn, [_number(mean.value) for mean in means], fontsize="small", padding=2)
        ticks.append(sum(places) / len(places))
        labels.append(series.label)
        place += len(bars) + (1 if len(bars) > 1 else 0.4)
    tilted = len(labels) > 5 or (len(labels) > 2 and max(map(len, labels)) > _NAMED)
    plot.set_xticks(ticks, labels, fontsize="small", rotation=25 if tilted else 0, ha="right" if tilted else "center")
    plot.set_ylabel(figure.y)
    plot.grid(axis="y", alpha=0.3)
    plot.set_axisbelow(True)
    plot.margins(y=0.12)
    low, high = plot.get_xlim()
    if (more := _FEWEST_PLACES - (high - low)) > 0:
        plot.set_xlim(low - more / 2, high + more / 2)
    if any(label for bars in figure.bars.values() for label, _ in bars):
        devices = ", ".join(label for label, _ in next(iter(figure.bars.values())))
        plot.set_xlabel(f"from left to right in each: {devices}", fontsize="x-small", wrap=True)


def _timeline(plot: "Plot", figure: Timeline, _: Page) -> None:
    begin = min(span.begin for spans in figure.workers.values() for span in spans)
    for row, spans in enumerate(figure.workers.values()):
        for span in spans:
            plot.barh(row, span.end - span.begin, left=span.begin - begin, height=0.6, color=PHASE_COLOURS[span.phase])
    for phase in figure.phases:
        plot.barh(0, 0, color=PHASE_COLOURS[phase], label=phase)
    plot.set_yticks(range(len(figure.workers)), list(figure.workers), fontsize="small")
    plot.invert_yaxis()
    plot.set_xlabel("time since the round began (seconds)")
    plot.grid(axis="x", alpha=0.3)
    plot.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, frameon=False)


def _matrix(plot: "Plot", figure: Matrix, _: Page) -> None:
    from matplotlib import colormaps

    count = len(figure.parties)
    most = max(max(row) for row in figure.megabytes) or 1.0
    image = plot.imshow(figure.megabytes, cmap=colormaps["cividis"], vmin=0, vmax=most, aspect="auto")
    plot.figure.colorbar(image, ax=plot, label="MB")
    for row in range(count):
        for column in range(count):
            value = figure.megabytes[row][column]
            text = "" if row == column else _number(value)
            plot.text(column, row, text, ha="center", va="center", color="black" if value > 0.6 * most else "white")
    plot.set_xticks(range(count), figure.parties)
    plot.set_yticks(range(count), figure.parties)
    plot.set(xlabel="to", ylabel="from")


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


_PAINTERS: Mapping[type, Callable[["Plot", Any, Page], None]] = {
    Curves: _curves, Bars: _bars, Timeline: _timeline, Matrix: _matrix,
}  # fmt: skip
