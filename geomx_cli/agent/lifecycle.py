"""The stages of an agent's part of a job, from waiting for "start" to killing what is left."""

import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum

from geomx_cli.agent.child import Child
from geomx_cli.core.job_clock import JobClock

__all__ = ["KILL", "TERMINATE", "Lifecycle", "Stage"]

TERMINATE = 1.0  # seconds between SIGTERM and SIGKILL
KILL = 2.0  # seconds for SIGKILL to take effect
_CONNECT = 15.0  # seconds; timeout for "start" since the last message of the control machine


class Stage(IntEnum):
    """Only advances."""

    WAITING = 0  # for "start"
    RUNNING = 1
    GRACE = 2  # processes may exit on their own
    TERMINATING = 3  # after SIGTERM
    KILLING = 4  # after SIGKILL


class Lifecycle:
    """Advances through the stages, by request or at the current one's deadline. Not thread-safe.

    SIGTERM and SIGKILL go to whole process groups. `why`: the reason of the stop; `terminated_at`: when SIGTERM was
    sent, by `clock`; `on_change` is called after each change of `stage`.
    """

    def __init__(self, children: Sequence[Child], clock: JobClock, on_change: Callable[[], None]) -> None:
        self.stage = Stage.WAITING
        self.why = ""
        self.terminated_at = 0.0
        self._children = children
        self._clock = clock
        self._on_change = on_change
        self._deadline = time.monotonic() + _CONNECT
        self._patience = TERMINATE
        self._gave_up = False

    @property
    def over(self) -> bool:
        """Whether none of the job's processes runs, whatever their descendants do, or SIGKILL had no effect."""
        running = self.stage is Stage.WAITING or any(child.running for child in self._children)
        return self._gave_up or not running

    def keep_waiting(self) -> None:
        """Restart the timeout for "start": the control machine waits for other hosts."""
        if self.stage is Stage.WAITING:
            self._deadline = time.monotonic() + _CONNECT

    def start(self) -> None:
        """Enter RUNNING; the caller starts the processes."""
        self._enter(Stage.RUNNING)

    def stop(self, why: str, grace: float) -> None:
        """Terminate all processes after `grace` seconds; an earlier deadline holds."""
        if self.stage < Stage.GRACE:
            with suppress(OSError):  # the log may lie on a full disk
                print(f"stopping: {why}", file=sys.stderr, flush=True)
            self.why = why
            self._enter(Stage.GRACE, grace)
        if self.stage is Stage.GRACE:
            self._deadline = min(self._deadline, time.monotonic() + grace)

    def set_patience(self, patience: float) -> None:
        """Set the seconds between SIGTERM and SIGKILL; if SIGTERM was sent already, an earlier deadline holds."""
        if self.stage is Stage.TERMINATING:
            self._deadline = min(self._deadline, time.monotonic() + patience)
        self._patience = patience

    def kill(self) -> None:
        """Send SIGKILL now."""
        self._enter(Stage.KILLING, KILL)
        self._signal(signal.SIGKILL)

    def check(self, now: float) -> None:
        """Enter the next stage if the current one's deadline has passed."""
        if self.stage is Stage.RUNNING or now < self._deadline:
            return
        match self.stage:
            case Stage.WAITING:
                self.stop(f"the control machine did not send start within {_CONNECT:g} s", 0)
            case Stage.GRACE:
                self.terminated_at = self._clock.time()
                self._signal(signal.SIGTERM)
                self._enter(Stage.TERMINATING, self._patience)
            case Stage.TERMINATING:
                self.kill()
            case Stage.KILLING:
                self._gave_up = True

    def _enter(self, stage: Stage, limit: float = 0) -> None:
        if stage >= self.stage:
            self.stage = stage
            self._deadline = time.monotonic() + limit
            self._on_change()

    def _signal(self, number: signal.Signals) -> None:
        for child in self._children:
            child.signal_group(number)
