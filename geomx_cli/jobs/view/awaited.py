"""What a job waits for before its first step, or at its end."""

from collections.abc import Sequence

from geomx_cli.core.units import counted
from geomx_cli.jobs.view.progress import Progress
from geomx_cli.jobs.view.reducer import ProcessState

__all__ = ["awaited"]

_MOST = 4  # names in a line


def awaited(progress: Progress, *, names: bool = True) -> str:
    """Return it as "waiting for 2 of 8 processes to start: A/worker:0, A/worker:1"; "" while the job trains. `names`:
    with those of the processes.
    """
    rows = list(progress.rows.values())
    phase = progress.phase
    if phase in ("starting", "waiting"):
        starting = [row for row in rows if row.status is None and row.state == "starting"]
        if starting:
            text = f"waiting for {len(starting)} of {counted(len(rows), 'process')} to start"
            return text + _names(starting, names=names)
        joining = [row for row in rows if row.status is None and row.state == "waiting"]
        text = "waiting for all to join and for the initial values"
        return text + _names(joining, names=names) if joining else ""
    known = any(row.round or row.samples or row.samples_per_s for row in rows)
    if phase == "training" and progress.first_step is None and not known:
        return "waiting for the first round"
    running = [row for row in rows if row.runs]
    if phase in ("stopping", "finished") and running:
        return f"waiting for {counted(len(running), 'process')} to end{_names(running, names=names)}"
    return ""


def _names(rows: Sequence[ProcessState], *, names: bool) -> str:
    known = [row.process.name for row in rows]
    more = f" and {len(known) - _MOST} more" if len(known) > _MOST else ""
    return f": {', '.join(known[:_MOST])}{more}" if names else ""
