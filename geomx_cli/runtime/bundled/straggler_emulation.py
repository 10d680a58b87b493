"""Emulates stragglers by slowing workers down, to test algorithms on heterogeneous machines."""

import time
from collections import deque

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.units import plain_number

__all__ = ["StragglerEmulation", "factor_of", "factors"]

REMEMBERED = 15


def factors(text: str) -> list[tuple[str, float]]:
    """Parse the option `slowdown`, as in "A/worker:1=8,B=2" or "8", to (name, factor) pairs.

    A name is a process of the plan or a party, "" the last worker. Raises InvalidSettings for invalid values.
    """
    found = []
    for part in filter(None, text.split(",")):
        who, named, number = part.rpartition("=")
        if named and not who.strip():
            hint = "write a worker or party, or the number alone"
            raise InvalidSettings(f"--slowdown {text}: there is nobody before the =", hint)
        try:
            factor = float(plain_number(number.strip()))
        except ValueError:
            factor = 0.0
        if not 1 <= factor <= 10_000:
            raise InvalidSettings(f"--slowdown {text}: {number!r} is no factor", "write one from 1, as in A/worker:1=8")
        found.append((who.strip(), factor))
    return found


def factor_of(text: str, process: str, party: str, is_last: bool) -> float:
    """Return the slowdown factor of this worker; `process` is its name in the plan."""
    found = 1.0
    for who, factor in factors(text):
        if who in (process, party) or (not who and is_last):
            found *= factor
    return found


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
