"""Stop a job, or one party of it, from the control machine: on all hosts in parallel, with verification."""

import shlex
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from geomx_cli.agent import processes
from geomx_cli.agent.processes import ProcessId
from geomx_cli.core.errors import DoneInPart, GeomxError, UsageError
from geomx_cli.core.option import nearest
from geomx_cli.core.root_cause import Failure
from geomx_cli.core.untrusted import first_line
from geomx_cli.hosts import Connector, closing, everywhere
from geomx_cli.hosts.allocation import release
from geomx_cli.jobs.actions.agent_pool import AgentPool
from geomx_cli.jobs.actions.checkpoint_visit import checkpoint_before_stop
from geomx_cli.jobs.actions.streams import ask_agent
from geomx_cli.jobs.store import job_state
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.jobs.view.follow import View
from geomx_cli.jobs.view.job_view import JobView
from geomx_cli.jobs.view.progress import Progress
from geomx_cli.jobs.view.result import Outcome, record_conclusion
from geomx_cli.plan import Plan

__all__ = [
    "AgentMonitor", "HostStop", "LINGER", "Linger", "SAVING", "STOP_LIMIT", "StopReport", "end_launch", "lost",
    "stop",
]  # fmt: skip

# How long a job's agents may be silent, and its last processes may take to end.

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
        suspended. `stopping`: the same since the job was asked to stop; None if it was not.
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


STOP_VERSION = 1
_MARGIN = 20.0  # seconds per host in addition to the grace period
_DID = ("stopped", "killed")
_FOLLOWER = (3.0, 10.0)  # seconds for a launch to end by itself, and after a signal
_LAUNCH = 10.0  # seconds for a launch that has started nothing
_POLL = 0.03


class _AgentReport(msgspec.Struct):
    """The output of agent/stop.py."""

    agent: str
    processes: dict[str, str]
    others: int
    left: list[int]
    note: str


@dataclass(frozen=True)
class HostStop:
    """The result for one host; see agent/stop.py. `problem`: why the result is unknown; "" if it is known."""

    host: str
    agent: str = "?"
    processes: Mapping[str, str] | None = None
    others: int = 0
    note: str = ""
    problem: str = ""

    @property
    def did(self) -> bool:
        """Whether anything was running there."""
        return self.agent in _DID or any(fate in _DID for fate in (self.processes or {}).values())


