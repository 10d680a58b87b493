"""The style of each algorithm in all figures, as defined by its module.

Colours are those of Okabe and Ito, "Color universal design", 2008, with two more for nine algorithms; hatches and
markers also distinguish adjacent ones. Algorithms without a style get one of a few spare ones.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from geomx_cli.core import plugins
from geomx_cli.observe.report.modes import NON_IID

__all__ = ["PHASE_COLOURS", "Style", "style"]


@dataclass(frozen=True)
class Style:
    """colour: as in "#E69F00". marker, hatch and line: matplotlib's."""

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
    """Return the style of a mode; for non-IID data the same with dashed lines and denser hatches. `number`: other
    shades, lines and markers of it, for several groups of one mode.
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
_DARK = 80  # a colour below that gets only lighter


def _mixed(colour: str, share: float, other: int) -> str:
    parts = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    other = 255 if max(parts) < _DARK else other
    return "#" + "".join(f"{round(part * (1 - share) + other * share):02X}" for part in parts)


@cache
def _plain(mode: str) -> Style:
    _, look = plugins.modes().get(mode, ("", None))
    return Style(*(look or next(_more)))
