"""Stop a job, or one party of it, from the control machine: on all hosts in parallel, with verification."""

import shlex
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from geomx_cli.agent import processes
from geomx_cli.agent.processes import ProcessId
from geomx_cli.core.errors import DoneInPart, GeomxError, UsageError
from geomx_cli.core.nearest import nearest
from geomx_cli.core.untrusted import first_line
from geomx_cli.hosts import Connector, closing, everywhere
from geomx_cli.hosts.allocation import release
from geomx_cli.jobs.actions.streams import ask_agent
from geomx_cli.jobs.store import job_state
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.jobs.view.job_view import JobView
from geomx_cli.jobs.view.result import Outcome, record_conclusion

__all__ = ["HostStop", "StopReport", "end_launch", "stop"]

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
    ended: how the job had ended before, with nothing left; "" for others. No host was contacted then.
    """

    job: str
    hosts: tuple[HostStop, ...]
    problems: tuple[str, ...] = ()
    party: str = ""
    ended: str = ""

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
        return {**known, "ended": self.ended or None, "hosts": hosts}

    def error(self) -> DoneInPart | None:
        """The error to raise if something may still run."""
        problems = [*(f"host {one.host}: {one.problem}" for one in self.hosts if one.problem), *self.problems]
        if not problems:
            return None
        again = shlex.join(["geomx", "stop", self.job, *(["--party", self.party] if self.party else [])])
        lost = ", ".join(one.host for one in self.hosts if one.problem and one.processes is None)
        hint = f"{again} when {lost} can be reached" if lost else f"{again} tries again"
        return DoneInPart(f"job {self.job} is only partially stopped: {'; '.join(problems)}", hint)


def stop(job: KnownJob, *, party: str = "", grace: float | None = None) -> StopReport:
    """End `job` on all its hosts, or only `party`; SIGKILL follows `grace` seconds after SIGTERM, by default the job's.
    Schedulers and servers are ended after the workers of all hosts.

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
        if report.error() is None:
            _record(job, hosts, report)
    return replace(report, problems=release(job.inventory, job.plan.job))


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
    """Return whether a process followed the job. A launch with agents ends when they do; one that is still starting
    is signalled.
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
    outcome, seconds = Outcome(interrupted=True, stopped_by="geomx stop"), max(0.0, time.time() - job.started)
    record_conclusion(job.plan, outcome, job_view.progress.totals(), seconds)
