"""Draws figures in a terminal: curves in braille with plotille, others in block characters."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.observe.report.figures import PHASES, Bars, Curves, Figure, Matrix, Timeline
from geomx_cli.observe.report.run_records import title

__all__ = ["painted"]

WIDTH, HEIGHT = 64, 20
FULL = "█"
MARKERS = "ox*+#@%&s"
LETTERS: Mapping[str, str] = dict(zip(PHASES, (FULL, "▓", "░", "·"), strict=True))


def painted(figure: Figure) -> str:
    """Return a figure as text of about 80 columns, in one color. Raises InvalidSettings without plotille."""
    painter = next(paint for kind, paint in _PAINTERS.items() if isinstance(figure, kind))
    return "\n".join([figure.title, *painter(figure), ""])


def _curves(figure: Curves) -> Iterator[str]:
    try:
        import plotille
    except ImportError:
        raise InvalidSettings("curves in a terminal need plotille", "pip install 'geomx-cli[draw]'") from None
    canvas: Any = plotille.Figure()
    canvas.width, canvas.height, canvas.with_colors = WIDTH, HEIGHT, False
    canvas.register_label_formatter(float, _label)
    canvas.x_label, canvas.y_label = figure.x, figure.y
    last = max((x for points in figure.curves.values() for x, _ in points), default=0.0)
    canvas.set_x_limits(0, last or 1.0)
    canvas.set_y_limits(0, 1)
    for (mode, points), marker in zip(figure.curves.items(), itertools.cycle(MARKERS), strict=False):
        xs, ys = zip(*points, strict=True)
        canvas.plot(xs, ys, label=title(mode), marker=marker)
    yield canvas.show(legend=True)


def _label(value: float, chars: int, delta: float, left: bool = False) -> str:
    """Formatter with the signature that plotille expects."""
    return f"{value:.3g}".ljust(chars) if left else f"{value:.3g}".rjust(chars)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _bars(figure: Bars) -> Iterator[str]:
    rows = [
        (" ".join(filter(None, (title(mode), label))), value)
        for mode, bars in figure.bars.items()
        for label, value in bars
    ]
    width = max(len(name) for name, _ in rows)
    most = max(value for _, value in rows) or 1.0
    for name, value in rows:
        yield f"{name:<{width}}  {FULL * round((WIDTH - width) * value / most)} {_number(value)}"
    yield f"({figure.y})"


def _timeline(figure: Timeline) -> Iterator[str]:
    begin = min(span.begin for spans in figure.workers.values() for span in spans)
    end = max(span.end for spans in figure.workers.values() for span in spans)
    width, scale = max(map(len, figure.workers)), (WIDTH - 1) / max(end - begin, 1e-9)
    for name, spans in figure.workers.items():
        line = [" "] * WIDTH
        for span in spans:
            for place in range(round((span.begin - begin) * scale), round((span.end - begin) * scale) + 1):
                line[place] = LETTERS[span.phase]
        yield f"{name:<{width}}  {''.join(line)}"
    told = ", ".join(f"{letter} {phase}" for phase, letter in LETTERS.items())
    yield f"{'':<{width}}  0 to {end - begin:.3g} seconds: {told}"


def _matrix(figure: Matrix) -> Iterator[str]:
    width = max(9, *(len(party) for party in figure.parties)) + 1
    yield f"{'from / to':<{width}}" + "".join(f"{party:>{width}}" for party in figure.parties)
    for party, row in zip(figure.parties, figure.megabytes, strict=True):
        yield f"{party:<{width}}" + "".join(f"{_number(value):>{width}}" for value in row)
    yield "(MB)"


_PAINTERS: Mapping[type, Callable[[Any], Iterator[str]]] = {
    Curves: _curves, Bars: _bars, Timeline: _timeline, Matrix: _matrix,
}  # fmt: skip
