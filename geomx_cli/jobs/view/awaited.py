"""What a job waits for: before its first step, in a round, or at its end."""

from collections.abc import Sequence

from geomx_cli.core.conventions import party_of
from geomx_cli.core.units import counted
from geomx_cli.jobs.view.progress import Progress
from geomx_cli.jobs.view.reducer import ProcessState

__all__ = ["awaited"]

_MOST = 4  # names in a line


def awaited(progress: Progress, *, names: bool = True) -> str:
    """Return it as "waiting for 2 of 8 processes to start: A/worker:0, A/worker:1"; "" while rounds follow one another.
    `names`: with those of the processes; those of a round that takes long are always told.
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
    if phase in ("training", "evaluating") and (late := _late(progress)):
        return f"waiting for {late}"
    running = [row for row in rows if row.runs]
    if phase in ("stopping", "finished") and running:
        return f"waiting for {counted(len(running), 'process')} to end{_names(running, names=names)}"
    return ""


def _late(progress: Progress) -> str:
    """The workers that a server waits for. A root tells parties' servers; one that waits for nobody waits for all."""
    found: dict[str, None] = {}
    told = [row for row in progress.rows.values() if row.awaited and row.status is None]
    for name in (name for row in told for name in row.awaited.split(", ")):
        row = progress.rows.get(name)
        if row is None or row.process.role == "worker":
            found[name] = None
        elif not row.awaited:
            found |= {one.process.name: None for one in progress.training_rows if one.process.party == party_of(name)}
    return _shortened(list(found))


def _names(rows: Sequence[ProcessState], *, names: bool) -> str:
    return f": {_shortened([row.process.name for row in rows])}" if names else ""


def _shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more
