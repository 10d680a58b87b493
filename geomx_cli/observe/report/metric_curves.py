"""Curves of the loss and of scripts' own metrics over time, from a run's records."""

import math
from collections.abc import Sequence

from geomx_cli.observe.report.averages import mean_curve
from geomx_cli.observe.report.run_records import RunRecords

__all__ = ["LOSS", "metric_curve", "metric_names"]

LOSS = "loss"
"""The name of the loss, which no metric has."""


def metric_names(run: RunRecords) -> list[str]:
    """Return the names of the metrics that its workers' scripts have reported."""
    return sorted({name for worker in run.each() for name in worker.metrics})


def metric_curve(run: RunRecords, name: str) -> Sequence[tuple[float, float]]:
    """Return (seconds, value) of LOSS or of a metric: the mean of its workers' curves over time, where all of them have
    values; see mean_curve. Values that are not finite are left out, and workers without any.
    """
    columns = [worker.losses if name == LOSS else worker.metrics.get(name) for worker in run.each()]
    curves = [
        sorted(point for point in zip(*column, strict=True) if math.isfinite(point[1]))
        for column in columns
        if column is not None
    ]
    known = [points for points in curves if points]
    if not known:
        return []
    mean = mean_curve(known)
    return list(zip(mean.x, mean.y, strict=True))
