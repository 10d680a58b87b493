"""Workers that are slowed down on purpose, to see how an algorithm copes with unequal machines."""

import time
from collections import deque

from geomx_cli.core.errors import InvalidSettings

__all__ = ["StragglerEmulation", "factor_of", "factors"]

REMEMBERED = 15


def factors(text: str) -> list[tuple[str, float]]:
    """Who is slowed down and by how much: the value of the option `slowdown`, as in "A/worker:1=8,B=2" or "8".

    Who is a process of the plan or a party, "" the last worker. Raises InvalidSettings for what makes no sense.
    """
    found = []
    for part in filter(None, text.split(",")):
        who, _, number = part.rpartition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = 0.0
        if not 1 <= factor <= 10_000:
            raise InvalidSettings(f"--slowdown {text}: {number!r} is no factor", "write one from 1, as in A/worker:1=8")
        found.append((who.strip(), factor))
    return found


def factor_of(text: str, process: str, party: str, is_last: bool) -> float:
    """By what the steps of this worker take longer; `process` is its name in the plan."""
    found = 1.0
    for who, factor in factors(text):
        if who in (process, party) or (not who and is_last):
            found *= factor
    return found


class StragglerEmulation:
    """A machine that is `factor` times as slow.

    Each step is prolonged by the time that one needs, the least of the last ones: what a step waited for a processor
    that others used is not multiplied, as it would not be on a slow machine.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._steps: deque[float] = deque(maxlen=REMEMBERED)

    def after(self, seconds: float) -> None:
        """Sleep, after a step of so many seconds."""
        self._steps.append(seconds)
        time.sleep((self._factor - 1) * min(self._steps))
