"""Whether all processes of a job begin again when a script's worker has died (`--on-worker-loss restart-all`)."""

import time
from collections import deque
from collections.abc import Callable

from geomx_cli.core.root_cause import Failure
from geomx_cli.jobs.actions.agent_connection import JsonObject
from geomx_cli.jobs.view.progress import Progress
from geomx_cli.plan import Plan

__all__ = ["RestartAll"]

_WINDOW = 600.0  # seconds


class RestartAll:
    """Decides once all processes have ended. Not thread-safe.

    A failure before the worker has begun to train would come again, and ends the job, as one does of anything else.

    allowed: as long as nothing has ended the job for good.
    limit: times within 10 minutes.
    emptied: hosts on which all processes have ended, and whose agents wait to be told whether they begin again.
    how: the newest restart came about, for the user.
    """

    def __init__(self, plan: Plan, clock: Callable[[], float] = time.monotonic) -> None:
        self.allowed = plan.spec.options["on_worker_loss"] == "restart-all" and bool(plan.spec.script)
        self.limit = int(plan.spec.options["restarts"])
        self._plan = plan
        self._clock = clock
        self._times: deque[float] = deque()
        self.emptied = set[str]()
        self.how = ""
        self._order: JsonObject | None = None

    def forbid(self) -> None:
        """The job ends for good."""
        self.allowed = False

    def on_emptied(self, host: str, *, stopping: bool) -> JsonObject | None:
        """All processes of a host have ended. Return the order to its agent, if it has missed what was decided: it has,
        unless the job is `stopping`.
        """
        if not stopping:
            return self._order
        self.emptied.add(host)
        return None

    def begin_again(self, cause: Failure | None, progress: Progress) -> JsonObject | None:
        """Return the order to all agents to start all processes again; None if the job ends instead, for good.

        cause: the root cause.
        """
        self.emptied.clear()
        count = self.decide(cause, progress)
        if not count or cause is None:
            self.forbid()
            return None
        how = f"{cause.process} {cause.cause}"
        self.how = f"{how}; all workers begin again ({count} of {self.limit})"
        together = 1 + max(row.together for row in progress.rows.values())
        self._order = {"type": "again", "count": together, "how": how}
        return self._order

    def decide(self, failure: Failure | None, progress: Progress) -> int:
        """Count a restart of the whole job, and return which one within 10 minutes it is; 0 if the job ends instead.

        failure: the root cause.
        """
        if not self.allowed or failure is None or not failure.process or failure.fault:
            return 0
        row = progress.rows[failure.process]
        if row.process.role != "worker" or row.asked or row.trains_since is None:
            return 0
        now = self._clock()
        while self._times and now - self._times[0] > _WINDOW:
            self._times.popleft()
        if len(self._times) >= self.limit:
            return 0
        self._times.append(now)
        return len(self._times)