@dataclass(frozen=True)
class StopReport:
    """One entry per host, in the plan's order.

    problems: other errors.
    party: the only one that was stopped.
    checkpoint: the number of the one that was taken before; None for none.
    ended: how the job had ended before, with nothing left; "" for others. No host was contacted then.
    """

    job: str
    hosts: tuple[HostStop, ...]
    problems: tuple[str, ...] = ()
    party: str = ""
    ended: str = ""
    checkpoint: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The report as one JSON object."""
        hosts = [
            {
                "host": one.host, "agent": one.agent, "processes": dict(one.processes or {}), "others": one.others,
                "note": one.note, "problem": one.problem,
            }
            for one in self.hosts
        ]  # fmt: skip
        known = {"schema_version": STOP_VERSION, "job": self.job, "complete": self.error() is None}
        return {**known, "ended": self.ended or None, "checkpoint": self.checkpoint, "hosts": hosts}

    def error(self) -> DoneInPart | None:
        """The error to raise if something may still run."""
        problems = [*(f"host {one.host}: {one.problem}" for one in self.hosts if one.problem), *self.problems]
        if not problems:
            return None
        again = shlex.join(["geomx", "stop", self.job, *(["--party", self.party] if self.party else [])])
        lost = ", ".join(one.host for one in self.hosts if one.problem and one.processes is None)
        hint = f"{again} when {lost} can be reached" if lost else f"{again} tries again"
        return DoneInPart(f"job {self.job} is only partially stopped: {'; '.join(problems)}", hint)


def stop(
    job: KnownJob, *, party: str = "", grace: float | None = None, note: Callable[[str], object] = lambda text: None
) -> StopReport:
    """End `job` on all its hosts, or only `party`; SIGKILL follows `grace` seconds after SIGTERM, by default the job's.
    Schedulers and servers are ended after the workers of all hosts. Before that the whole job gets a checkpoint, if it
    takes any. note: gets why it has got none.

    Idempotent, also after a launch or an agent was killed. For a job that is known to have ended on all its hosts, no
    host is contacted. If all hosts answered and no other process follows the job, state.json records how it ended.
    Raises UsageError for an unknown party.
    """
    planned = job.plan.processes
    parties = list(dict.fromkeys(process.party for process in planned))
    if party and party not in parties:
        raise UsageError(f"job {job.id} has no party {party!r}", nearest(party, parties))
    if (state := job.state) is not None and state.clean:
        return StopReport(job.id, (), party=party, ended=state.state)
    grace = float(job.plan.spec.options["grace"]) if grace is None else grace
    names = dict.fromkeys(process.host for process in planned if not party or process.party == party)
    with closing(job.open_hosts(names)) as hosts:
        checkpoint = None if party else checkpoint_before_stop(job, hosts, note)
        follower = _follower(job)
        first: Mapping[str, HostStop] = {}
        if len(names) > 1:  # the agent of a single host orders its processes itself
            first = {one.host: one for one in _stop_all(job, hosts, party, grace, workers_first=True).hosts}
        report = _stop_all(job, hosts, party, grace)
        report = replace(report, hosts=tuple(_with_first(one, first.get(one.host)) for one in report.hosts))
        if party:
            return report
        if _end_follower(_follower(job) or follower) and any(one.agent == "was not running" for one in report.hosts):
            report = _stop_all(job, hosts, party, grace)  # the launch may have continued to start processes
        report = replace(report, checkpoint=checkpoint)
        if report.error() is None:
            _record(job, hosts, report)
    return replace(report, problems=release(job.inventory, job.plan.job, note=note))


def end_launch(job: str, who: ProcessId) -> StopReport:
    """End the launch `who`, which has not started anything of `job`. Raises DoneInPart if it keeps running."""
    for number in (signal.SIGTERM, signal.SIGINT):  # shells start what they put in the background with SIGINT ignored
        processes.send_signal([who], number)
        if not _lasts(who, _LAUNCH):
            return StopReport(job, ())
    raise DoneInPart(f"launch (process {who.pid}), which is preparing job {job}, does not exit", "stop it again")


def _lasts(who: ProcessId, limit: float) -> bool:
    """Return whether the process still runs after `limit` seconds."""
    deadline = time.monotonic() + limit
    while processes.exists(who) and time.monotonic() < deadline:
        time.sleep(_POLL)
    return processes.exists(who)


def _stop_all(
    job: KnownJob, hosts: Mapping[str, Connector], party: str, grace: float, *, workers_first: bool = False
) -> StopReport:
    found = everywhere(lambda host: _stop(job, host, party, grace, workers_first=workers_first), hosts.values())
    return StopReport(job.id, tuple(found), party=party)


def _with_first(report: HostStop, first: HostStop | None) -> HostStop:
    """The report of a host with the outcome of its workers, which were stopped first; the rest ended after that."""
    if first is None or first.processes is None or report.processes is None:
        return report

    def fate(before: str, after: str) -> str:
        return before if before in _DID else "stopped" if (before, after) == ("goes on", "had ended") else after

    found = {name: fate(first.processes.get(name, ""), after) for name, after in report.processes.items()}
    return replace(report, processes=found, agent=fate(first.agent, report.agent), others=report.others + first.others)


def _follower(job: KnownJob) -> ProcessId | None:
    """The process that follows the job now."""
    state = job_state.JobState.read(job.directory)
    return ProcessId(state.pid, state.pid_started) if state is not None and state.followed else None


def _end_follower(who: ProcessId | None) -> bool:
    """Return whether a process followed the job. A launch with agents ends when its agents end. A launch that is still
    starting gets a signal.
    """
    if who is None:
        return False
    for limit in _FOLLOWER:
        if _lasts(who, limit):
            processes.send_signal([who], signal.SIGTERM)
    return True


def _stop(job: KnownJob, host: Connector, party: str, grace: float, *, workers_first: bool) -> HostStop:
    words = [job.directory_on(host.name), "--grace", f"{grace:g}", *(["--party", party] if party else [])]
    words += ["--workers-first"] if workers_first else []
    try:
        report = ask_agent(host, "stop", *words, limit=grace + _MARGIN, kind=_AgentReport)
    except (GeomxError, OSError) as error:
        return HostStop(host.name, problem=first_line(error, host.name))
    left = ", ".join(f"pid {pid}" for pid in report.left)
    problem = f"{left} cannot be ended" if left else ""
    return HostStop(host.name, report.agent, report.processes, report.others, report.note, problem)


def _record(job: KnownJob, hosts: Mapping[str, Connector], report: StopReport) -> None:
    """Record how the job ended, unless that is recorded or left to the process that follows it."""
    state = job_state.JobState.read(job.directory)
    if state is None or state.over or state.followed:
        return
    job_view = JobView.of(job, hosts, cleared=True)
    failed_before = job_view.failure is not None and not job_view.stopped_by
    if failed_before or (job_view.over and not any(one.did for one in report.hosts)):
        job_view.conclusion()
        return
    progress, seconds = job_view.progress, max(0.0, time.time() - job.started)
    outcome = Outcome(interrupted=True, stopped_by="geomx stop", saved=progress.all_worked)
    outcome.checkpoint = report.checkpoint
    record_conclusion(job.plan, outcome, progress.totals(), seconds)
