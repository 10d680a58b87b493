"""Whether all processes of a job begin again when a script's worker has died (`--on-worker-loss restart-all`)."""

import time
from collections import deque
from collections.abc import Callable

from geomx_cli.core.root_cause import Failure
from geomx_cli.jobs.view.progress import Progress
from geomx_cli.plan import Plan

__all__ = ["RestartAll"]

_WINDOW = 600.0  # seconds


class RestartAll:
    """Decides once all processes have ended. Not thread-safe.

    A failure before the worker has begun to train would come again, and ends the job, as one does of anything else.

    allowed: as long as nothing has ended the job for good.
    limit: times within 10 minutes.
    """

    def __init__(self, plan: Plan, clock: Callable[[], float] = time.monotonic) -> None:
        self.allowed = plan.spec.options["on_worker_loss"] == "restart-all" and bool(plan.spec.script)
        self.limit = int(plan.spec.options["restarts"])
        self._plan = plan
        self._clock = clock
        self._times: deque[float] = deque()

    def forbid(self) -> None:
        """The job ends for good."""
        self.allowed = False

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
