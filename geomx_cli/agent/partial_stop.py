"""Terminates some of an agent's processes while the others keep running (`stop --party`)."""

import signal
import time
from collections.abc import Iterable

from geomx_cli.agent.child import Child

__all__ = ["PartialStop"]


class PartialStop:
    """Sends SIGTERM to process groups, and SIGKILL after a timeout. Not thread-safe."""

    def __init__(self) -> None:
        self._deadlines: dict[Child, float] = {}

    def begin(self, children: Iterable[Child], patience: float) -> None:
        """Terminate these within `patience` seconds; an earlier deadline of a process that is already terminating
        holds.

        Sets `asked`, so that their exit is not reported as a failure.
        """
        deadline = time.monotonic() + patience
        for child in children:
            child.asked = True
            if child.running:
                child.signal_group(signal.SIGTERM)
                self._deadlines[child] = min(deadline, self._deadlines.get(child, deadline))

    def check(self, now: float) -> None:
        """Kill processes past their deadline, and the leftover process groups of ended ones."""
        for child, deadline in list(self._deadlines.items()):
            if not child.running or now >= deadline:
                child.signal_group(signal.SIGKILL)
                del self._deadlines[child]
