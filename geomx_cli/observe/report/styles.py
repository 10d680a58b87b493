"""How each algorithm looks, in all figures and in the dashboard.

Colours are those of Okabe and Ito, "Color universal design", 2008, with two more for nine algorithms; where they lie
side by side, hatches and markers tell them apart as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from geomx_cli.observe.report.trial import NON_IID

__all__ = ["PHASES", "Style", "style"]


@dataclass(frozen=True)
class Style:
    """colour: as in "#E69F00". marker, hatch and line: matplotlib's."""

    colour: str
    marker: str
    hatch: str
    line: str = "-"


_STYLES: Mapping[str, Style] = {
    "esync": Style("#CC79A7", "o", "xx"),
    "sync": Style("#E69F00", "s", "//"),
    "async": Style("#0072B2", "^", "\\\\"),
    "dcasgd": Style("#009E73", "v", "--"),
    "fsa": Style("#D55E00", "D", "++"),
    "mixed": Style("#56B4E9", "P", ".."),
    "hfa": Style("#000000", "X", "oo"),
    "diloco": Style("#8C6BB1", "*", "||"),
    "local": Style("#7F7F7F", "h", ""),
}
PHASES: Mapping[str, str] = {"computes": "#0072B2", "evaluates": "#009E73", "sends": "#E69F00", "waits": "#D0D0D0"}
"""The colours of what a worker does."""


def style(mode: str) -> Style:
    """Of a mode; on data that are divided otherwise the same with dashed lines and finer hatches."""
    look = _STYLES[mode.removesuffix(NON_IID)]
    return replace(look, line="--", hatch=look.hatch * 2 or "oo..") if mode.endswith(NON_IID) else look
