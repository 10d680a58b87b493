"""How long a job's agents may be silent, and its last processes may take to end."""

import time
from dataclasses import replace

from geomx_cli.core.root_cause import Failure
from geomx_cli.jobs.actions.agent_pool import AgentPool
from geomx_cli.jobs.view.follow import View
from geomx_cli.jobs.view.progress import Progress
from geomx_cli.plan import Plan

__all__ = ["LINGER", "SAVING", "STOP_LIMIT", "AgentMonitor", "Linger", "lost"]

STOP_LIMIT = 8.0  # seconds for an agent, beyond the grace of its processes, to end its part after a stop request
_QUIET = 5.0  # seconds after which a silent agent is reported
LINGER = 10.0  # seconds beyond --silence, to end after the last worker, or after a root has saved its optimizer
SAVING = 1800.0  # seconds for that; a state of many GB on a slow disk


def lost(host: str, how: str) -> Failure:
    """The failure of an agent that hangs, died, or breaks the protocol."""
    hint = "its processes were ended; look for what killed or stopped it (agent.log, out of memory, a reboot)"
    return Failure("", host, how, time.monotonic(), hint)


class AgentMonitor:
    """Finds agents that are silent for longer than --silence, or do not stop in time. Not thread-safe.

    Warns through `view` before that, once for each time. `stop_limit`: seconds for an agent to stop.
    """

    def __init__(self, plan: Plan, pool: AgentPool, view: View) -> None:
        self.stop_limit = float(plan.spec.options["grace"]) + STOP_LIMIT
        self._job = plan.job
        self._silence = float(plan.spec.options["silence"])
        self._pool = pool
        self._view = view
        self._quiet: set[str] = set()
        self._awaited: set[str] = set()  # unreachable hosts while the job stops

    def check(self, host: str, awake: float, stopping: float | None) -> Failure | None:
        """Return a failure if the agent of `host` is lost. `awake`: seconds for which this machine has not been
        suspended; `stopping`: seconds, of these, since the job was asked to stop, if it was.
        """
        connection = self._pool.connections[host]
        absence, quiet = connection.absence(), min(connection.silence(), awake)
        silent = quiet > self._silence
        late = stopping is not None and (
            stopping > self.stop_limit or min(stopping, max(absence, quiet)) > STOP_LIMIT
        )
        self._report_silence(host, quiet)
        if absence:
            if silent or late:
                return self.unreachable(host)
            if stopping is not None and host not in self._awaited:
                self._awaited.add(host)
                left = STOP_LIMIT - min(stopping, absence)
                self._view.warn(f"host {host} cannot be reached; waiting for it to stop, for {left:.0f} s at most")
        elif silent:
            return lost(host, f"hangs: it has not answered for {self._silence:g} s")
        elif late:
            return replace(lost(host, f"did not stop within {stopping:.0f} s"), fault="agent")
        return None

    def unreachable(self, host: str) -> Failure:
        """The failure of an agent whose connection is broken; it may still run."""
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - self._pool.connections[host].absence()))
        cause = f"cannot be reached since {since}: its connection broke"
        hint = "its agent ends its processes when the lease expires"
        hint += f"; geomx stop {self._job} cleans up later, geomx doctor checks the machine"
        return Failure("", host, cause, time.monotonic(), hint, fault="host")

    def _report_silence(self, host: str, quiet: float) -> None:
        """Report once that an agent does not answer, and once that it answers again."""
        if quiet > _QUIET and host not in self._quiet:
            self._quiet.add(host)
            limit = f"waiting for it, for {self._silence:g} s at most (--silence)"
            self._view.warn(f"the agent on host {host} has not answered for {quiet:.0f} s; {limit}")
        elif quiet < _QUIET and host in self._quiet:
            self._quiet.discard(host)
            self._view.warn(f"the agent on host {host} answers again")


class Linger:
    """Tells when the processes that are left have had their time. Times are monotonic seconds.

    silence: how long they wait for one another by the job's own rules, as a link may be cut or a process stopped.
    """

    def __init__(self, silence: float) -> None:
        self._limit = silence + LINGER
        self._trained: float | None = None
        self._since = 0.0

    def is_over(self, progress: Progress, now: float, awake: float) -> bool:
        """Whether all workers have ended for too long. `awake`: seconds for which this machine has not slept."""
        if not all(row.status == 0 or row.asked for row in progress.training_rows):
            return False
        if self._trained is None:
            self._trained = self._since = now
        saves = any(row.status is None and row.state == "saving" for row in progress.rows.values())
        if saves and now - self._trained < SAVING:
            self._since = now
        return min(now - self._since, awake) > self._limit
