"""One process of the job, supervised by its agent."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import get_args

from geomx_cli.agent import processes
from geomx_cli.agent.diagnosis import StopDetector, full_disk
from geomx_cli.agent.event_tail import EventTail
from geomx_cli.agent.host_spec import HostSpec, Task
from geomx_cli.agent.output_log import OutputLog
from geomx_cli.agent.outputs import folder_of
from geomx_cli.agent.processes import ProcessId
from geomx_cli.core.conventions import JobClock
from geomx_cli.core.errors import Missed
from geomx_cli.core.files import make_folders
from geomx_cli.core.root_cause import Failure, describe_status, ending_of, exception_line

__all__ = ["Child"]

_LATE = 5.0  # seconds; telemetry comes every second
_IDLE = 1e-4  # seconds of processor time in a second, which threads of libzmq may use
_TELLING = 500  # maximum length of a forwarded message or exception line


class Child:
    """Starts a task in its own session and tracks its state. Not thread-safe.

    `clock`: the job's, used for all times here. An ended process stays a zombie until `close`, so its pid,
    which is also its process group id, cannot be reused, and group signals reach only its leftovers.
    """

    def __init__(self, task: Task, host_spec: HostSpec, clock: JobClock) -> None:
        job_dir = Path(host_spec.job_dir)
        self.task = task
        self.name = task.name
        self.status: int | None = None
        self.identity: ProcessId | None = None
        self.pidfd = -1
        self.failed = False
        self.asked = False  # its end was requested
        self.lacked_room = False  # it failed, by itself, while a disk was full
        self.ended: float | None = None  # when its end was detected
        self.log = OutputLog(job_dir / "logs" / f"{task.file_name}.log")
        self.events = EventTail(job_dir / "events" / f"{task.file_name}.jsonl")
        self._host = host_spec.host
        self._clock = clock
        self._job_dir = job_dir
        self._working_dir = job_dir
        self._stops, self._hangs = StopDetector(host_spec.silence), StopDetector(host_spec.silence)
        self._used = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, inherited: Mapping[str, str], working_dir: str) -> None:
        """Start the process. Raises OSError if the program or working directory is missing or the log cannot be
        written.
        """
        self._working_dir = Path(working_dir or ".").absolute()
        make_folders(self.log.path.parent)
        if working_dir and Path(working_dir).is_relative_to(self._job_dir):
            make_folders(Path(working_dir))
        if (folder := folder_of(self.task)) is not None:
            make_folders(folder)
        output = self.log.open()
        try:
            self._process = subprocess.Popen(
                self.task.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**inherited, **self.task.env, "GEOMX_SUPERVISED": "1"},
                cwd=working_dir or None,
                start_new_session=True,
                preexec_fn=processes.die_with_parent(os.getpid()),  # noqa: PLW1509 - the agent has one thread
            )
        finally:
            os.close(output)
        self.identity = processes.identify(self._process.pid)
        self.pidfd = os.pidfd_open(self._process.pid)

    @property
    def handles_failure(self) -> bool:
        """Whether its script has, or gets, the job's failure as an exception, and has not ended by it."""
        return self.events.saw_failure and self.events.failure is None

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self.pidfd >= 0 and self.status is None

    def check_end(self) -> bool:
        """Poll for its end and set `status`. Neither blocks nor reaps."""
        if self.running:
            result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if result is not None:
                exited = result.si_code == os.CLD_EXITED
                self.status = result.si_status if exited else -result.si_status
                self.ended = self._clock.time()
        return self.status is not None

    def failure(self, *, memory: bool) -> Failure | None:
        """Return its failure, or None. Read `events` first, so that its own failure event is included."""
        if self.status == 0 and self.events.joined and not self.events.left and not full_disk("", self._job_dir, ()):
            cause, hint = "ended with status 0 but did not leave the job", "let Python exit normally: os._exit and exec"
            return Failure(self.name, self._host, cause, self._clock.time(), f"{hint} skip leaving the job")
        if not self.status:
            return None
        tail = self.log.tail()
        told = self.events.failure or {}  # written by a script, perhaps
        message = str(told.get("message") or "") or exception_line(tail)
        ending, how = ending_of(self.status, memory=memory), describe_status(self.status, memory=memory)
        if told and self.status < 0:  # it had reported its failure before
            ending, how = "reported", "failed"
        hint, peer = str(told.get("hint") or ""), str(told.get("peer") or "")
        output = "" if peer else "\n".join((message, *tail))
        temp = self.task.env.get("TMPDIR") or tempfile.gettempdir()
        places = (folder_of(self.task), self._working_dir, Path(temp))
        if disk := full_disk(output, self._job_dir, filter(None, places)):  # its last output may be lost
            self.lacked_room = not peer and self.status != -signal.SIGTERM
            elsewhere = "--job-dir; of a host in hosts.toml state_dir, workdir or TMPDIR"
            hint = f"make room on that disk, or write elsewhere ({elsewhere}), and launch again"
        when, seconds = told.get("time"), told.get("seconds")
        when = float(when) if isinstance(when, int | float) else self._clock.time()
        return Failure(
            self.name, self._host, how, when, hint, "" if peer == self.name else peer, tail,
            message=message[:_TELLING], disk=disk, ending=ending, observer=str(told.get("observer") or ""),
            missed=next((word for word in get_args(Missed) if word == told.get("missed")), ""),
            seconds=float(seconds) if isinstance(seconds, int | float) else 0.0,
        )  # fmt: skip

    def failed_before(self, when: float) -> bool:
        """Whether it reported its failure before `when`, even if it ended much later."""
        written = (self.events.failure or {}).get("time")
        return isinstance(written, int | float) and written < when

    def check_stopped(self) -> Failure | None:
        """Return a failure, once, if the process has been stopped (e.g. by SIGSTOP), or has hung, for longer than
        `silence`.
        """
        stopped = self.running and self.identity is not None and processes.state(self.identity) == "T"
        hint = "find out who sent it SIGSTOP; a debugger does, for example"
        cause = "was stopped (SIGSTOP)"
        found = self._stops.check(stopped=stopped)
        if self._hangs.check(stopped=not stopped and self._is_stuck()):
            found, cause = True, f"has neither answered nor used processor time for {self._hangs.limit:g} s"
            hint = "a native function hangs while it holds Python's lock: py-spy dump --native shows which"
        if not found or self.failed:
            return None
        when = self._clock.time() - self._stops.limit
        return Failure(self.name, self._host, cause, when, hint, "", self.log.tail())

    def _is_stuck(self) -> bool:
        """Whether a member of the job writes no telemetry, which takes Python's lock, and has used no processor time
        since the last call. Others wait for one that computes while it holds the lock.
        """
        late = self.events.joined and not self.events.left and time.monotonic() - self.events.heard > _LATE
        if not (late and self.running and self.identity is not None):
            return False
        before, self._used = self._used, processes.run_time(self.identity)
        return self._used - before < _IDLE

    def stop_notice(self) -> str:
        """Return a warning, once, if the process has been stopped or hung for a while; call after `check_stopped`."""
        limit = f"the job waits for it, for {self._stops.limit:g} s at most (--silence)"
        if self._stops.notices():
            return f"{self.name} is stopped (SIGSTOP); {limit}"
        return f"{self.name} neither answers nor uses processor time; {limit}" if self._hangs.notices() else ""

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal, then SIGCONT, to its process group."""
        if self._process is not None and self.pidfd >= 0:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
                os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """Reap it. Call only after `check_end` returned True and the last signal to its group was sent."""
        if self._process is not None and self.status is not None and self.pidfd >= 0:
            self._process.wait()
            os.close(self.pidfd)
            self.pidfd = -1
        self.log.close()
