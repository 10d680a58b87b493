"""Detects a process that is stopped, by SIGSTOP for example, or hangs."""

import time

__all__ = ["StopDetector"]

_NOTICE = 5.0  # seconds


class StopDetector:
    """`limit`: seconds that the process may be stopped, or hang."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._since: float | None = None
        self._noticed = False

    def check(self, *, stopped: bool) -> bool:
        """Take its present state; return whether it has been in it for longer than the limit."""
        if not stopped:
            self._since, self._noticed = None, False
            return False
        self._since = self._since or time.monotonic()
        return time.monotonic() - self._since >= self.limit

    def notices(self) -> bool:
        """Return, once each time, whether it has been in it for a while as of the last check."""
        if self._since is None or self._noticed or time.monotonic() - self._since < _NOTICE:
            return False
        self._noticed = True
        return True
