"""Means and standard deviations over the runs of a group: of numbers, and of curves."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Curve", "Mean", "mean_curve", "mean_of"]

MOST_POINTS = 500

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Mean:
    """The mean over n runs; sd: the sample standard deviation, None for one run."""

    value: float
    sd: float | None
    n: int


@dataclass(frozen=True)
class Curve:
    """y over x, of one run, or the mean of n runs with the standard deviation at each x. cut: some of them go on beyond
    its end, where the first one ends.
    """

    x: Sequence[float]
    y: Sequence[float]
    sd: Sequence[float] | None = None
    n: int = 1
    cut: bool = False


def mean_of(values: Iterable[float | None]) -> Mean | None:
    """Return the mean of the finite values; None if there are none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    return Mean(float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else None, len(known))


def mean_curve(runs: Sequence[Points]) -> Curve:
    """Return the mean of the runs' curves, of points sorted by x; that of a single run is itself.

    Each curve is interpolated linearly at the x of all curves' points (evenly thinned if there are very many), between
    the last first x and the first last x: where all runs have values. If there is no such x, as where each run has only
    one point, the mean is one point: that of the runs' last points, in x and y.
    """
    if len(runs) == 1:
        return Curve([x for x, _ in runs[0]], [y for _, y in runs[0]])
    begin, end = max(points[0][0] for points in runs), min(points[-1][0] for points in runs)
    if begin >= end:
        xs, ys = ([points[-1][axis] for points in runs] for axis in (0, 1))
        return Curve([float(np.mean(xs))], [float(np.mean(ys))], [float(np.std(ys, ddof=1))], len(runs))
    grid = np.unique([begin, end, *(x for points in runs for x, _ in points if begin < x < end)])
    if len(grid) > MOST_POINTS:
        grid = grid[np.unique(np.linspace(0, len(grid) - 1, MOST_POINTS).round().astype(int))]
    matrix = np.array([np.interp(grid, [x for x, _ in points], [y for _, y in points]) for points in runs])
    means, sds = matrix.mean(axis=0), matrix.std(axis=0, ddof=1)
    cut = any(points[-1][0] > end for points in runs)
    return Curve(grid.tolist(), means.tolist(), sds.tolist(), len(runs), cut)
