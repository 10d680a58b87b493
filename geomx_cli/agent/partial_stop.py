"""Terminates some of an agent's processes while the others keep running (`stop --party`)."""

import signal
import time
from collections.abc import Iterable

from geomx_cli.agent.child import Child
from geomx_cli.agent.lifecycle import TERMINATE

__all__ = ["PartialStop"]


class PartialStop:
    """Sends SIGTERM to process groups, and SIGKILL after a timeout. Not thread-safe.

    Schedulers and servers get SIGTERM once none of the workers runs, as these may need them to end, and SIGKILL a
    second later than workers.
    """

    def __init__(self) -> None:
        self._deadlines: dict[Child, float] = {}
        self._terminated: set[Child] = set()

    def begin(self, children: Iterable[Child], grace: float) -> None:
        """Terminate these within `grace` seconds; an earlier deadline of a process that is already terminating
        holds.

        Sets `asked`, so that their exit is not reported as a failure.
        """
        deadline = time.monotonic() + grace
        for child in children:
            child.asked = True
            if child.running:
                own = deadline + TERMINATE * child.task.serves
                self._deadlines[child] = min(own, self._deadlines.get(child, own))
        self._terminate()

    def check(self, now: float) -> None:
        """Kill processes past their deadline, and the leftover process groups of ended ones."""
        for child, deadline in list(self._deadlines.items()):
            if not child.running or now >= deadline:
                child.signal_group(signal.SIGKILL)
                del self._deadlines[child]
        self._terminate()

    def _terminate(self) -> None:
        workers = [child for child in self._deadlines if child.running and not child.task.serves]
        for child in workers or self._deadlines:
            if child not in self._terminated:
                self._terminated.add(child)
                child.signal_group(signal.SIGTERM)
