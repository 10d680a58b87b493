"""Which process's test accuracy is the job's: the same for status, results, records, comparisons and the dashboard."""

import math
from collections.abc import Iterable

from geomx_cli.jobs.view.reducer import ProcessState
from geomx_cli.plan import Process

__all__ = ["evaluator", "precedence"]


def precedence(process: Process) -> tuple[float, str]:
    """Return a key that is lowest for the process whose accuracy counts: by global rank, those without one last."""
    return (math.inf if process.global_rank is None else process.global_rank), process.name


def evaluator(rows: Iterable[ProcessState]) -> ProcessState | None:
    """Return the training worker of the lowest global rank that reports an accuracy; without one, another process that
    does; None if none does. The job's accuracy is its newest.
    """
    known = [row for row in rows if row.accuracy is not None]
    return min(known, key=lambda row: precedence(row.process), default=None)
