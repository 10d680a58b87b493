"""A snapshot of a job from its hosts, for `geomx status` and for the outcome of a job that has ended."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from geomx_cli.agent.status import FILE_NAME
from geomx_cli.core.agent_protocol import failures_of
from geomx_cli.core.agent_status import AgentStatus
from geomx_cli.core.errors import GeomxError
from geomx_cli.core.root_cause import Failure, first_cause
from geomx_cli.core.untrusted import decode, first_line
from geomx_cli.hosts import Connector, everywhere
from geomx_cli.hosts.allocation import release
from geomx_cli.jobs.store.job_state import JobState
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.jobs.view.failure_report import explain, failure_fields
from geomx_cli.jobs.view.outputs import model_of, summary_line
from geomx_cli.jobs.view.progress import Progress
from geomx_cli.jobs.view.reducer import ProcessState
from geomx_cli.jobs.view.result import RESUMABLE, Conclusion, Outcome, record_conclusion
from geomx_cli.jobs.view.table import party_totals

__all__ = ["HostStatus", "JobView", "read_all"]

# The status files of a job's agents, read from their hosts without contacting the agents.

_LIMIT = 10.0
_SILENT = 5.0  # seconds; agents write every second
_KERNEL = ("/proc/sys/kernel/hostname", "/proc/uptime", "/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class HostStatus:
    """One host's status.json (`content`, None if missing) and its age when read, in seconds by that host's own clock.
    `problem`: an error to report to the user; "" if there is none.
    """

    host: str
    content: AgentStatus | None = None
    late: float = 0.0
    agent: str = ""
    problem: str = ""

    @property
    def reachable(self) -> bool:
        """Whether the host answered, and it is the machine that the agent was started on."""
        return self.agent not in ("unreachable", "elsewhere")

    @property
    def over(self) -> bool:
        """Whether nothing of the job can run there any more, as far as known."""
        return self.agent in ("over", "rebooted", "not started")


def read_all(job: KnownJob, hosts: Mapping[str, Connector]) -> dict[str, HostStatus]:
    """Read the status of each host, in parallel; a host that does not answer has a `problem`."""

    def read(host: Connector) -> HostStatus:
        try:
            return _read(host, job.directory_on(host.name))
        except (GeomxError, OSError) as error:
            return HostStatus(host.name, agent="unreachable", problem=first_line(error, host.name))

    return {status.host: status for status in everywhere(read, hosts.values())}


def _read(host: Connector, directory: str) -> HostStatus:
    done = host.run(["cat", f"{directory}/{FILE_NAME}", *_KERNEL], limit=_LIMIT)
    lines = done.output.decode(errors="replace").splitlines()
    if len(lines) <= len(_KERNEL) and done.status != 0:
        return HostStatus(host.name, agent="not started", problem="no agent status was found there")
    try:
        content = decode(lines[0], AgentStatus)
        late = max(0.0, float(lines[-2].split()[0]) - content["uptime"])
        alive = late > _SILENT and lines[-1] == content["boot"] and _lives(host, content)
        return _judge(host.name, content, late, lines[-1], lines[-3], alive=alive)
    except (ValueError, IndexError):
        return HostStatus(host.name, agent="damaged", problem=f"{directory}/{FILE_NAME} is damaged")


def _lives(host: Connector, content: AgentStatus) -> bool:
    """Return whether the agent that wrote `content` still runs."""
    pid, started = content["agent"]
    done = host.run(["cat", f"/proc/{pid}/stat"], limit=_LIMIT)
    fields = done.output.decode(errors="replace").rpartition(")")[2].split()
    return len(fields) > 19 and fields[0] not in "ZX" and fields[19] == str(started)


def _judge(host: str, content: AgentStatus, late: float, boot: str, machine: str, *, alive: bool) -> HostStatus:
    """Return the state of the agent. `boot`, `machine`: where the file was read; machines may share their files."""
    if content["stage"] == "over":
        return HostStatus(host, content, late, "over")
    if content["boot"] != boot and content["machine"] != machine:
        problem = f"it was started on {content['machine']}, and this is {machine}: whether it runs is known there"
        return HostStatus(host, content, 0.0, "elsewhere", problem)
    if content["boot"] != boot:
        return HostStatus(host, content, 0.0, "rebooted", "the host has rebooted; no process of the job runs there")
    if late > _SILENT and alive:
        problem = f"its agent runs, but has not written its status for {late:.0f} s (is the disk full, does it hang?)"
        return HostStatus(host, content, late, "silent", problem)
    if late > _SILENT:
        problem = f"its agent was killed: no status for {late:.0f} s, and it no longer runs"
        return HostStatus(host, content, late, "gone", problem)
    return HostStatus(host, content, late, "running")


_SCHEMA_VERSION = 1


@dataclass(frozen=True)
class JobView:
    """`failure`: as recorded at the job's end, else the first one known to reachable hosts. `stopped_by`: who requested
    the stop, if that came before. `cleared`: see `of`.
    """

    job: KnownJob
    known: JobState | None  # the local state at that moment
    progress: Progress
    hosts: Mapping[str, HostStatus]
    failure: Failure | None
    stopped_by: str
    cleared: bool = False

    @classmethod
    def of(cls, job: KnownJob, hosts: Mapping[str, Connector], *, cleared: bool = False) -> "JobView":
        """Query all hosts in parallel. A host that does not answer is in `hosts` with its problem. cleared: no process
        of the job runs any more, even if the status of a lost agent lists some.
        """
        known = JobState.read(job.directory)
        cleared = cleared or (known is not None and known.over)
        statuses = read_all(job, hosts)
        progress = Progress.of(job.plan, time.monotonic() - max(0.0, time.time() - job.started))
        places = {process.name: process.host for process in job.plan.processes}
        failures = []
        for name, status in statuses.items():
            failures += _merge_status(progress, status, places, cleared=cleared)
            if status.agent != "running":
                _mark_unknown(progress, name, status)
        if _unstarted(statuses):
            cause = f"was never started: there is nothing in {job.directory_on(job.plan.hosts[0])}"
            failures.append(Failure("", job.plan.hosts[0], cause, time.monotonic(), "launch again"))
        if any(failure.peer for failure in failures):
            failures += _unreachable(statuses)
        done = [name for name, row in progress.rows.items() if row.status == 0]
        recorded = _recorded(known)
        failure = recorded or first_cause(failures, places, done) or progress.abandoned()
        if failure is not None:
            progress.mark_first_failure(failure)
        if known is not None and known.over:
            progress.ended = "finished" if known.state.startswith("done") else "stopped"
        asked = [status.content["asked"] for status in statuses.values() if status.content]
        by = "" if any(not failure.peer for failure in failures) else next(filter(None, asked), "")
        if recorded is not None:
            by = ""
        elif failure is not None and failure.process and progress.rows[failure.process].asked:
            by = f"geomx stop --party {progress.rows[failure.process].process.party}"
        return cls(job, known, progress, statuses, failure, by, cleared)

    @property
    def over(self) -> bool:
        """Whether the job has ended on all its hosts. False for a job about to start."""
        return all(status.over for status in self.hosts.values()) and not self.begins

    @property
    def ended(self) -> bool:
        """Whether the job has ended, as its hosts say or as was recorded here."""
        return self.over or (self.known is not None and self.known.over)

    @property
    def begins(self) -> bool:
        """Whether the job is about to start."""
        followed = self.known is not None and (self.known.followed or self.known.elsewhere)
        return followed and _unstarted(self.hosts)

    @property
    def unreachable(self) -> list[HostStatus]:
        """The hosts that did not answer."""
        return [status for status in self.hosts.values() if not status.reachable]

    @property
    def state(self) -> str:
        """The state as a short text. The hosts' state takes precedence over the local one."""
        state = self.known.shown if self.known else "orphaned"
        if state in ("running", "detached", "orphaned") and self.over:
            return self._outcome_state()
        return state

    @property
    def outputs_line(self) -> str:
        """Where the model or the other outputs are, as "model: HOST:PATH"; "" if nothing has been saved."""
        outputs = self.progress.totals().outputs
        job = self.job.plan.job
        name, text = summary_line({"job": job, "outputs": outputs, "model": model_of(outputs, self.job.plan)})
        return f"{name}: {text}" if name else ""

    @property
    def verdict(self) -> str:
        """What ended the job, with a hint, as was recorded at its end; "" if nothing is known to have."""
        if self.stopped_by:
            resumable = f"\n  {RESUMABLE}" if self.over and self.outcome().resumable else ""
            return f"it was stopped by {self.stopped_by}{resumable}"
        words = self.known.error if self.known is not None else None
        if words is None and self.failure is not None:
            error = explain(self.failure, self.job.plan)
            words = error.message, error.hint
        return "" if words is None else "\n  ".join(words)

    def outcome(self) -> Outcome:
        """The outcome; only for a job that has ended."""
        interrupted, saved = bool(self.stopped_by), self.progress.all_worked
        return Outcome(failure=self.failure, interrupted=interrupted, stopped_by=self.stopped_by, saved=saved)

    def conclusion(self) -> Conclusion:
        """Return the conclusion of an ended job; record it in state.json if missing, and release its machines."""
        plan, outcome, state = self.job.plan, self.outcome(), JobState.read(self.job.directory)
        if state is None or state.over or state.followed:
            return Conclusion.of(plan, outcome, self.progress.totals(), self.seconds())
        if not self.cleared:
            for host, status in self.hosts.items():
                left = status.content["left"] if status.content is not None else []
                outcome.problems += [f"{what} on {host} could not be ended" for what in left]
        outcome.problems += release(self.job.inventory, plan.job)
        return record_conclusion(plan, outcome, self.progress.totals(), self.seconds())

    def to_json(self, *, by_party: bool = False) -> dict[str, Any]:
        """The snapshot as one JSON object, with "processes", or "parties" in place of them."""
        progress = self.progress
        processes = {"processes": [_row(row, self.hosts) for row in progress.rows.values()]}
        parties = {"parties": [one.to_json() for one in party_totals(progress)]}
        return {
            "schema_version": _SCHEMA_VERSION,
            "job": self.job.plan.job,
            "state": self.state,
            "phase": progress.phase,
            "progress": progress.done,
            "left_s": progress.left_s,
            "totals": progress.totals().to_json(),
            **(parties if by_party else processes),
            "hosts": [
                {"host": one.host, "agent": one.agent, "late_s": one.late, "problem": one.problem}
                for one in self.hosts.values()
            ],
            "failure": failure_fields(self.failure) if self.failure else None,
        }

    def _outcome_state(self) -> str:
        return self.outcome().status

    def seconds(self) -> float:
        """Seconds from the start to the last agent message, independent of the hosts' clocks."""
        late = [status.late for status in self.hosts.values() if status.content and status.agent != "rebooted"]
        return max(0.0, time.time() - min(late, default=0.0) - self.job.started)


