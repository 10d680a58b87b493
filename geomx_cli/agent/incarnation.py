"""One life of a process of the job: its start, its signs of life, and its end."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from geomx_cli.agent import processes
from geomx_cli.agent.diagnosis import StopDetector
from geomx_cli.agent.event_tail import EventTail
from geomx_cli.agent.processes import ProcessId
from geomx_cli.core.conventions import JobClock

__all__ = ["Incarnation", "Stall"]

_SWEEP = 2.0  # seconds for SIGKILL to take effect
_LATE = 5.0  # seconds; telemetry comes every second
_IDLE = 1e-4  # seconds of processor time in a second, which threads of libzmq may use


class Stall(NamedTuple):
    """A process that is stopped or hangs: what it does, and a hint."""

    how: str
    hint: str


class Incarnation:
    """A process in its own session, from before its start until it is reaped. Not thread-safe.

    After its end it stays a zombie until `reap`. So its pid, which is also its process group id, cannot be reused, and
    group signals reach only what it has left.

    status: its exit status, or the negated number of the signal that ended it; None before. 0 if it was killed when it
        had done all, and would be restarted before that.
    ended: when its end was seen, by `clock`.
    began: when it was started (time.monotonic seconds).
    silence: seconds that it may be stopped, or hang.
    """

    def __init__(self, events: EventTail, silence: float, clock: JobClock) -> None:
        self.events = events
        self.identity: ProcessId | None = None
        self.pidfd = -1
        self.began = 0.0
        self.status: int | None = None
        self.ended: float | None = None
        self._clock = clock
        self._stops, self._hangs = StopDetector(silence), StopDetector(silence)
        self._used = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, argv: Sequence[str], env: Mapping[str, str], working_dir: str, output: int) -> None:
        """Start it. Raises OSError if the program or working directory is missing, or if the agent cannot watch it:
        then nothing of it runs.
        """
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            cwd=working_dir or None,
            start_new_session=True,
            preexec_fn=processes.die_with_parent(os.getpid()),  # noqa: PLW1509 - takes no lock that a thread may hold
        )
        try:
            self.pidfd = os.pidfd_open(process.pid)
        except OSError:  # no descriptor is left
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        self._process = process
        self.began = time.monotonic()
        self.identity = processes.identify(process.pid)

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self.pidfd >= 0 and self.status is None

    @property
    def handles_failure(self) -> bool:
        """Whether its script has, or gets, the job's failure as an exception, and has not ended by it."""
        return self.events.saw_failure and self.events.failure is None

    def look(self) -> int | None:
        """Return its exit status, negative for a signal; None while it runs. Changes nothing, so that the agent's loop
        still sees its end. Neither blocks nor reaps.
        """
        if not self.running:
            return self.status
        result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status

    def check_end(self) -> bool:
        """Look for its end and set `status`; return whether it has ended. Only for the agent's loop, which then
        restarts the process or reports its end.
        """
        if self.running and (status := self.look()) is not None:
            self.status, self.ended = status, self._clock.time()
        return self.status is not None

    def stall(self) -> Stall | None:
        """Return how it has been stopped (e.g. by SIGSTOP), or has hung, for longer than `silence`; call regularly."""
        stopped = self.running and self.identity is not None and processes.state(self.identity) == "T"
        is_stopped = self._stops.check(stopped=stopped)
        if self._hangs.check(stopped=not stopped and self._is_stuck()):
            how = f"has neither answered nor used processor time for {self._hangs.limit:g} s"
            return Stall(how, "a native function hangs while it holds Python's lock: py-spy dump --native shows which")
        if is_stopped:
            return Stall("was stopped (SIGSTOP)", "find out who sent it SIGSTOP; a debugger does, for example")
        return None

    def stall_notice(self) -> str:
        """Return, once, what the process does if it has been stopped or hung for a while. Call it after `stall`."""
        if self._stops.notices():
            return "is stopped (SIGSTOP)"
        return "neither answers nor uses processor time" if self._hangs.notices() else ""

    def _is_stuck(self) -> bool:
        """Whether a member of the job writes no telemetry, which takes Python's lock, and has used no processor time
        since the last call. Others wait for one that computes while it holds the lock.
        """
        late = self.events.joined and not self.events.left and time.monotonic() - self.events.heard > _LATE
        if not (late and self.running and self.identity is not None):
            return False
        before, self._used = self._used, processes.run_time(self.identity)
        return self._used - before < _IDLE

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal, then SIGCONT, to its process group."""
        if self._process is not None and self.pidfd >= 0:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
                os.killpg(self._process.pid, signal.SIGCONT)

    def sweep(self) -> None:
        """Kill the remaining processes of its session, and wait for their end. Call it after the end of the process."""
        if self._process is not None and self.pidfd >= 0:
            pid = self._process.pid
            processes.kill_all(lambda: processes.session_members([pid]), _SWEEP)

    def reap(self) -> None:
        """Reap it, if it has ended. Call only after the last signal to its group was sent."""
        if self._process is not None and self.status is not None and self.pidfd >= 0:
            self._process.wait()
            os.close(self.pidfd)
            self.pidfd = -1
