"""Reattach to a job that is detached or has lost its launch."""

import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack

from geomx_cli.agent.host_spec import HostSpec
from geomx_cli.core.errors import (
    CheckFailed,
    DoneInPart,
    GeomxError,
    HostUnreachable,
    Interrupted,
    InvalidSettings,
    Resumable,
    TimedOut,
    TrainingFailed,
)
from geomx_cli.core.untrusted import first_line
from geomx_cli.hosts import Connector, closing, everywhere
from geomx_cli.hosts.allocation import release
from geomx_cli.jobs.actions.agent_connection import Gone, interrupts_to, suspends_to
from geomx_cli.jobs.actions.agent_pool import AgentPool
from geomx_cli.jobs.actions.logs import LogReader
from geomx_cli.jobs.actions.watch import Watch
from geomx_cli.jobs.store import job_state
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.jobs.view.follow import View, view_for
from geomx_cli.jobs.view.job_view import JobView
from geomx_cli.jobs.view.progress import Progress
from geomx_cli.jobs.view.result import Conclusion, Outcome, record_conclusion
from geomx_cli.plan import Plan, Process

__all__ = ["Tee", "attach", "rank_zero"]

# The output of one process among the progress that launch shows.

_MOST = 200  # lines per update; further ones are counted
_ENDING = 5.0  # seconds for the last lines to arrive


def rank_zero(plan: Plan) -> Process:
    """The worker of global rank 0."""
    return next(process for process in plan.processes if process.global_rank == 0)


