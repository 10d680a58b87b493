"""Other jobs of this machine, whose curves the page draws beside its own job's curves."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from geomx_cli.core.errors import GeomxError
from geomx_cli.jobs.store.registry import KnownJob, all_jobs
from geomx_cli.observe.dashboard.job_model import EventReader, JobModel
from geomx_cli.observe.dashboard.job_rows import labels

__all__ = ["MOST_COMPARED", "Comparison"]

MOST_COMPARED = 4
MOST_READ = 8  # seconds without a request after which a job is no longer read
MOST_CHOICES = 50
UNASKED = 30.0  # seconds without a request after which a job is read no longer


class _Other:
    """One of the other jobs. Its events are read until `close`. asked: when the page last requested it."""

    def __init__(self, job: KnownJob) -> None:
        self._notes: list[str] = []
        self.asked = 0.0
        self._what = job.what
        self._model = JobModel(job.plan, job.started)
        self._events = EventReader(job, self._model.take, self._note)

    def close(self) -> None:
        self._events.close()

    def to_json(self) -> dict[str, Any]:
        problem = self._notes[-1] if self._notes else ""
        return {"what": self._what, "problem": problem, "reading": not self._events.over, **self._model.overall()}

    def _note(self, text: str) -> None:
        self._notes = [text]


class Comparison:
    """Reads the events of the jobs that pages request, at most 4 for each page and 8 in all. It stops if no page has
    requested any for 30 seconds. Thread-safe.
    """

    def __init__(self, own: str, jobs: Callable[[], list[KnownJob]] = all_jobs) -> None:
        self._own = own
        self._jobs = jobs
        self._known: dict[str, KnownJob] = {}
        self._others: dict[str, _Other] = {}
        self._lock = threading.Lock()

    def choices(self) -> list[dict[str, Any]]:
        """Return the newest 50 other jobs, for JSON. Jobs whose files are damaged are left out."""
        found: list[dict[str, Any]] = []
        with self._lock:
            for listed in self._jobs():
                if listed.id == self._own or len(found) == MOST_CHOICES:
                    continue
                job = self._known.setdefault(listed.id, listed)
                try:
                    shown = {"job": job.id, "what": job.what, "started": job.started}
                except GeomxError:
                    continue
                found.append(shown)
        return found

    def overlays(self, wanted: Sequence[str]) -> dict[str, Any]:
        """Return the curves of the requested jobs, for JSON. Unknown jobs are left out. `problem` tells what is
        missing.
        """
        found: dict[str, Any] = {}
        with self._lock:
            ids = [job for job in dict.fromkeys(wanted) if job in self._known][:MOST_COMPARED]
            for job in ids:
                try:
                    other = self._others.get(job) or _Other(self._known[job])
                except (GeomxError, OSError) as error:
                    found[job] = {"what": "", "problem": str(error).partition("\n")[0], "reading": False}
                    continue
                other.asked = time.monotonic()
                self._others[job] = other
                found[job] = other.to_json()
            unasked = self._unasked(ids)
        for other in unasked:  # takes seconds
            other.close()
        return found

    def labels(self, own: KnownJob, others: Iterable[str]) -> dict[str, str]:
        """Return names that distinguish these jobs, by id; see job_rows.py."""
        with self._lock:
            return labels({own.id: own, **{job: self._known[job] for job in others}})

    def close(self) -> None:
        """Stop reading."""
        with self._lock:
            others, self._others = list(self._others.values()), {}
        for other in others:
            other.close()

    def _unasked(self, ids: Sequence[str]) -> list[_Other]:
        """Remove and return the jobs that are no longer to be read, those with the oldest request first."""
        found = []
        for job, other in sorted(self._others.items(), key=lambda item: item[1].asked):
            late = time.monotonic() - other.asked > UNASKED
            if job not in ids and (late or len(self._others) > MOST_READ):
                found.append(self._others.pop(job))
        return found
