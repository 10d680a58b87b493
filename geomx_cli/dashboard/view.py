"""What the page is told: the folded events, and what this machine knows of the job."""

from typing import Any

from geomx_cli.dashboard.feed import Feed
from geomx_cli.dashboard.live import ENDS, Live
from geomx_cli.job.known import KnownJob
from geomx_cli.job.state import JobState

__all__ = ["view"]

VERSION = 1
UNKNOWN = ("running", "detached", "lost control")


def view(job: KnownJob, live: Live, feed: Feed) -> dict[str, Any]:
    """One object for JSON."""
    state = JobState.read(job.directory)
    shown = state.shown if state is not None else "lost control"
    over = feed.over or shown not in UNKNOWN
    known = live.snapshot(over=over)
    options = job.plan.spec.options
    what = " ".join(job.plan.spec.script) or f"{options['network']} by {options['algo']}"
    if over and shown in UNKNOWN:
        shown = _end(known["processes"]) if feed.complete else f"{shown}, and not all hosts could be read"
    return {"schema_version": VERSION, "job": job.id, "what": what, "state": shown, "over": over, **known}


def _end(processes: list[dict[str, Any]]) -> str:
    """How a job went that nobody has followed to its end."""
    if any(process["state"] == "failed" for process in processes):
        return "failed"
    done = all(process["state"] in ENDS for process in processes if process["trains"])
    return "done" if done else "ended before it was done"
