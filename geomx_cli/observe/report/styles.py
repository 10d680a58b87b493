"""The style of each algorithm in all figures, as defined by its module.

Colors are those of Okabe and Ito, "Color universal design", 2008, with two more for nine algorithms; hatches and
markers also distinguish adjacent ones. Algorithms without a style get one of a few spare ones.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from geomx_cli.core import plugins
from geomx_cli.observe.report.run_records import NON_IID

__all__ = ["PHASES", "Style", "style"]


@dataclass(frozen=True)
class Style:
    """colour: as in "#E69F00". marker, hatch and line: matplotlib's."""

    colour: str
    marker: str
    hatch: str
    line: str = "-"


_MORE = (("#A6761D", "<", "x."), ("#1B9E77", ">", "+o"), ("#E7298A", "p", "|."), ("#66A61E", "d", "-o"))
_more = itertools.cycle(_MORE)


PHASES: Mapping[str, str] = {"computes": "#0072B2", "evaluates": "#009E73", "sends": "#E69F00", "waits": "#D0D0D0"}
"""The colors of a worker's activities."""


def style(mode: str) -> Style:
    """Return the style of a mode; for non-IID data the same with dashed lines and denser hatches."""
    look = _plain(mode.removesuffix(NON_IID))
    return replace(look, line="--", hatch=look.hatch * 2 or "oo..") if mode.endswith(NON_IID) else look


@cache
def _plain(mode: str) -> Style:
    _, look = plugins.modes().get(mode, ("", None))
    return Style(*(look or next(_more)))
