"""One process of the job as its agent keeps it: a task, and the lives in which it is carried out."""

import os
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from geomx_cli.agent.diagnosis import full_disk
from geomx_cli.agent.host_spec import HostSpec, Task
from geomx_cli.agent.incarnation import EventTail, Incarnation
from geomx_cli.agent.output_log import OutputLog
from geomx_cli.agent.outputs import folder_of
from geomx_cli.core.conventions import JobClock
from geomx_cli.core.errors import Missed
from geomx_cli.core.files import make_folders
from geomx_cli.core.root_cause import Failure, describe_status, ending_of, exception_line

__all__ = ["Child"]

_TELLING = 500  # maximum length of a forwarded message or exception line


class Child:
    """A task, its log, and what is decided about it. Not thread-safe.

    life: its present or last incarnation; there is one before its start too.
    asked: its end was requested.
    failed: a failure of it was reported.
    lacked_room: it failed, by itself, while a disk was full.
    clock: the job's, used for all times here.
    """

    def __init__(self, task: Task, host_spec: HostSpec, clock: JobClock) -> None:
        job_dir = Path(host_spec.job_dir)
        self.task = task
        self.name = task.name
        self.failed = self.asked = self.lacked_room = False
        self.log = OutputLog(job_dir / "logs" / f"{task.file_name}.log")
        events = EventTail(job_dir / "events" / f"{task.file_name}.jsonl")
        self.life = Incarnation(events, host_spec.silence, clock)
        self._host = host_spec.host
        self._silence = host_spec.silence
        self._clock = clock
        self._job_dir = self._working_dir = job_dir

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
            env = {**inherited, **self.task.env, "GEOMX_SUPERVISED": "1"}
            self.life.start(self.task.argv, env, working_dir, output)
        finally:
            os.close(output)

    def failure(self, *, memory: bool) -> Failure | None:
        """Return its failure, or None. Read `events` first, so that its own failure event is included."""
        status, events = self.life.status, self.life.events
        if status == 0 and events.joined and not events.left and not full_disk("", self._job_dir, ()):
            cause, hint = "ended with status 0 but did not leave the job", "let Python exit normally: os._exit and exec"
            return Failure(self.name, self._host, cause, self._clock.time(), f"{hint} skip leaving the job")
        if not status:
            return None
        tail = self.log.tail()
        told = events.failure or {}  # written by a script, perhaps
        message = str(told.get("message") or "") or exception_line(tail)
        ending, how = ending_of(status, memory=memory), describe_status(status, memory=memory)
        if told and status < 0:  # it had reported its failure before
            ending, how = "reported", "failed"
        hint, peer = str(told.get("hint") or ""), str(told.get("peer") or "")
        output = "" if peer else "\n".join((message, *tail))
        temp = self.task.env.get("TMPDIR") or tempfile.gettempdir()
        places = (folder_of(self.task), self._working_dir, Path(temp))
        if disk := full_disk(output, self._job_dir, filter(None, places)):  # its last output may be lost
            self.lacked_room = not peer and status != -signal.SIGTERM
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
        written = (self.life.events.failure or {}).get("time")
        return isinstance(written, int | float) and written < when

    def check_stall(self) -> Failure | None:
        """Return a failure, once, if the process has been stopped or has hung for longer than --silence."""
        stall = self.life.stall()
        if stall is None or self.failed:
            return None
        when = self._clock.time() - self._silence
        return Failure(self.name, self._host, stall.how, when, stall.hint, tail=self.log.tail())

    def stall_notice(self) -> str:
        """Return a warning, once, if the process has been stopped or hung for a while; call after `check_stall`."""
        what = self.life.stall_notice()
        return f"{self.name} {what}; the job waits for it, for {self._silence:g} s at most (--silence)" if what else ""

    def close(self) -> None:
        """Reap it and close its log, after its end and the last signal to its group."""
        self.life.reap()
        self.log.close()
