"""A running job, from start to end: what happens when a process fails, an agent is lost, or the person stops
it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import Empty

from geomx_cli.errors import GeomxError
from geomx_cli.failure import Failure, first_cause
from geomx_cli.fleet import Fleet, Message
from geomx_cli.follow import View
from geomx_cli.plan import Plan, Process
from geomx_cli.progress import Progress

__all__ = ["Outcome", "Watch"]

_TURN = 0.25
_AGENT_SILENCE = 6.0
_GRACE = 2.0  # for processes to end by themselves after one has failed
_LINGER = 10.0  # for servers and schedulers to end after the last worker
_ABSENT = 3.0  # after the end of a worker, for its scheduler to say that it need not wait for it
_STOP_LIMIT = 8.0  # for an agent to end its processes once it was told to


@dataclass
class Outcome:
    """How it went. `failure` came first; `lingering` names processes that did not end after the training had.
    """

    failure: Failure | None = None
    interrupted: bool = False
    lingering: Sequence[str] = ()
    problems: list[str] = field(default_factory=list)


class Watch:
    """Follows a job to its end; the main thread runs it.

    The first failure ends the job: all agents stop their processes after a grace in which these end by
    themselves. A lost agent (its stream ended, or it does not answer) is a failure too; its processes are
    ended in its place. Put an "interrupt" into the fleet's inbox to stop the job, and a second one to kill
    it.
    """

    def __init__(self, plan: Plan, fleet: Fleet, progress: Progress, view: View) -> None:
        self._plan = plan
        self._fleet = fleet
        self._progress = progress
        self._view = view
        self._hosts = {process.name: process.host for process in plan.processes}
        self._running = set(plan.hosts)
        self._failures: list[Failure] = []
        self._stopping_since: float | None = None
        self._trained_since: float | None = None
        self._last_turn = time.monotonic()
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """Returns when every host's part is over or was given up."""
        while self._running:
            for host, message in self._messages():
                self._take(host, message)
            self._check(time.monotonic())
            self._view.show(self._progress)
        done = [name for name, row in self._progress.rows.items() if row.status == 0]
        self._outcome.failure = first_cause(self._failures, self._hosts, done)
        return self._outcome

    def _messages(self) -> list[tuple[str, Message]]:
        """Those that have come, after a short wait for the first."""
        inbox = self._fleet.inbox
        try:
            messages = [inbox.get(timeout=_TURN)]
        except Empty:
            return []
        while not inbox.empty():
            messages.append(inbox.get_nowait())
        return messages

    def _take(self, host: str, message: Message) -> None:
        match message["type"]:
            case "event":
                event = message["event"]
                self._progress.add(message["process"], event, message["age"])
                if event.get("event") == "warning":
                    self._view.note(f"{message['process']}: {event.get('message', '')}")
            case "ended":
                self._progress.end(message["process"], message["status"])
            case "failure":
                when = time.monotonic() - message["age"]
                self._fail(Failure(**{**message["failure"], "when": when}))
            case "done":
                self._end(host, message["why"], message["left"])
            case "gone" if host in self._running:
                self._lose(host, "died: its connection ended")
            case "interrupt":
                self._interrupt()

    def _check(self, now: float) -> None:
        # After a sleep of our own (a laptop's, SIGSTOP) what agents have said meanwhile is yet to be read.
        slept = now - self._last_turn > _AGENT_SILENCE / 2
        self._last_turn = now
        for host in sorted(self._running):
            if self._fleet.silence(host) > _AGENT_SILENCE and not slept:
                self._lose(host, f"hangs: it has not answered for {_AGENT_SILENCE:g} s")
            elif self._stopping_since is not None and now - self._stopping_since > _STOP_LIMIT:
                self._lose(host, f"did not stop within {_STOP_LIMIT:g} s")
        if self._stopping_since is None and (found := self._progress.absentee(_ABSENT)) is not None:
            self._fail_absent(*(row.process for row in found))
        if self._stopping_since is None and all(row.status == 0 for row in self._progress.training_rows):
            self._trained_since = self._trained_since or now
            if now - self._trained_since > _LINGER:
                self._stop_lingering()

    def _fail(self, failure: Failure) -> None:
        if not self._failures:
            who = failure.process or f"the agent on {failure.host}"
            cause = f"blames {failure.peer}" if failure.peer else failure.cause
            self._view.note(f"{who} {cause}; stopping the job")
        self._failures.append(failure)
        self._stop(0 if not failure.process else _GRACE)

    def _fail_absent(self, worker: Process, scheduler: Process) -> None:
        """A worker's script ended before the cluster was complete: it never will be."""
        cause = f"ended with status 0 while {scheduler.name} still waits for workers to join"
        hint = 'every worker must create the store, kv.create("dist_sync"), and use it'
        self._fail(Failure(worker.name, worker.host, cause, time.monotonic(), hint))

    def _end(self, host: str, why: str, left: Sequence[str]) -> None:
        """An agent's part is over."""
        self._running.discard(host)
        self._outcome.problems += [f"{what} on {host} could not be ended" for what in left]
        if why and self._stopping_since is None:
            cause = f"ended its processes: {why}"
            self._fail(Failure("", host, cause, time.monotonic(), "launch again"))

    def _lose(self, host: str, how: str) -> None:
        """Do the work of an agent that cannot do it any more."""
        self._running.discard(host)
        hint = "its processes were ended; look for what killed or stopped it (agent.log, out of memory)"
        self._fail(Failure("", host, how, time.monotonic(), hint))
        try:
            self._fleet.give_up(host)
        except (GeomxError, OSError) as error:
            self._outcome.problems.append(str(error))

    def _stop(self, grace: float) -> None:
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
        self._fleet.broadcast({"type": "stop", "grace": grace})

    def _stop_lingering(self) -> None:
        rows = self._progress.rows
        self._outcome.lingering = [name for name, row in rows.items() if row.status is None]
        names = ", ".join(self._outcome.lingering)
        self._view.note(f"training is done, but {names} did not end within {_LINGER:g} s; stopping")
        self._stop(0)

    def _interrupt(self) -> None:
        if not self._outcome.interrupted:
            self._outcome.interrupted = True
            self._view.note("stopping (press Ctrl-C again to kill at once)")
            self._stop(0)
        else:
            self._fleet.broadcast({"type": "kill"})
