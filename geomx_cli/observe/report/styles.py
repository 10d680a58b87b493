"""How each algorithm looks in all figures, as its module says.

Colours are those of Okabe and Ito, "Color universal design", 2008, with two more for nine algorithms; where they lie
side by side, hatches and markers tell them apart as well. An algorithm that says nothing gets one of a few more.
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
"""The colours of what a worker does."""


def style(mode: str) -> Style:
    """Of a mode; on data that are divided otherwise the same with dashed lines and finer hatches."""
    look = _plain(mode.removesuffix(NON_IID))
    return replace(look, line="--", hatch=look.hatch * 2 or "oo..") if mode.endswith(NON_IID) else look


@cache
def _plain(mode: str) -> Style:
    _, look = plugins.modes().get(mode, ("", None))
    return Style(*(look or next(_more)))
