"""The stages of an agent's part of a job, from waiting for "start" to killing what is left."""

import math
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import IntEnum

from geomx_cli.agent import processes
from geomx_cli.agent.child import Child
from geomx_cli.agent.incarnation import Incarnation
from geomx_cli.core.conventions import JobClock

__all__ = ["KILL", "TERMINATE", "Lifecycle", "PartialStop", "Stage"]

TERMINATE = 1.0  # seconds between SIGTERM and SIGKILL for servers at the end of the grace, and for leftovers
_SERVERS = 1.0  # seconds for schedulers and servers to end by themselves after all workers
KILL = 2.0  # seconds for SIGKILL to take effect
_CONNECT = 15.0  # seconds; timeout for "start" since the last message of the control machine


class Stage(IntEnum):
    """Only advances."""

    WAITING = 0  # for "start"
    RUNNING = 1
    FAILING = 2  # processes may exit on their own
    TERMINATING = 3  # SIGTERM is sent
    KILLING = 4  # after SIGKILL


class Lifecycle:
    """Advances through the stages, by request or at the current one's deadline. Not thread-safe.

    Each process group gets SIGTERM once. Workers get it at once, unless their script handles the job's failure
    (Incarnation.handles_failure), or they end by themselves because the job is asked to stop (`is_asked`). Schedulers
    and servers get it when no worker runs here, because workers may need them for the present round.

    grace: seconds from the end of RUNNING until workers get SIGKILL, at least a second after SIGTERM unless the grace
        is shorter. For other processes it is a second longer.
    is_asked: the job was asked to stop, and has not failed. If one of the workers here waits for stops
        (EventTail.awaits_stop), no worker gets SIGTERM before the end of the grace: the others will look at it soon, or
        wait for this worker.
    holding: workers of other hosts need schedulers and servers too, until they have ended or the grace is over.
    why: the reason of the stop.
    terminated_at: when SIGTERM was first due, by `clock`.
    cut_off: the workers that got SIGKILL in this turn.
    on_change: called after each change of `stage`.
    """

    def __init__(
        self, children: Sequence[Child], clock: JobClock, on_change: Callable[[], None], grace: float
    ) -> None:
        self.stage = Stage.WAITING
        self.why = ""
        self.terminated_at = 0.0
        self.grace = grace
        self.holding = self.is_asked = False
        self.cut_off: Sequence[str] = ()
        self._children = children
        self._clock = clock
        self._on_change = on_change
        self._deadline = time.monotonic() + _CONNECT
        self._stopped_at = self._terminating_at = 0.0
        self._terminated: set[Incarnation] = set()
        self._killed: set[Incarnation] = set()
        self._delay = math.inf  # seconds that processes have to meet a failure of another
        self._handled_elsewhere = -math.inf
        self._ran: list[Child] = []  # the workers that ran at the last check
        self._ending: Sequence[Child] = ()  # workers that have not ended since SIGTERM
        self._gave_up = False
        self._alone_since = 0.0  # since when no worker runs or is waited for, while the job ends; 0 before

    @property
    def over(self) -> bool:
        """Whether none of the job's processes runs, nor what SIGTERM has left of workers, or SIGKILL had no effect."""
        running = self.stage is Stage.WAITING or any(child.life.running for child in self._children)
        return self._gave_up or not (running or self._ending)

    @property
    def _cut_off_at(self) -> float:
        terminating = max(self._terminating_at, self._ends_itself_until)
        return max(self._stopped_at + self.grace, terminating + min(self.grace, TERMINATE))

    @property
    def _ends_itself_until(self) -> float:
        """Until when workers may end by themselves, as the job is asked to stop; 0 if none awaits that."""
        awaited = self.is_asked and any(child.life.events.awaits_stop for child in self._children)
        return self._stopped_at + self.grace if awaited else 0.0

    def keep_waiting(self) -> None:
        """Restart the timeout for "start": the control machine waits for other hosts."""
        if self.stage is Stage.WAITING:
            self._deadline = time.monotonic() + _CONNECT

    def enter_running(self) -> None:
        """Enter RUNNING; the caller starts the processes."""
        self._enter(Stage.RUNNING)

    def stop(self, why: str, delay: float) -> None:
        """Terminate all processes after `delay` seconds; an earlier time holds."""
        now = time.monotonic()
        self._delay = min(self._delay, delay)
        if self.stage < Stage.FAILING:
            with suppress(OSError):  # the log may lie on a full disk
                print(f"stopping: {why}", file=sys.stderr, flush=True)
            self.why, self._stopped_at = why, now
            self._enter(Stage.FAILING, delay)
        if self.stage is Stage.FAILING:
            self._deadline = min(self._deadline, now + delay)

    def postpone(self) -> None:
        """A worker of another host handles the job's failure: those here that do not may exchange with it only by
        torch.distributed, and meet the failure when it ends.
        """
        self._handled_elsewhere = time.monotonic()

    def kill(self) -> None:
        """Send SIGKILL now."""
        workers = [child for child in self._children if child.life.running and not child.task.serves]
        self.cut_off = [child.name for child in workers if child.life not in self._killed]
        self._ending = ()
        self._enter(Stage.KILLING, KILL)
        for child in self._children:
            child.life.signal_group(signal.SIGKILL)

    def check(self, now: float) -> None:
        """Enter the next stage if the current one's deadline has passed, and send the signals that are due."""
        match self.stage:
            case Stage.WAITING if now >= self._deadline:
                self.stop(f"the control machine did not send start within {_CONNECT:g} s", 0)
            case Stage.FAILING if now >= self._deadline:
                self.terminated_at = self._clock.time()
                self._enter(Stage.TERMINATING)
                self._terminating_at = now
                self._ran = [child for child in self._children if child.life.running and not child.task.serves]
                self.check(now)
            case Stage.TERMINATING if now >= self._cut_off_at + TERMINATE:
                self.kill()
            case Stage.TERMINATING:
                workers = [child for child in self._children if not child.task.serves]
                self._terminate_workers(workers, now)
                self._ending = [child for child in workers if child.life.running or self._has_left_others(child)]
                if now >= self._cut_off_at:
                    self._cut_off()
                if not self.holding and not self._ending and self._servers_are_due(now):
                    self._terminate(self._children)
            case Stage.KILLING if now >= self._deadline:
                self._gave_up = True

    def _servers_are_due(self, now: float) -> bool:
        """Whether to send SIGTERM to schedulers and servers, which no worker needs any more. If workers have ended by
        themselves, as they were asked to, servers do so too, and roots save their optimizers' state.
        """
        self._alone_since = self._alone_since or now
        return not self.is_asked or bool(self._terminated) or now >= self._alone_since + _SERVERS

    def _terminate_workers(self, workers: Sequence[Child], now: float) -> None:
        """Send SIGTERM to those that do not handle the failure: first to those that have reported their end. The others
        may not know of the failure yet, as they exchange by torch.distributed with workers that do, and meet it when
        these end. So SIGTERM is postponed while any of these saves, here or elsewhere, and after each end.
        """
        running = [child for child in workers if child.life.running]
        handled = now - self._handled_elsewhere < self._delay or any(child.life.handles_failure for child in running)
        if running != self._ran or handled:
            self._deadline = now + self._delay
        self._ran = running
        if now >= max(self._deadline, self._ends_itself_until):
            rest = [child for child in workers if not child.life.handles_failure]
            ending = [child for child in rest if child.life.running and child.life.events.failure is not None]
            self._terminate(ending if ending and self._delay else rest)

    def _has_left_others(self, child: Child) -> bool:
        """Whether SIGTERM has ended `child`, but not all that it runs, as a shell script that runs a trainer."""
        found = child.life.identity if child.life in self._terminated else None
        return found is not None and bool(processes.session_members([found.pid]))

    def _cut_off(self) -> None:
        self.holding = False
        self.cut_off = [child.name for child in self._ending if child.life not in self._killed]
        self._killed.update(child.life for child in self._ending)
        for child in self._ending:
            child.life.signal_group(signal.SIGKILL)
        self._ending = ()

    def _terminate(self, children: Sequence[Child]) -> None:
        for child in children:
            if child.life not in self._terminated:
                self._terminated.add(child.life)
                child.terminate()

    def _enter(self, stage: Stage, limit: float = 0) -> None:
        if stage >= self.stage:
            self.stage = stage
            self._deadline = time.monotonic() + limit
            self._on_change()


