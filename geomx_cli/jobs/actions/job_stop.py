"""The end of a job before all is done: who has asked for it, what agents are told, and for whom they wait."""

import time
from collections.abc import Collection, Sequence

from geomx_cli.core.root_cause import Failure
from geomx_cli.core.units import some_of
from geomx_cli.jobs.actions.agent_connection import JsonObject
from geomx_cli.jobs.actions.agent_pool import AgentPool
from geomx_cli.jobs.actions.checkpoint_schedule import CheckpointSchedule
from geomx_cli.jobs.actions.checkpoint_upload import CheckpointUpload
from geomx_cli.jobs.actions.restart_all import RestartAll
from geomx_cli.jobs.view.follow import View
from geomx_cli.jobs.view.progress import Progress
from geomx_cli.jobs.view.result import Outcome
from geomx_cli.plan import Plan

__all__ = ["JobStop"]

_SAVING = 3.0  # seconds until those that take longer to end are named
_NAMED = 4
_PASS_ON = 2.0  # seconds until hosts that `geomx stop` has not reached are told by us
_BEFORE_STOP = 140.0  # seconds for a checkpoint; agents let their processes go on a little earlier
_BEFORE_KILL = 20.0  # the same if SIGKILL may follow, as from Slurm after 30 s
_BY_BATCH_SYSTEM = ("SIGTERM", "SIGUSR1")
_BY_USER = ("Ctrl-C", "SIGTERM", "SIGHUP", "geomx stop")  # after which the same again kills


class JobStop:
    """Stops the job on all hosts. For the main thread.

    since: when that began (time.monotonic seconds); None while the job goes on.
    had_begun: a worker still ran when the user, or another process, asked for the end.
    message: the newest order to all agents, for one that follows a killed agent; {} for none.
    grace: seconds for processes to save and end.
    """

    def __init__(
        self, plan: Plan, pool: AgentPool, progress: Progress, view: View, outcome: Outcome,
        *, restart_all: RestartAll, checkpoint: CheckpointSchedule, upload: CheckpointUpload,
    ) -> None:  # fmt: skip
        self.since: float | None = None
        self.had_begun = False
        self.message: JsonObject = {}
        self.grace = float(plan.spec.options["grace"])
        self._pool = pool
        self._progress = progress
        self._view = view
        self._outcome = outcome
        self._restart_all = restart_all
        self._checkpoint = checkpoint
        self._upload = upload
        self._pass_on: JsonObject = {}  # stop request issued by another process
        self._failing = set[str]()  # workers that handle the job's failure, until they report their end or end
        self._holding = False  # schedulers and servers wait for the end of all workers
        self._awaits_end = False  # the user knows of processes that have not ended yet
        self._awaits_upload = False  # the user knows

    def stop(self, delay: float, who: str = "", *, hold: bool = False) -> None:
        """Order all agents to end their processes after `delay` seconds. hold: schedulers and servers after the workers
        of all hosts.
        """
        if self.since is None:
            self.since, self._holding = time.monotonic(), hold
        again = self._restart_all.allowed
        self.message = {"type": "stop", "delay": delay, "who": who, "hold": self._holding, "again": again}
        self._pool.broadcast(self.message)

    def on_interrupt(self, by: str, running: Collection[str]) -> None:
        """The user or a batch system asks for the end, by Ctrl-C or the signal of this name; a second time for a kill.
        running: hosts whose agents run.
        """
        self._restart_all.forbid()
        if not self._outcome.interrupted:
            self._outcome.stopped_by, self._outcome.interrupted, self._progress.interrupted = by, True, True
            self.had_begun = not self._progress.all_worked
            self._view.warn("stopping (press Ctrl-C again to kill at once)")
            limit = _BEFORE_KILL if by in _BY_BATCH_SYSTEM else _BEFORE_STOP
            self._checkpoint.before(lambda: self.stop(0, by, hold=True), running, limit)
        elif by == "Ctrl-C" or (by != "SIGUSR1" and self._outcome.stopped_by in _BY_USER):
            self.message = {"type": "kill"}
            self._pool.broadcast(self.message)

    def on_stopped_elsewhere(self, who: str, grace: float, failures: Sequence[Failure]) -> bool:
        """Handle a stop that another process requested from an agent, unless the job has failed before. Other hosts may
        see the stop before this notice arrives. Return whether that is new.
        """
        if self._outcome.interrupted or not all(failure.peer for failure in failures):
            return False
        self._restart_all.forbid()
        self._outcome.interrupted, self._outcome.stopped_by = True, who
        # The request may have ended quick workers before this notice.
        self.had_begun = not self._progress.all_worked or self._progress.ended_as_asked
        self._view.warn(f"{who} ends the job")
        self.grace, self.since, self._holding = grace, time.monotonic(), True
        self._pass_on = {"type": "stop", "grace": grace, "who": who}
        return True

    def on_failing(self, process: str, *, is_failing: bool) -> None:
        """A worker has begun to handle the job's failure, or is to end now, and its agent sees that it does."""
        if is_failing:
            self._failing.add(process)
        else:
            self._failing.discard(process)

    def begin_again(self) -> None:
        """All processes begin again: the job goes on."""
        self.since, self.message = None, {}
        self._holding = self._awaits_end = False
        self._failing.clear()

    def check(self, running: Collection[str], stopping: float) -> None:
        """Call regularly, from the stop on. running: hosts whose agents run. stopping: seconds since then, without
        those for which this machine was suspended.
        """
        if self._pass_on and self.since is not None and time.monotonic() - self.since > _PASS_ON:
            self.message = {**self._pass_on, "hold": self._holding}
            self._pool.broadcast(self.message)
            self._pass_on = {}
        rows = [row for row in self._progress.rows.values() if row.process.role == "worker" and row.runs]
        workers = [row.process.name for row in rows if row.process.host in running]
        if self._holding and not workers:  # nobody needs schedulers and servers any more
            self._holding = False
            self._pool.broadcast({"type": "release"})
        if self._failing.intersection(workers):
            self._pool.broadcast({"type": "failing"})
        if stopping > _SAVING:
            self._tell(workers, self.grace - stopping)

    def _tell(self, workers: Sequence[str], left: float) -> None:
        """Name, once, what the end of the job waits for."""
        if not workers and not self._awaits_upload and self._upload.delays_end(time.monotonic()):
            self._awaits_upload = True
            self._view.note("waiting for the upload of the checkpoint, for 10m at most")
        if workers and left > 1 and not self._awaits_end:
            self._awaits_end = True
            what = f"waiting for {some_of(workers, _NAMED)} to save and end, for {left:.0f} s at most (--grace)"
            self._view.note(f"{what}; Ctrl-C {'again ' if self._outcome.interrupted else 'twice '}kills at once")
