"""Ends some of an agent's processes while the others go on: what `stop --party` asks for."""

import signal
import time
from collections.abc import Iterable

from geomx_cli.agent.child import Child

__all__ = ["PartialStop"]


class PartialStop:
    """SIGTERM to some processes' groups at once, SIGKILL after a patience. Used by the agent's one thread."""

    def __init__(self) -> None:
        self._deadlines: dict[Child, float] = {}

    def begin(self, children: Iterable[Child], patience: float) -> None:
        """End these within `patience` seconds; for one that is being ended the shorter patience holds.

        They are marked as asked for: however they end now, it is no failure of theirs.
        """
        deadline = time.monotonic() + patience
        for child in children:
            child.asked = True
            if child.running:
                child.signal_group(signal.SIGTERM)
                self._deadlines[child] = min(deadline, self._deadlines.get(child, deadline))

    def check(self, now: float) -> None:
        """Kill those whose time is over, and what an ended one has left in its group."""
        for child, deadline in list(self._deadlines.items()):
            if not child.running or now >= deadline:
                child.signal_group(signal.SIGKILL)
                del self._deadlines[child]
