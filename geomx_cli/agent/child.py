"""One process of the job, supervised by its agent."""

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
from geomx_cli.agent.processes import ProcessId
from geomx_cli.agent.safe_open import open_record
from geomx_cli.core.atomic import open_atomic
from geomx_cli.core.errors import CheckFailed
from geomx_cli.core.jsonlines import read_objects
from geomx_cli.core.root_cause import Failure, describe_status, exception_line

__all__ = ["Child"]

_TAIL_LINES, _TAIL_BYTES = 15, 1 << 14
_STOPPED_NOTICE = 5.0
_TELLING = 500  # maximum length of a forwarded message or exception line
_DISK_FULL = 1 << 16  # bytes; a log entry may need a page of its own
_LOG_MOST, _LOG_KEPT = 64 << 20, 32 << 20  # bytes: maximum size of a log; size kept on truncation
_SHOWN = 4096  # maximum characters of a string in a forwarded event


class Child:
    """Starts a task in its own session and tracks its state. Not thread-safe.

    `silence`: seconds that the process may be stopped. An ended process stays a zombie until `close`, so its pid,
    which is also its process group id, cannot be reused, and group signals reach only its leftovers.
    """

    def __init__(self, task: Task, job_dir: Path, host: str, silence: float) -> None:
        self.task = task
        self.name = task.name
        self.status: int | None = None
        self.identity: ProcessId | None = None
        self.pidfd = -1
        self.failed = False
        self.asked = False  # its end was requested
        self.ended: float | None = None  # when its end was detected, Unix seconds
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
        """Start the process. Raises OSError if the program or working directory is missing or the log cannot be
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
        """Poll for its end and set `status`. Neither blocks nor reaps."""
        if self.running:
            result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if result is not None:
                exited = result.si_code == os.CLD_EXITED
                self.status = result.si_status if exited else -result.si_status
                self.ended = time.time()
        return self.status is not None

    def shorten_log(self) -> None:
        """Rotate an oversized log: copy its tail to NAME.1, replacing that file, and truncate the log. Output written
        concurrently may be lost.
        """
        try:
            with open_record(self._log) as log:
                size = os.fstat(log.fileno()).st_size
                if size <= _LOG_MOST:
                    return
                log.seek(size - _LOG_KEPT)
                with open_atomic(self._log.with_name(f"{self._log.name}.1")) as kept:
                    for _ in range(_LOG_KEPT >> 20):  # bounded: the process may write faster than we read
                        kept.write(log.read(1 << 20))
                os.truncate(self._log, 0)
        except (OSError, CheckFailed):  # not created yet, disk full, or not a regular file
            return

    def new_events(self) -> list[dict[str, Any]]:
        """Return the events written since the last call; of its round events only the very first and the newest.

        Round events get the field "samples", summed over all rounds so far. Long strings are truncated, long lists
        and objects dropped.
        """
        if not self._events.is_file():  # not created yet, or replaced by a pipe
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
        """Return its failure, or None. Call `new_events` first, so that its own failure event is included."""
        if not self.status:
            return None
        tail = self.tail()
        words = self._own_words or {}
        what = str(words.get("message") or "") or exception_line(tail)
        how = "failed" if words and self.status < 0 else describe_status(self.status, memory=memory)  # reported first
        cause = how + (f": {what[:_TELLING]}" if what else "")
        hint = str(words.get("hint") or "")
        if self._disk_is_full():  # its last output is lost
            cause += f"; the disk of {self._job_dir} is full"
            hint = "make room on that disk, or choose another --job-dir, and launch again"
        peer = str(words.get("peer") or "")
        when = words.get("time")
        when = float(when) if isinstance(when, int | float) else time.time()
        return Failure(self.name, self._host, cause, when, hint, "" if peer == self.name else peer, tail)

    def failed_before(self, when: float) -> bool:
        """Whether it reported its failure before `when` (time.time()), even if it ended much later."""
        written = (self._own_words or {}).get("time")
        return isinstance(written, int | float) and written < when

    def check_stopped(self) -> Failure | None:
        """Return a failure, once, if the process has been stopped (e.g. by SIGSTOP) for longer than `silence`."""
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
        """Return a warning, once, if the process has been stopped for a while; call after `check_stopped`."""
        since = self._stopped_since
        if since is None or self._stop_noticed or time.monotonic() - since < _STOPPED_NOTICE:
            return ""
        self._stop_noticed = True
        return f"{self.name} is stopped (SIGSTOP); the job waits for it, for {self._silence:g} s at most (--silence)"

    def tail(self) -> list[str]:
        """Return the last lines of its log."""
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

    def started_message(self) -> dict[str, Any]:
        """Return its "started" message for the control machine."""
        return {"type": "started", "process": self.name, "pid": self.identity.pid if self.identity else 0}


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
