"""Emulates stragglers by slowing workers down, to test algorithms on heterogeneous machines."""

import time
from collections import deque

__all__ = ["StragglerEmulation"]

REMEMBERED = 15


class StragglerEmulation:
    """Emulates a machine that is slower by `factor`.

    Each step is prolonged based on the shortest of the last ones: time spent waiting for a busy processor is not
    multiplied, as it would not be on a slow machine.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._steps: deque[float] = deque(maxlen=REMEMBERED)

    def after(self, seconds: float) -> None:
        """Sleep after a step that took `seconds`."""
        self._steps.append(seconds)
        time.sleep((self._factor - 1) * min(self._steps))