class Tee:
    """Prints the output of `process` in a view, each line after its name, as `geomx logs` does.

    The first `print_new` starts to read, as agents run by then. A host that is lost is reported, and read again as long
    as the job runs; errors never end the job.
    """

    def __init__(self, view: View, job: KnownJob, process: Process) -> None:
        self._view = view
        self._job = job
        self._process = process
        self._lines: deque[str] = deque()
        self._reader: LogReader | None = None
        self._thread: threading.Thread | None = None

    def print_new(self) -> None:
        """Print the lines that have come since the last call; of more than 200 the first and the last ones."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="tee", daemon=True)
            self._thread.start()
        count = len(self._lines)
        for number in range(count):
            line = self._lines.popleft()
            if number < _MOST // 2 or number >= count - _MOST // 2:
                self._view.note(line)
            elif number == _MOST // 2:
                self._view.note(f"{self._process.name} | ... {count - 2 * (_MOST // 2)} lines are in its log ...")

    def finish(self) -> None:
        """Print the last lines, within _ENDING seconds. The job has ended on the host of the process, its host was
        given up, or the launch fails.
        """
        if self._thread is not None:
            end = time.monotonic() + _ENDING
            self._thread.join(_ENDING)
            if self._reader is not None:  # a lost host may keep its connection from closing
                closing = threading.Thread(target=self._reader.close, name="tee end", daemon=True)
                closing.start()
                closing.join(max(0.0, end - time.monotonic()))
            self.print_new()

    def _read(self) -> None:
        try:
            self._reader = LogReader(self._job, [self._process], self._lines.append)
            for line in self._reader.follow():
                self._lines.append(f"{line.process} | {line.text}")
        except (GeomxError, OSError) as error:
            self._lines.append(f"the output of {self._process.name} cannot be read: {first_line(error)}")


_ATTEMPTS = 5
_ERRORS = (
    TrainingFailed, InvalidSettings, HostUnreachable, CheckFailed, TimedOut, DoneInPart, Resumable, Interrupted,
)  # fmt: skip


def attach(job: KnownJob, view: View | None = None) -> Conclusion:
    """Follow `job` to its end as launch does, with the same result and errors, or until the user detaches again, with
    an empty result and no error. Call it from the main thread. `view`: as in LaunchOptions.

    Ctrl-C disconnects from a detached job, which continues; it stops any other job; one that comes after the job's end
    does not keep the end from being recorded. A job that has ended meanwhile is summarized. Raises InvalidSettings
    while another geomx follows the job, HostUnreachable if a host cannot be reached; in both cases nothing has
    changed.
    """
    state = job.state
    if state is not None and state.followed:
        hint = f"look at it with geomx status --watch {job.id}, or end that process"
        raise InvalidSettings(f"job {job.id} is followed by process {state.pid} already", hint)
    if state is not None and state.over:
        return _again(state)
    with ExitStack() as handlers, closing(job.open_hosts()) as hosts:  # signals are handled to the very end
        detaches = state is not None and state.state == "detached"
        for _ in range(_ATTEMPTS):
            job_view = JobView.of(job, hosts)
            if job_view.over:
                return job_view.conclusion()
            end = _follow(job, hosts, job_view, view or view_for(), handlers, detaches=detaches)
            if end is not None:
                return end
            handlers.close()
    what = f"job {job.id} has ended on some of its hosts, whose status does not say so"
    raise CheckFailed(what, f"see geomx status {job.id}; geomx stop {job.id} ends what is left")


def _again(state: job_state.JobState) -> Conclusion:
    """Rebuild the result that launch reported at the end of the job."""
    found, error = state.result or {}, None
    if words := found.get("error"):
        kind = next(kind for kind in _ERRORS if kind.exit_code == found["exit_code"])
        error = kind(words["message"], words["hint"])
    return Conclusion(found if "total_s" in found else {}, error)


def _follow(
    job: KnownJob, hosts: Mapping[str, Connector], job_view: JobView, view: View, handlers: ExitStack, *,
    detaches: bool,
) -> Conclusion | None:  # fmt: skip
    """Return the job's conclusion at its end, an empty one if the user detaches, and None if an agent has ended since
    `job_view` was made. From when agents are asked, signals are handled by what is put on `handlers`.
    """
    host_specs = dict(everywhere(lambda host: (host.name, _host_spec(job, host)), hosts.values()))
    progress = Progress.of(job.plan, job_view.progress.began)
    pool = AgentPool(hosts, host_specs, view.warn)
    handlers.enter_context(interrupts_to(pool.inbox, pool.interrupt))
    try:
        _replay_ended(pool, job_view)
        if not pool.follow([name for name, status in job_view.hosts.items() if not status.over]):
            pool.leave()
            pool.close()
            return None
        job_state.follow(job.directory)
        how = "Ctrl-C detaches" if detaches else "Ctrl-C stops it"
        view.note(f"job {job.id}: following again; {how}")
        with suspends_to(pool.inbox):
            outcome = Watch(job.plan, pool, progress, view, detaches=detaches).run()
        if outcome.left:
            pool.leave()
            view.warn(outcome.left)
        outcome.problems += pool.close()
    except BaseException:
        pool.leave()
        pool.close()
        if detaches:
            job_state.detach(job.directory)
        raise
    finally:
        view.close()
    return _conclusion(job, outcome, progress, pool, view)


def _conclusion(job: KnownJob, outcome: Outcome, progress: Progress, pool: AgentPool, view: View) -> Conclusion:
    if outcome.left:
        job_state.detach(job.directory)
        return Conclusion()
    outcome.problems += release(job.inventory, job.plan.job, note=view.warn)
    end = record_conclusion(job.plan, outcome, progress.totals(), time.monotonic() - progress.began)
    return end.with_late_interrupt(pool.interrupted, job.id)


def _replay_ended(pool: AgentPool, job_view: JobView) -> None:
    """Report, for hosts whose part is over, what their agents would send."""
    for name, status in job_view.hosts.items():
        if status.over and status.content is not None:
            content = status.content
            pool.inbox.put((name, {"type": "hello", "status": content, "late": status.late}))
            why = "" if content["ordered"] else content["why"]
            done = {"type": "done", "why": why, "left": content["left"], "asked": content["asked"]}
            pool.inbox.put((name, done if status.agent == "over" else Gone(status.problem)))


def _host_spec(job: KnownJob, host: Connector) -> HostSpec:
    """Read the HostSpec of `host`'s agent from the host."""
    path = f"{job.directory_on(host.name)}/agent.json"
    try:
        return HostSpec.decode(host.get(path))
    except (OSError, ValueError):
        hint = f"geomx stop {job.id} ends what runs there"
        raise CheckFailed(f"{path} on host {host.name} is missing or damaged", hint) from None
