"""How each algorithm looks, in all figures and in the dashboard.

Colours are those of Okabe and Ito, "Color universal design", 2008, with two more for nine algorithms; where they lie
side by side, hatches and markers tell them apart as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from geomx_cli.report.trial import NON_IID

__all__ = ["PHASES", "Style", "style"]


@dataclass(frozen=True)
class Style:
    """colour: as in "#E69F00". marker and hatch: matplotlib's."""

    colour: str
    marker: str
    hatch: str


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
PHASES: Mapping[str, str] = {"compute": "#0072B2", "exchange": "#E69F00", "wait": "#D0D0D0"}
"""The colours of what a worker does."""


def style(mode: str) -> Style:
    """Of a mode; data that are divided otherwise change nothing."""
    return _STYLES[mode.removesuffix(NON_IID)]
