"""What the page is told: the folded events, and what this machine knows of the job."""

from typing import Any

from geomx_cli.dashboard.live import Live
from geomx_cli.job.known import KnownJob
from geomx_cli.job.state import JobState

__all__ = ["view"]

VERSION = 1


def view(job: KnownJob, live: Live, *, over: bool) -> dict[str, Any]:
    """One object for JSON. `over`: the hosts have said all that they had to say."""
    known = live.snapshot()
    options = job.plan.spec.options
    what = " ".join(job.plan.spec.script) or f"{options['network']} by {options['algo']}"
    state = _state(job, known, over)
    for process in known["processes"] if over else ():
        process["state"] = process["state"] if process["state"] in ("finished", "failed") else "ended"
    return {"schema_version": VERSION, "job": job.id, "what": what, "state": state, "over": over, **known}


def _state(job: KnownJob, known: dict[str, Any], over: bool) -> str:
    """As geomx status has it, as far as that is known without asking the hosts again."""
    state = JobState.read(job.directory)
    shown = state.shown if state is not None else "lost control"
    if over and shown in ("running", "detached", "lost control"):
        failed = any(process["state"] == "failed" for process in known["processes"])
        return "failed" if failed else "done"
    return shown
