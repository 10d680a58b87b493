"""The event log of a process: a file of JSON lines, one event per line."""

import contextlib
import errno
import itertools
import os
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

import msgspec

from geomx_cli.core.conventions import JobClock, number_before
from geomx_cli.core.events import SCHEMA_VERSION, Event, ProcessFailed, ProcessFinished, Sent, Telemetry, WarningRaised
from geomx_cli.core.files import make_folders
from geomx_cli.core.jsonlines import UNWRITTEN, encode

__all__ = ["EventLog"]

_HELD = 1 << 20  # bytes of events that wait for room on the disk
_LAST = 10.0  # seconds that a worker's last event waits for it
_PAUSE = 0.2


class EventLog:
    """Appends events to a file, one write() per line, so that lines of concurrent writers do not interleave.

    Threads may share it (O_APPEND). Without a path, events are dropped: a process started by hand without a job
    directory has no log.

    On a full disk it holds up to 1 MiB of events. Of telemetry it holds only the newest. Once there is room, it writes
    the held events, with a warning of how many are missing. A worker's last event waits 10 s for room. Then the held
    events go to stderr, where the worker's agent finds them. A failure goes to stderr at once. stderr also tells when
    the disk becomes full.

    talk: a stream on which messages of events are also printed, so that a process's log is not empty when it is killed.
    clock: times the events. Callers that set `Event.time` use it too.
    incarnation: of the process. Events of different incarnations have different numbers.
    """

    def __init__(
        self, path: Path | None, *, party: str = "", role: str = "", rank: int = -1, talk: TextIO | None = None,
        clock: JobClock | None = None, incarnation: int = 0,
    ) -> None:
        self.clock = clock or JobClock()
        self._who = {"party": party, "role": role, "rank": rank}
        self._talk = talk
        self._path = path
        self._file = -1
        self._numbers = itertools.count(number_before(incarnation) + 1)
        self._lock = threading.Lock()  # guards the following attributes, which are empty while the file can be written
        self._held: list[bytes] = []
        self._problem = ""
        self._since = 0.0
        self._missing = 0
        self._is_torn = False  # the file ends within a line
        if path is not None:
            make_folders(path.parent)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    @property
    def is_kept(self) -> bool:
        """Whether events are written to a file."""
        return self._file >= 0

    def write(self, event: Event) -> None:
        """Append an event, with the current time if it has none."""
        if self._file >= 0:
            line = self._line(event)
            if self._problem or not self._append(line):
                self._hold(line, replaced=isinstance(event, Telemetry | Sent))
                self._write_held()
            if self._problem and isinstance(event, ProcessFailed):
                _say(sys.stderr, UNWRITTEN + line.decode().rstrip())
            if self._problem and isinstance(event, ProcessFinished) and self._who["role"] == "worker":
                self._wait_for_room()
        message = getattr(event, "message", "")
        if self._talk is not None and message and not isinstance(event, ProcessFailed):
            _say(self._talk, f"{time.strftime('%H:%M:%S')} {event.__struct_config__.tag}: {message}")

    def warn(self, message: str) -> None:
        """Append a warning. Print it on stderr too, unless all events are printed."""
        self.write(WarningRaised(message=message))
        if self._talk is None:
            _say(sys.stderr, f"warning: {message}")

    def close(self) -> None:
        """Close the file; later writes are dropped."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _append(self, line: bytes) -> bool:
        """Write a line, and return whether the file has all of it."""
        try:
            written = os.write(self._file, line)
            if written == len(line):
                return True
            self._is_torn = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._problem:
                self._problem, self._since = error.strerror or str(error), time.monotonic()
                _say(sys.stderr, f"events wait until {self._path} can be written: {self._problem}")
            return False

    def _hold(self, line: bytes, *, replaced: bool) -> None:
        """Hold a line, or count it as missing. `replaced`: whether a later event of its kind replaces it."""
        with self._lock:
            if replaced or sum(map(len, self._held)) + len(line) > _HELD:
                self._missing += 1
            else:
                self._held.append(line)

    def _write_held(self) -> None:
        """Write the held lines and a report, if writing is possible again."""
        with self._lock:
            while self._held:
                # The beginning of a line may be in the file. End this line, so that it spoils no other line.
                if not self._append(b"\n" * self._is_torn + self._held[0]):
                    return
                self._is_torn = False
                del self._held[0]
            if self._problem and self._append(b"\n" * self._is_torn + self._line(self._report())):
                self._problem, self._missing, self._is_torn = "", 0, False

    def _report(self) -> WarningRaised:
        lasted = f"{time.monotonic() - self._since:.0f} s"
        lost = f"; {self._missing} events are missing, as its telemetry of that time" if self._missing else ""
        return WarningRaised(message=f"{self._path} could not be written for {lasted} ({self._problem}){lost}")

    def _wait_for_room(self) -> None:
        limit = time.monotonic() + _LAST
        while self._problem and time.monotonic() < limit:
            time.sleep(_PAUSE)
            self._write_held()
        with self._lock:
            for line in self._held if self._problem else ():
                _say(sys.stderr, UNWRITTEN + line.decode().rstrip())

    def _line(self, event: Event) -> bytes:
        fields = msgspec.to_builtins(event)
        when = round(event.time or self.clock.time(), 6)
        fields |= {"schema_version": SCHEMA_VERSION, "number": next(self._numbers), "time": when}
        return encode({**self._who, **fields})


def _say(stream: TextIO, text: str) -> None:
    with contextlib.suppress(OSError):  # the stream may be a file on the same full disk
        print(text, file=stream, flush=True)
