"""The event log of a process: a file of JSON lines, one event per line."""

import contextlib
import errno
import itertools
import os
import sys
import time
from pathlib import Path
from typing import TextIO

import msgspec

from geomx_cli.core.events import SCHEMA_VERSION, Event, ProcessFailed
from geomx_cli.core.job_clock import JobClock
from geomx_cli.core.jsonlines import encode
from geomx_cli.core.private import make_folders

__all__ = ["EventLog"]


class EventLog:
    """Appends events to a file, one write() per line, so that lines of concurrent writers do not interleave.

    May be shared by threads (O_APPEND). Without a path, events are dropped: a process started by hand without a job
    directory has no log. With `talk`, messages of events are also printed there, so that a process's log is not empty
    when it is killed. A full disk is reported once on stderr, and later events are dropped. clock: of the times of
    events; callers that set `Event.time` use it too.
    """

    def __init__(
        self, path: Path | None, *, party: str = "", role: str = "", rank: int = -1, talk: TextIO | None = None,
        clock: JobClock | None = None,
    ) -> None:
        self.clock = clock or JobClock()
        self._who = {"party": party, "role": role, "rank": rank}
        self._talk = talk
        self._path = path
        self._file = -1
        self._full = False
        self._numbers = itertools.count(1)
        if path is not None:
            make_folders(path.parent)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    @property
    def is_kept(self) -> bool:
        """Whether events are written to a file."""
        return self._file >= 0

    def write(self, event: Event) -> None:
        """Append an event, with the current time if it has none."""
        if self._file >= 0 and not self._full:
            line = self._line(event)
            try:
                if os.write(self._file, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                self._full = True  # stays open: another thread may be about to write
                _say(sys.stderr, f"no more events are written to {self._path}: {error.strerror}")
        message = getattr(event, "message", "")
        if self._talk is not None and message and not isinstance(event, ProcessFailed):
            _say(self._talk, f"{time.strftime('%H:%M:%S')} {event.__struct_config__.tag}: {message}")

    def close(self) -> None:
        """Close the file; later writes are dropped."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _line(self, event: Event) -> bytes:
        fields = msgspec.to_builtins(event)
        when = round(event.time or self.clock.time(), 6)
        fields |= {"schema_version": SCHEMA_VERSION, "number": next(self._numbers), "time": when}
        return encode({**self._who, **fields})


def _say(stream: TextIO, text: str) -> None:
    with contextlib.suppress(OSError):  # the stream may be a file on the same full disk
        print(text, file=stream, flush=True)
