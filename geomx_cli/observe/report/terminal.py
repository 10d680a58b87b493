"""Draws figures in a terminal: curves in braille with plotille, others in block characters."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.observe.report.figures import Bars, Curves, Figure, Matrix, Timeline
from geomx_cli.observe.report.styles import Axes
from geomx_cli.observe.report.timeline import PHASES

__all__ = ["painted"]

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
