"""Whether this machine has just run out of memory."""

import time
from pathlib import Path

__all__ = ["OomWatcher"]

_RECENT = 3.0  # seconds; a process that is killed for its memory may take a while to end


class OomWatcher:
    """Looks how often the kernel has ended a process for want of memory. Used by one thread, which asks several times
    a second.
    """

    def __init__(self, counts: Path = Path("/proc/vmstat")) -> None:
        self._counts = counts
        self._kills = self._count()
        self._when = float("-inf")

    def ran_out(self) -> bool:
        """Whether that happened within the last seconds, since this object was made."""
        if (kills := self._count()) > self._kills:
            self._kills, self._when = kills, time.monotonic()
        return time.monotonic() - self._when < _RECENT

    def _count(self) -> int:
        try:
            lines = self._counts.read_text().splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
