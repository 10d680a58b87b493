"""The processes of a host, suspended while their state is copied."""

import signal
import threading
import time
from collections.abc import Sequence

from geomx_cli.agent import processes
from geomx_cli.core.units import format_duration

__all__ = ["Freeze"]

_STOPPING = 5.0  # seconds for all threads to stop
_ATTEMPT, _PAUSE = 0.1, 0.01  # seconds of the first attempt, each further one is twice as long; and between them


class Freeze:
    """Suspends all processes of some sessions by SIGSTOP, from `begin` to `end`. Thread-safe.

    At the limit a thread lets the processes go on: the agent's loop may hang with the disk of the copies.
    Others can let processes go on too: who ends them by signals, or sends SIGCONT. `end` notices this.

    sessions: session ids.
    void: why a copy that was made meanwhile is of no use; "" while one may be.
    """

    def __init__(self, sessions: Sequence[int]) -> None:
        self.void = ""
        self._sessions = sessions
        self._suspended: list[processes.ProcessId] = []
        self._began = time.monotonic()
        self._lasts = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(0.0, self.end)

    @property
    def lasts(self) -> bool:
        """Whether the processes are suspended."""
        return self._lasts

    def begin(self, limit: float, why: str) -> str:
        """Suspend the processes, for `limit` seconds at most. Return why that is impossible; "" if all stand still.

        why: of `void` at the limit.
        """
        self._lasts, attempt = True, _ATTEMPT
        while time.monotonic() < self._began + _STOPPING:
            if self._attempt(min(time.monotonic() + attempt, self._began + _STOPPING)):
                self._suspended = [who for who in self._suspended if processes.exists(who)]
                self.limit(limit, why)
                return ""
            # A process in vfork does not stop before its child's exec, which a suspended child does not reach.
            processes.send_signal(self._suspended, signal.SIGCONT)
            time.sleep(_PAUSE)
            attempt *= 2
        self.end(f"processes did not stop within {_STOPPING:g} s")
        return self.void

    def _attempt(self, until: float) -> bool:
        """Suspend the processes, and return whether all of them stand still."""
        while time.monotonic() < until:
            self._suspended = processes.session_members(self._sessions)
            processes.send_signal(self._suspended, signal.SIGSTOP)
            is_complete = {*processes.session_members(self._sessions)} <= {*self._suspended}
            if is_complete and all(map(processes.is_stopped, self._suspended)):
                return True
            time.sleep(0.002)
        return False

    def limit(self, limit: float, why: str) -> None:
        """Change the limit: seconds since `begin`."""
        with self._lock:
            self._timer.cancel()
            left = max(0.0, self._began + limit - time.monotonic())
            self._timer = threading.Timer(left, self.end, [f"{why} within {format_duration(limit)}"])
            self._timer.daemon = True
            self._timer.start()

    def end(self, why: str = "") -> bool:
        """Let the processes go on, once. Return whether a copy is of one moment: all have stood still until now.

        why: for `void`, if the copy is not done.
        """
        with self._lock:
            if not self._lasts:
                return False
            self._timer.cancel()
            if not why and not all(map(_stands, self._suspended)):
                why = "processes went on during the copy, or were killed"
            self.void = why
            processes.send_signal(self._suspended, signal.SIGCONT)
            self._lasts = False  # last: whoever sees it may say so, and read `void`
            return not why


def _stands(who: processes.ProcessId) -> bool:
    """Whether a process is suspended with all its threads; one that has died is not."""
    return processes.state(who) in ("T", "t") and processes.is_stopped(who)
