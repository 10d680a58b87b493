"""Runs a job from start to end: handles process failures, lost agents, and the user's stop."""

import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from queue import Empty
from typing import Any

from geomx_cli.contract.frontends import joining
from geomx_cli.core import events
from geomx_cli.core.agent_protocol import (
    Done,
    Emptied,
    Ended,
    Failed,
    Frozen,
    Halted,
    Hello,
    Kept,
    Logged,
    Published,
    Replaced,
    Restarted,
    Started,
    Stopping,
    Uploaded,
    Warned,
    failure_of,
    failures_of,
    parse,
)
from geomx_cli.core.agent_status import AgentStatus
from geomx_cli.core.conventions import party_of
from geomx_cli.core.events import ProcessFailed, ProcessLeft, StateChanged, WarningRaised
from geomx_cli.core.root_cause import Failure, first_cause
from geomx_cli.core.units import format_duration
from geomx_cli.jobs.actions.agent_connection import (
    Broken,
    Gone,
    InboxMessage,
    Interrupt,
    JsonObject,
    Mended,
    Notice,
    Suspend,
)
from geomx_cli.jobs.actions.agent_pool import AgentPool
from geomx_cli.jobs.actions.checkpoint_schedule import CheckpointSchedule
from geomx_cli.jobs.actions.checkpoint_upload import CheckpointUpload
from geomx_cli.jobs.actions.group_restarts import GroupRestarts
from geomx_cli.jobs.actions.job_stop import JobStop
from geomx_cli.jobs.actions.restart_all import RestartAll
from geomx_cli.jobs.actions.stop import STOP_LIMIT, AgentMonitor, Linger, lost
from geomx_cli.jobs.view.follow import Observer, View
from geomx_cli.jobs.view.progress import Progress
from geomx_cli.jobs.view.reducer import left_at
from geomx_cli.jobs.view.result import Outcome
from geomx_cli.plan import Plan

__all__ = ["Watch"]

_TURN = 0.25
_ASLEEP = 1.5  # seconds; a longer loop iteration means this machine was suspended (sleep, SIGSTOP)
_LATE = 3.0  # seconds; the age of an older warning is told
_FAILING = 2.0  # seconds for processes to end by themselves after a failure, before SIGTERM
_ABSENT = 3.0  # seconds after a worker's end for its scheduler to stop waiting for it
_HEARD = 4096  # newest events of a process


