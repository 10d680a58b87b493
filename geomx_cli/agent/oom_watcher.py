"""Detection of kills by the kernel's OOM killer."""

import time
from pathlib import Path

__all__ = ["OomWatcher"]

_RECENT = 3.0  # seconds; an OOM-killed process may take a while to end


class OomWatcher:
    """Polls the kernel's OOM kill counter. Not thread-safe; poll it several times per second."""

    def __init__(self, counts: Path = Path("/proc/vmstat")) -> None:
        self._counts = counts
        self._kills = self._count()
        self._when = float("-inf")

    def ran_out(self) -> bool:
        """Whether an OOM kill occurred within the last seconds, since this object was created."""
        if (kills := self._count()) > self._kills:
            self._kills, self._when = kills, time.monotonic()
        return time.monotonic() - self._when < _RECENT

    def _count(self) -> int:
        try:
            lines = self._counts.read_text().splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
