"""Repeats what needs a connection to a host, while that breaks."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from geomx_cli.core.errors import GeomxError, HostUnreachable, TimedOut

__all__ = ["Reconnects"]

_LIMIT = 60.0  # seconds
_PAUSE = 1.0
_Result = TypeVar("_Result")


class Reconnects:
    """For one host. `notify` is told of each interruption, once. Once `over` is set, by any thread, the caller is about
    to close its connections, and none is opened again. Otherwise not thread-safe.
    """

    def __init__(self, notify: Callable[[str], None], over: threading.Event) -> None:
        self._notify = notify
        self._over = over
        self._works = False
        self._broken_since: float | None = None

    def progress(self) -> None:
        """Note that the host has sent something."""
        self._works, self._broken_since = True, None

    def repeat(self, do: Callable[[], _Result]) -> _Result:
        """Return the result of `do`, which calls `progress` and may be called again after HostUnreachable or TimedOut.

        Raises these if the host has never sent anything, or nothing for 60 s, and once `over` is set.
        """
        while True:
            try:
                return do()
            except (HostUnreachable, TimedOut) as error:
                if not self._goes_on(error):
                    raise
                if self._over.wait(_PAUSE):
                    raise

    def _goes_on(self, error: GeomxError) -> bool:
        now, first = time.monotonic(), self._broken_since is None
        since = self._broken_since = now if self._broken_since is None else self._broken_since
        if self._over.is_set() or not self._works or now - since >= _LIMIT:
            return False
        if first:
            self._notify(f"{error.message}; trying again, for {_LIMIT:g} s at most")
        return True
