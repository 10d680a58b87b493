"""The data for the page: the model's snapshot, and this machine's knowledge of the job."""

from collections.abc import Mapping
from typing import Any

from geomx_cli.jobs.store.job_state import UNDECIDED, JobState
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.observe.dashboard.event_reader import EventReader
from geomx_cli.observe.dashboard.job_model import JobModel

__all__ = ["page_rows", "page_state"]

VERSION = 2


def page_state(job: KnownJob, model: JobModel, events: EventReader) -> dict[str, Any]:
    """Return one object for JSON."""
    state = JobState.read(job.directory)
    shown, over = _shown(state, events)
    cause, failed_first = _cause(state)
    known = model.snapshot(over=over, failed_first=failed_first)
    if over and shown in UNDECIDED:
        shown = model.end() if events.complete else f"{shown}, and not all hosts could be read"
    fields = {"job": job.id, "what": job.what, "state": shown, "over": over, "cause": cause}
    return {"schema_version": VERSION, **fields, **known}


def page_rows(job: KnownJob, model: JobModel, events: EventReader, party: str, first: int) -> dict[str, Any]:
    """Return one object for JSON: processes of a party, see JobModel.rows."""
    state = JobState.read(job.directory)
    return model.rows(party, first, over=_shown(state, events)[1], failed_first=_cause(state)[1])


def _shown(state: JobState | None, events: EventReader) -> tuple[str, bool]:
    """Return the job's state, and whether it is over."""
    shown = state.shown if state is not None else "orphaned"
    return shown, events.over or shown not in UNDECIDED


def _cause(state: JobState | None) -> tuple[str, str]:
    """Return the cause of the job's failure as a sentence, and the process that failed first; "" if there is none."""
    result: Mapping[str, Any] = (state.result if state is not None else None) or {}
    failure, error = result.get("failure") or {}, result.get("error") or {}
    return str(error.get("message") or ""), str(failure.get("process") or "")
