"""The data for the page: the model's snapshot, and this machine's knowledge of the job."""

from collections.abc import Mapping
from typing import Any

from geomx_cli.jobs.store.job_state import JobState
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.observe.dashboard.event_reader import EventReader
from geomx_cli.observe.dashboard.job_model import ENDS, JobModel

__all__ = ["page_state"]

VERSION = 1
UNDECIDED = ("running", "detached", "orphaned")


def page_state(job: KnownJob, model: JobModel, events: EventReader) -> dict[str, Any]:
    """Return one object for JSON."""
    state = JobState.read(job.directory)
    shown = state.shown if state is not None else "orphaned"
    over = events.over or shown not in UNDECIDED
    known = model.snapshot(over=over)
    if over and shown in UNDECIDED:
        shown = _end(known["processes"]) if events.complete else f"{shown}, and not all hosts could be read"
    cause, culprit = _cause(state)
    for process in known["processes"]:
        if culprit and process["state"] in ("failed", "ended"):  # the others ended as a consequence
            process["state"] = "failed" if process["name"] == culprit else "stopped"
    fields = {"job": job.id, "what": job.what, "state": shown, "over": over, "cause": cause}
    return {"schema_version": VERSION, **fields, **known}


def _cause(state: JobState | None) -> tuple[str, str]:
    """Return the cause of the job's failure as a sentence, and the process that failed first; "" if there is none."""
    result: Mapping[str, Any] = (state.result if state is not None else None) or {}
    failure, error = result.get("failure") or {}, result.get("error") or {}
    return str(error.get("message") or ""), str(failure.get("process") or "")


def _end(processes: list[dict[str, Any]]) -> str:
    """Return the outcome of a job that was not followed to its end."""
    if any(process["state"] == "failed" for process in processes):
        return "failed"
    done = all(process["state"] in ENDS for process in processes if process["trains"])
    return "done" if done else "ended before it was done"