def _unstarted(hosts: Mapping[str, HostStatus]) -> bool:
    return all(status.agent == "not started" for status in hosts.values())


def _recorded(known: JobState | None) -> Failure | None:
    """The failure that was recorded at the end of the job."""
    if known is None or (fields := known.failure) is None:
        return None
    cause, hint = fields["cause"], fields["hint"]
    return Failure(fields["process"], fields["host"], cause, time.monotonic(), hint, tail=fields["tail"])


def _unreachable(hosts: Mapping[str, HostStatus]) -> list[Failure]:
    """Hosts that do not answer, as causes of what processes blame on those there."""
    hint, now = "geomx doctor checks the machine", time.monotonic()
    lost = [one for one in hosts.values() if one.agent == "unreachable"]
    return [Failure("", one.host, f"cannot be reached: {one.problem}", now, hint, fault="host") for one in lost]


def _merge_status(progress: Progress, status: HostStatus, places: Mapping[str, str], *, cleared: bool) -> list[Failure]:
    """Merge a host's status into `progress`; return the failures it reports. `cleared`: see JobView.of."""
    content, host = status.content, status.host
    if content is None:
        return []
    progress.apply_snapshot(host, content, status.late)
    now = time.monotonic() - status.late
    failures = list(failures_of(content, status.late, host, places))
    if status.agent in ("gone", "rebooted"):
        hint = "look for what killed it, and launch again" if cleared else "geomx stop ends what is left"
        failures.append(Failure("", host, f"is gone: {status.problem}", now, hint))
    elif content["why"] and not content["asked"] and not content["ordered"] and not failures:
        failures.append(Failure("", host, f"ended its processes: {content['why']}", now, "launch again"))
    return failures


def _mark_unknown(progress: Progress, host: str, status: HostStatus) -> None:
    """Mark the processes of a host without a running agent as unknown."""
    for row in progress.rows.values():
        if row.process.host == host and row.status is None:
            row.state = "not started" if status.agent in ("not started", "over") else f"? {status.agent}"


def _row(row: ProcessState, hosts: Mapping[str, HostStatus]) -> dict[str, Any]:
    process, content = row.process, hosts[row.process.host].content
    known = content["processes"].get(process.name) if content else None
    names = ("loss", "accuracy", "progress", "left_s", "status", "asked")
    return {
        **{name: getattr(process, name) for name in ("name", "host", "party", "role", "rank", "global_rank")},
        "pid": known["pid"] if known else 0,
        "state": row.state,
        "restarts": row.restarts,
        "round": row.round,
        "step": row.step,
        "metrics": row.metrics,
        "samples_per_s": row.current_rate,
        **{name: getattr(row, name) for name in names},
        "bytes": {"lan": list(row.traffic.lan), "wan": list(row.traffic.wan)},
    }
