"""Types of numpy arrays, for annotations, and the arrays that a process keeps with a slice."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Arrays", "Floats", "SliceArrays"]

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Arrays = dict[str, Array]
"""Named arrays; the names are unique within one part of a slice."""


@dataclass(slots=True, eq=False, kw_only=True)
class SliceArrays:
    """All arrays that one process keeps for one slice from round to round, by name. It is their only owner.

    parts: the arrays by their user: "optimizer", "algorithm", "codec-wan", "codec-lan" or "delivery".
    """

    parts: dict[str, Arrays] = field(default_factory=dict)

    def part(self, name: str) -> Arrays:
        """The arrays of one part; it may add, replace and remove them."""
        return self.parts.setdefault(name, {})
