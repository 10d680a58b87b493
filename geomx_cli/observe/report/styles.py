"""The style of each algorithm in all figures, as defined by its module.

Colours are from Okabe and Ito, "Color universal design", 2008, with two more for nine algorithms. Hatches and markers
also distinguish adjacent ones. Algorithms without a style get one of a few spare styles.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from geomx_cli.core import plugins
from geomx_cli.observe.report.figures import Curves
from geomx_cli.observe.report.groups import Curve
from geomx_cli.observe.report.modes import NON_IID

__all__ = ["Axes", "PHASE_COLOURS", "Style", "style"]

# How the curves of a figure are shown: scales, limits and a reference line.

_ROOM = 0.025  # of an axis, beside the first and last points
_ROUNDING = 1e-9  # of a value: means of equal values differ by less


@dataclass(frozen=True)
class Axes:
    """Limits are (low, high), with None for the limits of the data.

    target: a horizontal line at this y.
    any_y: whether ylim and target are for all figures, not only for figures of the test accuracy; see `of`.
    """

    logx: bool = False
    logy: bool = False
    xlim: tuple[float, float] | None = None
    ylim: tuple[float, float] | None = None
    target: float | None = None
    any_y: bool = False

    def of(self, figure: Curves) -> "Axes":
        """Return the axes of one figure: ylim and target are left out if they are not for it."""
        return self if self.any_y or figure.is_accuracy else replace(self, ylim=None, target=None)

    def x_limits(self, figure: Curves) -> tuple[float, float]:
        """Return the limits of x: from 0, or on a logarithmic axis from the first point, to the last, with room for the
        markers of points at the limits.
        """
        if self.xlim is not None:
            return self.xlim
        xs = [x for curve in figure.curves.values() for x in curve.x if x > 0 or not self.logx]
        first, last = min(xs, default=1.0), max(xs, default=1.0)
        if self.logx:
            room = max((last / first) ** _ROOM, 1.0 + _ROOM)
            return first / room, last * room
        low, high = min(first, 0.0), last if last > 0 else 1.0
        room = _ROOM * (high - low)
        return (low - room if first - low < room else low), high + room

    def shows(self, figure: Curves, curve: Curve) -> bool:
        """Whether any part of a curve of the figure lies within the limits of x."""
        low, high = self.x_limits(figure)
        return min(curve.x) <= high and max(curve.x) >= low

    def hidden(self, figure: Curves) -> list[str]:
        """Return the labels of the curves that `shows` denies, each with its limits of x."""
        return [
            f"{series.label} (from {min(curve.x):.4g} to {max(curve.x):.4g})"
            for series, curve in figure.curves.items() if not self.shows(figure, curve)
        ]  # fmt: skip

    def nothing(self, figure: Curves) -> str:
        """Return why no point of the figure can be seen within these axes, as a clause; "" if one can."""
        points = [point for curve in figure.curves.values() for point in zip(curve.x, curve.y, strict=True)]
        if not points:
            return f"no {figure.y} was recorded"
        for is_log, axis, letter in ((self.logx, 0, "x"), (self.logy, 1, "y")):
            if is_log and all(point[axis] <= 0 for point in points):
                return f"no {letter} is above 0, as a logarithmic axis (--log{letter}) needs it"
        for limits, axis, letter in ((self.x_limits(figure), 0, "x"), (self.ylim, 1, "y")):
            values = [point[axis] for point in points]
            points = [point for point in points if limits is None or limits[0] <= point[axis] <= limits[1]]
            if not points:
                return f"no point lies within --{letter}lim: the data are from {min(values):.4g} to {max(values):.4g}"
        return ""

    def y_limits(self, figure: Curves) -> tuple[float, float]:
        """Return the limits of y. They include the points within the limits of x, with some room, and the lines. If no
        mean is negative, the lower limit is at least 0, even if a mean less its deviation is negative.
        """
        low_x, high_x = self.x_limits(figure)
        ys: list[float] = [level for level in (figure.level, self.target) if level is not None]
        lowest = min(ys, default=0.0)
        for curve in figure.curves.values():
            sds = curve.sd or [0.0] * len(curve.y)
            within = [(y, sd) for x, y, sd in zip(curve.x, curve.y, sds, strict=True) if low_x <= x <= high_x]
            lowest = min((lowest, *(y for y, _ in within)))
            ys += [y + side * sd for y, sd in within for side in (-1, 1)]
        ys = [y for y in ys if y > 0] if self.logy else ys
        low, high = min(ys, default=0.1), max(ys, default=1.0)
        if self.logy:
            return self.ylim or (low / 1.2, high * 1.2)
        span = high - low if high - low > _ROUNDING * abs(high) else abs(high)
        room = 0.05 * span or 0.5
        return self.ylim or (max(low - room, 0.0) if lowest >= 0 else low - room, high + room)


@dataclass(frozen=True)
class Style:
    """colour: such as "#E69F00". marker, hatch, line: in matplotlib's notation."""

    colour: str
    marker: str
    hatch: str
    line: str = "-"


_MORE = (("#A6761D", "<", "x."), ("#1B9E77", ">", "+o"), ("#E7298A", "p", "|."), ("#66A61E", "d", "-o"))
_more = itertools.cycle(_MORE)


PHASE_COLOURS: Mapping[str, str] = {
    "computes": "#0072B2", "evaluates": "#009E73", "sends": "#E69F00", "waits": "#D0D0D0",
}  # fmt: skip
"""The colours of a worker's activities."""


def style(mode: str, number: int = 0) -> Style:
    """Return the style of a mode. Non-IID data have dashed lines and denser hatches.

    number: selects other shades, lines and markers of the style, for several groups of one mode.
    """
    look = _plain(mode.removesuffix(NON_IID))
    if mode.endswith(NON_IID):
        look = replace(look, line="--", hatch=look.hatch * 2 or "oo..")
    if number:
        shade = _SHADES[number % len(_SHADES)]
        line, marker = _LINES[number % len(_LINES)], _MARKERS[number % len(_MARKERS)]
        look = replace(look, colour=_mixed(look.colour, *shade), line=line, marker=marker)
    return look


_LINES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_SHADES = ((0.0, 0), (0.45, 255), (0.3, 0), (0.65, 255), (0.6, 0))  # how much of white or black
_DARK = 80  # a darker colour only gets lighter


def _mixed(colour: str, share: float, other: int) -> str:
    parts = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    other = 255 if max(parts) < _DARK else other
    return "#" + "".join(f"{round(part * (1 - share) + other * share):02X}" for part in parts)


@cache
def _plain(mode: str) -> Style:
    _, look = plugins.modes().get(mode, ("", None))
    return Style(*(look or next(_more)))
