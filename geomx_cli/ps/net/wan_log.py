"""Records in a process's event log how many bytes it has sent to other parties until when, for reports about rounds."""

import time
from collections.abc import Callable

from geomx_cli.core.event_log import EventLog
from geomx_cli.core.events import Sent
from geomx_cli.ps.net.loop import Loop

__all__ = ["WanLog"]

FINEST = 0.01
PART = 1 / 500


class WanLog:
    """Writes an event after bytes were sent. It writes at most one each FINEST seconds, or each PART of the time since
    it was created if that is longer. So the log grows with the logarithm of a job's duration. While nothing is sent,
    nothing is written. For the loop's thread.

    count: bytes sent to other parties so far.
    """

    def __init__(self, loop: Loop, events: EventLog, count: Callable[[], int]) -> None:
        self._loop = loop
        self._events = events
        self._count = count
        self._began = time.monotonic()
        self._newest = 0.0  # Unix seconds of the last bytes
        self._is_due = False

    def sent(self) -> None:
        """Note that bytes have just been sent."""
        if not self._events.is_kept:
            return
        self._newest = self._events.clock.time()
        if not self._is_due:
            self._is_due = True
            self._loop.call_later(max(FINEST, PART * (time.monotonic() - self._began)), self._write)

    def _write(self) -> None:
        self._is_due = False
        self._events.write(Sent(time=self._newest, wan=self._count()))