class PartialStop:
    """Sends SIGTERM to process groups, and SIGKILL after a timeout. Not thread-safe.

    Schedulers and servers get SIGTERM once none of the workers runs, as these may need them to end, and SIGKILL a
    second later than workers.
    """

    def __init__(self) -> None:
        self._deadlines: dict[Child, float] = {}
        self._terminated: set[Incarnation] = set()

    def terminate(self, children: Iterable[Child], grace: float) -> None:
        """Terminate these within `grace` seconds; an earlier deadline of a process that is already terminating
        holds.

        Sets `asked`, so that their exit is not reported as a failure.
        """
        deadline = time.monotonic() + grace
        for child in children:
            child.asked = True
            if child.life.running:
                own = deadline + TERMINATE * child.task.serves
                self._deadlines[child] = min(own, self._deadlines.get(child, own))
        self._send_sigterm()

    def check(self, now: float) -> None:
        """Kill processes past their deadline, and the leftover process groups of ended ones."""
        for child, deadline in list(self._deadlines.items()):
            if not child.life.running or now >= deadline:
                child.life.signal_group(signal.SIGKILL)
                del self._deadlines[child]
        self._send_sigterm()

    def _send_sigterm(self) -> None:
        workers = [child for child in self._deadlines if child.life.running and not child.task.serves]
        for child in workers or self._deadlines:
            if child.life not in self._terminated:
                self._terminated.add(child.life)
                child.terminate()
