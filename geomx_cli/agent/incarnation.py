"""One life of a process of the job: its start, its signs of life, its events and its end."""

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from geomx_cli.agent import processes
from geomx_cli.agent.diagnosis import StopDetector
from geomx_cli.agent.processes import ProcessId
from geomx_cli.core.conventions import JobClock
from geomx_cli.core.jsonlines import UNWRITTEN, decode, read_objects

__all__ = ["EventTail", "Incarnation", "Stall"]

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

    status: its exit status, or the negated number of the signal that ended it; None before.
    ended: when its end was seen, by `clock`.
    silence: seconds that it may be stopped, or hang.
    """

    def __init__(self, events: "EventTail", silence: float, clock: JobClock) -> None:
        self.events = events
        self.identity: ProcessId | None = None
        self.pidfd = -1
        self.status: int | None = None
        self.ended: float | None = None
        self._clock = clock
        self._stops, self._hangs = StopDetector(silence), StopDetector(silence)
        self._used = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, argv: Sequence[str], env: Mapping[str, str], working_dir: str, output: int) -> None:
        """Start it. Raises OSError if the program or working directory is missing."""
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            cwd=working_dir or None,
            start_new_session=True,
            preexec_fn=processes.die_with_parent(os.getpid()),  # noqa: PLW1509 - the agent has one thread
        )
        self.identity = processes.identify(self._process.pid)
        self.pidfd = os.pidfd_open(self._process.pid)

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self.pidfd >= 0 and self.status is None

    @property
    def handles_failure(self) -> bool:
        """Whether its script has, or gets, the job's failure as an exception, and has not ended by it."""
        return self.events.saw_failure and self.events.failure is None

    def check_end(self) -> bool:
        """Look for its end and set `status`; return whether it has ended. Neither blocks nor reaps."""
        if self.running:
            result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if result is not None:
                exited = result.si_code == os.CLD_EXITED
                self.status = result.si_status if exited else -result.si_status
                self.ended = self._clock.time()
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
        """Return what it does, once, if it has been stopped or hung for a while; call after `stall`."""
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

    def reap(self) -> None:
        """Reap it, if it has ended. Call only after the last signal to its group was sent."""
        if self._process is not None and self.status is not None and self.pidfd >= 0:
            self._process.wait()
            os.close(self.pidfd)
            self.pidfd = -1


_BEFORE = ("starting", "waiting")  # states of a process before all have joined
_SHOWN = 4096  # maximum characters of a string in a forwarded event


class EventTail:
    """Reads what a process adds to its event log, from `offset` on.

    failure: its own "failed" event, once read.
    saw_failure: it has noticed that the job has failed.
    joined, left: it has joined the job, and left it in the orderly way.
    waits: it waits for others to join, or has not come as far.
    heard: when its newest telemetry was read (time.monotonic seconds); it writes some every second.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.failure: dict[str, Any] | None = None
        self.saw_failure = self.joined = self.left = False
        self.waits = True
        self.heard = 0.0
        self.path = path
        self._offset = offset
        self._saw_round = False
        self._samples = 0

    def unwritten(self, output: Iterable[str]) -> list[dict[str, Any]]:
        """Return the events in a process's output for which its event log had no room."""
        events = []
        for line in output:
            if line.startswith(UNWRITTEN):
                with suppress(ValueError):
                    events.append({name: _shortened(value) for name, value in decode(line[len(UNWRITTEN) :]).items()})
                    self._note(events[-1])
        return events

    def read(self) -> list[dict[str, Any]]:
        """Return the events written since the last call; of its round events only the very first and the newest,
        of reports those that are live, and no counts of sent bytes.

        Round events get the field "samples", summed over all rounds so far. Long strings are truncated, long lists
        and objects dropped.
        """
        if not self.path.is_file():  # not created yet, or replaced by a pipe
            return []
        events: list[dict[str, Any]] = []
        newest: dict[str, Any] | None = None
        for written, offset in read_objects(self.path, self._offset):
            self._offset = offset
            event = {name: _shortened(value) for name, value in written.items() if not _is_long(value)}
            kind = event.get("event")
            if kind == "round":
                event["samples"] = self._samples = self._samples + _count(event.get("num_samples"))
                if self._saw_round:
                    newest = event
                    continue
                self._saw_round = True
            if kind == "sent" or (kind == "reported" and not event.get("live")):
                continue
            self._note(event)
            events.append(event)
        return events if newest is None else [*events, newest]

    def _note(self, event: dict[str, Any]) -> None:
        match event.get("event"), event.get("state"):
            case "telemetry", state:
                self.joined, self.heard = True, time.monotonic()
                self.waits = state in _BEFORE
                self.left |= state == "finished"
            case "finished", _:
                self.left = True
            case "state", "failing":
                self.saw_failure = True
            case "failed", _:
                self.failure = self.failure or event  # of a process's children the first


def _count(value: Any) -> int:
    """Return `value` if it is a positive int, else 0: event fields written by a script are untrusted."""
    return value if isinstance(value, int) and value > 0 else 0


def _is_long(value: Any) -> bool:
    """Whether a field is too long to forward; it remains in the event log."""
    return isinstance(value, dict | list) and len(str(value)) > 16 * _SHOWN


def _shortened(value: Any) -> Any:
    """Truncate a long string for forwarding: event fields written by a script are untrusted."""
    if isinstance(value, str) and len(value) > _SHOWN:
        return f"{value[:_SHOWN]}... ({len(value)} characters; the event log has them)"
    return value
