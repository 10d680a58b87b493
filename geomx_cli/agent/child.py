"""One process of the job, as its agent sees it."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from geomx_cli.agent import processes
from geomx_cli.agent.host_spec import Task
from geomx_cli.agent.processes import Identity
from geomx_cli.agent.safe_open import open_record
from geomx_cli.core.atomic import open_atomic
from geomx_cli.core.errors import CheckFailed
from geomx_cli.core.jsonlines import read_objects
from geomx_cli.core.root_cause import Failure, describe_status, exception_line

__all__ = ["Child"]

_TAIL_LINES, _TAIL_BYTES = 15, 1 << 14
_STOPPED_NOTICE = 5.0
_TELLING = 500  # the longest message or exception line that is passed on
_DISK_FULL = 1 << 16  # bytes; a log entry may need a page of its own
_LOG_MOST, _LOG_KEPT = 64 << 20, 32 << 20  # bytes of a log, and of it when it becomes longer than that
_SHOWN = 4096  # characters of a text in an event that is passed on


class Child:
    """Starts a task in a session of its own and sees how it goes. Used by one thread.

    `silence`: seconds that it may be stopped. Once it has ended it stays a zombie until `close`: so long its pid, which
    names its process group as well, cannot become another's, and signals to the group reach what it has left and nobody
    else.
    """

    def __init__(self, task: Task, job_dir: Path, host: str, silence: float) -> None:
        self.task = task
        self.name = task.name
        self.status: int | None = None
        self.identity: Identity | None = None
        self.pidfd = -1
        self.failed = False
        self.asked = False  # somebody asked for its end
        self.ended: float | None = None  # when it was seen to have ended, Unix seconds
        self._host = host
        self._job_dir = job_dir
        self._log = job_dir / "logs" / f"{task.file_name}.log"
        self._events = job_dir / "events" / f"{task.file_name}.jsonl"
        self._offset = 0
        self._saw_round = False
        self._samples = 0
        self._own_words: dict[str, Any] | None = None
        self._silence = silence
        self._stopped_since: float | None = None
        self._stop_noticed = False
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, inherited: Mapping[str, str], working_dir: str) -> None:
        """Raises OSError when the program or the working directory is not there, or the log cannot be
        written.
        """
        self._log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if working_dir and Path(working_dir).is_relative_to(self._job_dir):
            Path(working_dir).mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self.task.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**inherited, **self.task.env},
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

    def check_end(self) -> bool:
        """Whether it has ended by now; sets `status`. Does not wait and does not reap it."""
        if self.running:
            result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if result is not None:
                exited = result.si_code == os.CLD_EXITED
                self.status = result.si_status if exited else -result.si_status
                self.ended = time.time()
        return self.status is not None

    def shorten_log(self) -> None:
        """Where the log has become too long: its end goes to a file beside it, in the place of what was there, and the
        log begins anew. What is written meanwhile may be lost.
        """
        try:
            with open_record(self._log) as log:
                size = os.fstat(log.fileno()).st_size
                if size <= _LOG_MOST:
                    return
                log.seek(size - _LOG_KEPT)
                with open_atomic(self._log.with_name(f"{self._log.name}.1")) as kept:
                    for _ in range(_LOG_KEPT >> 20):  # and not what is written meanwhile, which may never end
                        kept.write(log.read(1 << 20))
                os.truncate(self._log, 0)
        except (OSError, CheckFailed):  # none yet, a full disk, or something else in its place
            return

    def new_events(self) -> list[dict[str, Any]]:
        """What it has written since the last call; of its rounds only its very first and the newest.

        A round gets the field "samples": those of all rounds so far. Long texts are cut short, long lists and
        objects left out.
        """
        if not self._events.is_file():  # not yet; or a script has put a pipe there
            return []
        events: list[dict[str, Any]] = []
        newest: dict[str, Any] | None = None
        for written, offset in read_objects(self._events, self._offset):
            self._offset = offset
            event = {name: _shortened(value) for name, value in written.items() if not _is_long(value)}
            kind = event.get("event")
            if kind == "round":
                event["samples"] = self._samples = self._samples + _count(event.get("num_samples"))
                if self._saw_round:
                    newest = event
                    continue
                self._saw_round = True
            if kind == "failed":
                self._own_words = event
            events.append(event)
        return events if newest is None else [*events, newest]

    def failure(self, *, memory: bool) -> Failure | None:
        """Why it ended, if it failed. Call `new_events` before, for its own account of it."""
        if not self.status:
            return None
        tail = self.tail()
        words = self._own_words or {}
        what = str(words.get("message") or "") or exception_line(tail)
        how = "failed" if words and self.status < 0 else describe_status(self.status, memory=memory)  # it said so first
        cause = how + (f": {what[:_TELLING]}" if what else "")
        hint = str(words.get("hint") or "")
        if self._disk_is_full():  # then what it wrote last is lost, and may be all there was to say
            cause += f"; the disk of {self._job_dir} is full"
            hint = "make room on that disk, or choose another --job-dir, and launch again"
        peer = str(words.get("peer") or "")
        when = words.get("time")
        when = float(when) if isinstance(when, int | float) else time.time()
        return Failure(self.name, self._host, cause, when, hint, "" if peer == self.name else peer, tail)

    def failed_before(self, when: float) -> bool:
        """Whether it had said that it fails by that time (time.time()), though it may have ended much later."""
        written = (self._own_words or {}).get("time")
        return isinstance(written, int | float) and written < when

    def check_stopped(self) -> Failure | None:
        """A failure, once, when somebody has stopped (as with SIGSTOP) the process and not continued it in
        time.
        """
        if not self.running or self.identity is None or processes.state(self.identity) != "T":
            self._stopped_since = None
            self._stop_noticed = False
            return None
        now = time.monotonic()
        self._stopped_since = self._stopped_since or now
        if self.failed or now - self._stopped_since < self._silence:
            return None
        hint = "find out who sent it SIGSTOP; a debugger does, for example"
        when = time.time() - self._silence
        return Failure(self.name, self._host, "was stopped (SIGSTOP)", when, hint, "", self.tail())

    def stop_notice(self) -> str:
        """What to say, once, of a process that has been stopped for a while; call after `check_stopped`."""
        since = self._stopped_since
        if since is None or self._stop_noticed or time.monotonic() - since < _STOPPED_NOTICE:
            return ""
        self._stop_noticed = True
        return f"{self.name} is stopped (SIGSTOP); the job waits for it, for {self._silence:g} s at most (--silence)"

    def tail(self) -> list[str]:
        """The last lines of its log."""
        try:
            with open_record(self._log) as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        except (OSError, CheckFailed):
            return []

    def _disk_is_full(self) -> bool:
        try:
            return shutil.disk_usage(self._job_dir).free < _DISK_FULL
        except OSError:
            return False

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to it and to what it has started; one that was stopped is continued to receive it."""
        if self._process is not None and self.pidfd >= 0:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
                os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """Reap it. Only after `check_end` said so, and after the last signal to its group."""
        if self._process is not None and self.status is not None and self.pidfd >= 0:
            self._process.wait()
            os.close(self.pidfd)
            self.pidfd = -1

    def started_message(self) -> dict[str, Any]:
        """What the control machine is told of its start."""
        return {"type": "started", "process": self.name, "pid": self.identity.pid if self.identity else 0}


def _count(value: Any) -> int:
    """A count as an event carries it; a script may write what it likes there."""
    return value if isinstance(value, int) and value > 0 else 0


def _is_long(value: Any) -> bool:
    """Whether a field of an event is left out where it is passed on: the event log has it."""
    return isinstance(value, dict | list) and len(str(value)) > 16 * _SHOWN


def _shortened(value: Any) -> Any:
    """A text of an event as it is passed on: a script may write what it likes there."""
    if isinstance(value, str) and len(value) > _SHOWN:
        return f"{value[:_SHOWN]}... ({len(value)} characters; the event log has them)"
    return value
