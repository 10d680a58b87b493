"""The loop of one rank in peers.py, whatever system it uses: an exchange each time that peers.py says so.

Needs the standard library only, as each system has an environment of its own. A rank prints "peer ready", and after
each "go" on its standard input exchanges and prints when it began and ended, in seconds of the monotonic clock, which
all processes of a machine share. So ranks begin together without a barrier of the system under test.
"""

import json
import sys
import time
from collections.abc import Callable

__all__ = ["MARK", "Turn", "follow", "no_preparation"]

MARK = "peer "
"""Begins each line of the protocol: libraries print too."""


def no_preparation() -> None:
    """What a system does between two exchanges, off the clock: nothing."""


class Turn:
    """One exchange: `wait` returns it when peers.py has said "go", or None at the end of the run."""

    @classmethod
    def wait(cls) -> "Turn | None":
        print(f"{MARK}ready", flush=True)
        return cls() if sys.stdin.readline().strip() == "go" else None

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._end = 0.0

    def end(self) -> None:
        """The exchange has ended."""
        self._end = time.monotonic()

    def report(self) -> None:
        """Tell peers.py, once the result has been checked."""
        print(f"{MARK}{json.dumps({'begin': self._begin, 'end': self._end})}", flush=True)


def follow(
    exchange: Callable[[], None], check: Callable[[int], None], prepare: Callable[[], None] = no_preparation
) -> None:
    """Exchange as often as peers.py says so. `check` is given the number of exchanges so far and raises an error for a
    wrong result.
    """
    done = 0
    prepare()
    while turn := Turn.wait():
        exchange()
        turn.end()
        done += 1
        check(done)
        turn.report()
        prepare()
