"""The event log: what one process has to say, as JSON lines, one event a line.

Every line carries `time` (Unix seconds), `party`, `role`, `rank` and `event`; the rest are the event's own fields.
Status, summaries, figures and the live view read nothing else.

Events: "state" (state), "telemetry" (state, round, bytes, progress, ...), "round" (a worker's record of one round),
"evaluation" (accuracy), "warning" (message), "failed" (message, hint, peer), "finished".
"""

import contextlib
import errno
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from geomx_cli.core.jsonlines import decode, encode

__all__ = ["Event", "EventLog", "read_events"]

Event = dict[str, Any]


class EventLog:
    """Appends events to one file. A line is one write, so that a reader never sees two events mixed.

    Used by one thread, or by several that each write whole events (O_APPEND keeps lines apart). With no path, events
    are dropped: a process started by hand without a job directory has no log. With `talk`, what has a message is
    printed there too, so that a process's log is not empty when it is killed.

    Training goes on without a log: when the disk is full, that is said once on stderr, and later events are dropped.
    """

    def __init__(
        self, path: Path | None, *, party: str = "", role: str = "", rank: int = -1, talk: TextIO | None = None
    ) -> None:
        self._who = {"party": party, "role": role, "rank": rank}
        self._talk = talk
        self._path = path
        self._file = -1
        self._full = False
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, event: str, **fields: Any) -> None:
        """Append one event with the time of now."""
        if self._file >= 0 and not self._full:
            line = encode({"time": round(time.time(), 6), **self._who, "event": event, **fields})
            try:
                if os.write(self._file, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                self._full = True  # and stays open: another thread may be about to write
                _say(sys.stderr, f"no more events are written to {self._path}: {error.strerror}")
        if self._talk is not None and "message" in fields and event != "failed":
            _say(self._talk, f"{time.strftime('%H:%M:%S')} {event}: {fields['message']}")

    def close(self) -> None:
        """Close the file; later writes are dropped."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _say(stream: TextIO, text: str) -> None:
    """Print a line; the stream may be a file on the same full disk."""
    with contextlib.suppress(OSError):
        print(text, file=stream, flush=True)


def read_events(path: Path, start: int = 0) -> Iterator[tuple[Event, int]]:
    """Yield each whole event from byte `start` on, with the offset behind it.

    A line that is still being written (no newline yet) is left for the next call; one that is no JSON object is
    passed over.
    """
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            start += len(line)
            try:
                event = decode(line)
            except ValueError:
                continue
            yield event, start
