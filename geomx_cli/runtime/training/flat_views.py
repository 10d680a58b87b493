"""The parts of a vector that holds several tensors."""

from collections.abc import Sequence

import numpy as np

from geomx_cli.ps.arrays import Floats

__all__ = ["flat_views"]


def flat_views(vector: Floats, sizes: Sequence[int]) -> list[Floats]:
    """Return consecutive views of these sizes into a 1-D array."""
    return np.split(vector, np.cumsum(sizes)[:-1])