class Watch:
    """Follows a job to its end; the main thread runs it.

    The first failure ends the job: after a grace period in which processes may end by themselves, all agents stop them.
    With `--on-worker-loss restart-all` all agents then start all processes again, if a script's worker has failed.
    A lost agent (its stream ended, or it does not answer) is a failure too; its processes are ended on its behalf. An
    Interrupt in the pool's inbox stops the job, a second one kills it, unless it may be a batch system's: that sends
    signals to any process, and SIGUSR1 before SIGTERM. With `detaches`, or if another geomx takes the job over, the job
    is released instead. A Suspend stops this process until it is continued.

    observer: is open.
    on_listening: called once the job has bound its ports.
    on_turn: called several times a second, before the view is updated.
    warned: warnings that are not shown again.
    """

    def __init__(
        self, plan: Plan, pool: AgentPool, progress: Progress, view: View, *, detaches: bool = False,
        observer: Observer | None = None, on_listening: Callable[[], None] = lambda: None,
        on_turn: Callable[[], None] = lambda: None, warned: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._on_listening, self._on_turn = on_listening, on_turn
        self._observer = observer
        self._detaches = detaches
        self._plan = plan
        self._pool = pool
        self._progress = progress
        self._view = view
        self._hosts = {process.name: process.host for process in plan.processes}
        self._running, self._started = set(plan.hosts), set[str]()
        self._clocks: dict[str, float] = {}  # by host: our monotonic clock less the job's clock there
        self._monitor = AgentMonitor(plan, pool, view)
        self._warned = set(warned)
        self._failures: list[Failure] = []
        self._heard: dict[str, deque[int]] = {}  # numbers of events, by process
        self._linger = Linger(float(plan.spec.options["silence"]))
        self._restart_all = RestartAll(plan)
        self._group_restarts = GroupRestarts(plan)
        self._last_turn = self._awake_since = time.monotonic()
        every = float(plan.spec.options["checkpoint_every"]) if plan.spec.options["restarts"] else 0.0
        place = str(plan.spec.options["checkpoint_to"])

        def tell(problem: str) -> None:
            view.warn(f"warning: {problem}")

        def tell_of_upload(problem: str, is_there: bool) -> None:
            tell(f"{'' if is_there else f'no checkpoint in {place}: '}{problem}; the next one tries again")

        self._upload = CheckpointUpload(pool.send, plan.hosts[0], place, tell_of_upload)
        self._checkpoint = CheckpointSchedule(plan.hosts, pool.send, every, tell, self._upload.begin)
        self._outcome = Outcome()
        self._stop = JobStop(
            plan, pool, progress, view, self._outcome,
            restart_all=self._restart_all, checkpoint=self._checkpoint, upload=self._upload,
        )  # fmt: skip

    def run_until_started(self) -> Outcome | None:
        """Return None once every process runs with its ports bound; the outcome if the job ended before."""
        while self._running and (self._stop.since is not None or not self._is_up()):
            self._turn()
        return self.run() if self._stop.since is not None or not self._running else None

    def _is_up(self) -> bool:
        return len(self._started) == len(self._hosts) and self._progress.listening

    def run(self) -> Outcome:
        """Return the outcome once every host's part is over or was given up."""
        while self._running:
            self._turn()
        rows, failure = self._progress.rows, self._first_cause()
        if failure is not None and failure.process and rows[failure.process].asked:
            party = rows[failure.process].process.party
            self._outcome.interrupted, self._outcome.stopped_by = True, f"geomx stop --party {party}"
        self._outcome.failure = failure
        self._outcome.checkpoint, self._outcome.uploaded = self._checkpoint.newest, self._upload.newest is not None
        self._outcome.saved = self._outcome.interrupted and self._stop.had_begun and self._progress.all_worked
        return self._outcome

    def _first_cause(self) -> Failure | None:
        done = [name for name, row in self._progress.rows.items() if row.status == 0]
        return first_cause(self._failures, self._hosts, done) or self._progress.abandoned()

    def _warn(self, process: str, message: str, late: float, *, common: bool) -> None:
        """Show a warning, `late` seconds old; a common one is shown once for all processes."""
        if message in self._warned:
            return
        if common:
            self._warned.add(message)
        ago = f" ({format_duration(late)} ago)" if late > _LATE else ""
        self._view.warn(f"{process}: {message}{ago}")

    def _turn(self) -> None:
        for host, message in self._messages():
            self._handle(host, message)
        if self._progress.listening:
            self._on_listening()
        self._check(time.monotonic())
        self._on_turn()
        self._view.show(self._progress)

    def _messages(self) -> list[tuple[str, JsonObject | InboxMessage]]:
        """Return the pending messages, after a short wait for the first."""
        inbox = self._pool.inbox
        try:
            messages = [inbox.get(timeout=_TURN)]
        except Empty:
            return []
        while not inbox.empty():
            messages.append(inbox.get_nowait())
        return messages

    def _handle(self, host: str, message: JsonObject | InboxMessage) -> None:
        if isinstance(message, InboxMessage):
            self._handle_local(host, message)
            return
        try:
            known = parse(message, host, self._hosts)
        except ValueError as error:
            if host in self._running:
                self._give_up(lost(host, f"sent an invalid message: {error}"))
            return
        match known:
            case Logged(process, fields, age):
                self._handle_event(host, process, fields, age)
            case Warned(text):
                self._view.warn(f"warning: host {host}: {text}")
            case Hello(status, late):
                self._apply_snapshot(host, status, late)
                if self._stop.message and status["stage"] in ("waiting", "running"):  # this agent follows a killed one
                    self._pool.connections[host].send(self._stop.message)
                if status["stage"] == "emptied":
                    self._on_emptied(host)
                self._checkpoint.on_lost(host, "its connection broke")  # if it had been asked for anything before
                self._upload.on_hello(host)
            case Started(process):
                self._started.add(process)
            case Emptied():
                self._on_emptied(host)
            case Halted(process, died, how) if self._stop.since is None:
                for each, order in self._group_restarts.on_halted(host, party_of(process), died, how):
                    self._pool.connections[each].send(order)
            case Restarted(process, _, how, count, limit):
                self._view.warn(f"{process} {how}; started again ({count} of {limit})")
            case Ended(process, status, asked):
                self._progress.record_end(process, status, asked=asked)
            case Failed(fields, age):
                self._fail(failure_of(fields, host, time.monotonic() - age))
            case Stopping(who, grace):
                self._on_stopped_elsewhere(who, grace)
            case Done(why, asked, left):
                if asked:
                    self._on_stopped_elsewhere(asked, self._stop.grace)
                self._finish_host(host, why, left)
            case Frozen() | Kept():
                self._checkpoint.on_message(host, known)
            case Uploaded() | Published():
                self._upload.on_message(host, known)
            case Replaced():
                self._release_job("another geomx is attached to the job now")

    def _handle_event(self, host: str, process: str, fields: Mapping[str, Any], age: float) -> None:
        try:
            event = events.parse(fields)
        except ValueError:  # a script may write anything to its event log
            return
        if event is None or not self._is_new(process, event.number):
            return
        # Events that are sent again, as after attach, have the age of their first sending.
        when = min(time.monotonic() - age, event.time + self._clocks.get(host, math.inf))
        self._progress.apply(process, event, max(self._progress.began, when))
        if self._observer is not None:
            self._observer.on_event(process, event)
        if isinstance(event, ProcessFailed) or (isinstance(event, StateChanged) and event.state == "failing"):
            self._stop.on_failing(process, is_failing=isinstance(event, StateChanged))
        if isinstance(event, ProcessLeft):
            how = f"{event.message}; it {left_at(event)}"
            self._warn(process, how, time.monotonic() - when, common=False)
            if (failure := self._progress.abandoned()) is not None:
                self._fail(failure)
        if isinstance(event, WarningRaised):
            self._warn(process, event.message, time.monotonic() - when, common=event.common)

    def _is_new(self, process: str, number: int) -> bool:
        """Whether an event is heard for the first time: an agent that follows a killed one tells the newest again."""
        heard = self._heard.setdefault(process, deque(maxlen=_HEARD))
        if number and number in heard:
            return False
        heard.append(number)
        return True

    def _handle_local(self, host: str, message: InboxMessage) -> None:
        match message:
            case Notice(text):
                self._view.warn(f"warning: host {host}: {text}")
            case Gone(how, reachable) if host in self._running:
                self._give_up(lost(host, how) if reachable else self._monitor.unreachable(host))
            case Broken(why, limit):
                self._checkpoint.on_lost(host, "its connection broke")
                how = f"{f': {why}' if why else ''}; trying again{f', for {limit:g} s at most' if limit else ''}"
                self._view.warn(f"the connection to host {host} broke{how}")
            case Mended():
                self._view.warn(f"host {host} is connected again")
            case Interrupt() if self._detaches:
                self._release_job(f"detached; job {self._plan.job} keeps running; see geomx attach and geomx stop")
            case Interrupt(by):
                self._stop.on_interrupt(by, self._running)
            case Suspend():
                self._suspend()

    def _check(self, now: float) -> None:
        if now - self._last_turn > _ASLEEP:  # messages that arrived during the suspension are still unread
            self._awake_since = now
        self._last_turn, awake = now, now - self._awake_since
        stopping = None if self._stop.since is None else min(now - self._stop.since, awake)
        limit = math.inf
        if stopping is not None and self._upload.delays_end(now):  # then an agent may be late, but answers
            limit = self._monitor.stop_limit
        for host in sorted(self._running):
            asked = None if stopping is None or host in self._restart_all.emptied else min(stopping, limit)
            if (failure := self._monitor.check(host, awake, asked)) is not None:
                self._give_up(failure)
        if self._running and self._running <= self._restart_all.emptied:
            self._begin_again_or_end()
        if stopping is not None:
            self._stop.check(self._running, stopping)
        self._checkpoint.check(self._running, is_up=stopping is None and self._is_up())
        if self._stop.since is None and awake > _ABSENT:
            self._check_absentee()
        if self._stop.since is None and self._linger.is_over(self._progress, now, awake):
            self._stop_lingering()

    def _apply_snapshot(self, host: str, status: AgentStatus, late: float) -> None:
        """Merge the full status that an agent sends on (re)connection, `late` seconds old."""
        self._clocks[host] = time.monotonic() - late - status["time"]
        self._progress.apply_snapshot(host, status, late)
        for failure in failures_of(status, late, host, self._hosts):
            self._fail(failure)

    def _on_stopped_elsewhere(self, who: str, grace: float) -> None:
        if self._stop.on_stopped_elsewhere(who, grace, self._failures):
            self._monitor.stop_limit = grace + STOP_LIMIT

    def _release_job(self, why: str) -> None:
        self._outcome.left = why
        self._running.clear()

    def _fail(self, failure: Failure) -> None:
        if not self._failures:
            who = failure.process or f"{'' if failure.fault == 'host' else 'the agent on '}host {failure.host}"
            cause = f"gave up on {failure.peer}" if failure.peer else failure.cause
            then = "" if self._outcome.interrupted else "; stopping the job and finding the root cause"
            self._view.note(f"{who} {cause}{then}")
        self._failures.append(failure)
        if (found := self._first_cause()) is not None:
            self._progress.mark_first_failure(found)
        if failure.process:
            self._stop.stop(_FAILING)
        else:  # of a host: workers elsewhere get SIGTERM, and may need servers to end
            self._restart_all.forbid()
            self._stop.stop(0, hold=True)

    def _check_absentee(self) -> None:
        """Fail the job if a worker's script ended before the cluster was complete, as it never will be."""
        if (found := self._progress.absentee(_ABSENT)) is None:
            return
        worker, scheduler = (row.process for row in found)
        cause = f"ended with status 0 while {scheduler.name} still waits for workers to join"
        hint = joining(str(self._plan.spec.options["framework"]))
        self._fail(Failure(worker.name, worker.host, cause, time.monotonic(), hint))

    def _finish_host(self, host: str, why: str, left: Sequence[str]) -> None:
        """Record the end of an agent's part."""
        self._running.discard(host)
        self._checkpoint.on_lost(host, "its agent has ended")
        self._upload.on_end(host, is_done=not why and self._stop.since is None)
        self._outcome.problems += [f"{what} on {host} could not be ended" for what in left]
        if why and self._stop.since is None:
            cause = f"ended its processes: {why}"
            self._fail(Failure("", host, cause, time.monotonic(), "launch again"))

    def _on_emptied(self, host: str) -> None:
        if (order := self._restart_all.on_emptied(host, stopping=self._stop.since is not None)) is not None:
            self._pool.send(host, order)

    def _begin_again_or_end(self) -> None:
        """All processes of all hosts have ended: start them again, or end the job."""
        order = self._restart_all.begin_again(self._first_cause(), self._progress)
        if order is None:
            self._stop.stop(0)
            return
        self._view.warn(self._restart_all.how)
        self._failures = []
        self._stop.begin_again()
        self._linger = Linger(float(self._plan.spec.options["silence"]))
        self._progress.begin_again()
        self._pool.broadcast(order)

    def _give_up(self, failure: Failure) -> None:
        """Give up a lost agent: end its processes on its behalf, as far as its host can be reached."""
        self._running.discard(failure.host)
        self._checkpoint.on_lost(failure.host, "its agent is lost")
        self._upload.on_end(failure.host)
        self._fail(failure)
        self._pool.give_up(failure.host)

    def _stop_lingering(self) -> None:
        rows = self._progress.rows
        self._outcome.lingering = [name for name, row in rows.items() if row.status is None]
        names = ", ".join(self._outcome.lingering)
        self._view.note(f"training is done, but {names} did not end in time; stopping")
        self._restart_all.forbid()
        self._stop.stop(0)

    def _suspend(self) -> None:
        """Stop this process as Ctrl-Z does; agents that are told exclude its silence from their lease."""
        self._pool.broadcast({"type": "suspend"})
        with self._view.suspended():
            self._view.warn(f"suspended; job {self._plan.job} keeps running; fg follows it again")
            before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)  # no effect if no shell could continue this process
            signal.signal(signal.SIGTSTP, before)
        self._pool.broadcast({"type": "resume"})
