"""Emulates a wide-area link, with a rate and a delay, inside a process, to try a job on one machine without root."""

import itertools
import time
from collections.abc import Callable
from functools import partial

from geomx_cli.core.units import parse_wan
from geomx_cli.ps.net.loop import Loop

__all__ = ["DelayLine", "Shaper"]


class Shaper:
    """Computes when a message leaves for another party and when a received one has arrived.

    `rate` is in bits per second in each direction (0: unlimited), `round_trip` in seconds. Each end delays by half the
    round trip. `share` is this process's fraction of its party's link. Each lane has its own queue, so control messages
    overtake tensors.
    """

    def __init__(self, text: str, share: float = 1.0) -> None:
        rate, self.round_trip = parse_wan(text)
        self.rate = rate * share
        self._egress_free = {"tensors": 0.0, "control": 0.0}
        self._ingress_free = {"tensors": 0.0, "control": 0.0}

    def __bool__(self) -> bool:
        return bool(self.rate or self.round_trip)

    def leaves(self, size: int, lane: str) -> float:
        """When (monotonic) `size` bytes sent now reach the far end of the link."""
        start = max(time.monotonic(), self._egress_free[lane])
        self._egress_free[lane] = start + self._duration(size)
        return self._egress_free[lane] + self.round_trip / 2

    def arrives(self, size: int, lane: str) -> float:
        """When (monotonic) `size` bytes read from the socket now have passed the party's own link."""
        self._ingress_free[lane] = max(time.monotonic(), self._ingress_free[lane] + self._duration(size))
        return self._ingress_free[lane]

    def _duration(self, size: int) -> float:
        return size * 8 / self.rate if self.rate else 0.0


class DelayLine:
    """Calls back when the emulated link has passed a message. Used by the loop's thread only."""

    def __init__(self, loop: Loop, shaper: Shaper) -> None:
        self._loop = loop
        self._shaper = shaper
        self._order = itertools.count()
        self._leaving: dict[int, Callable[[], None]] = {}

    def send(self, size: int, lane: str, write: Callable[[], None]) -> None:
        """Call `write` when `size` bytes sent now reach the far end of the link."""
        number = next(self._order)
        self._leaving[number] = write
        self._loop.call_at(self._shaper.leaves(size, lane), partial(self._leave, number))

    def receive(self, size: int, lane: str, deliver: Callable[[], None]) -> None:
        """Call `deliver` when `size` bytes read now have passed the party's own link."""
        self._loop.call_at(self._shaper.arrives(size, lane), deliver)

    def flush(self) -> None:
        """Write all pending messages now; the loop does not run again."""
        for number in list(self._leaving):
            self._leave(number)

    def _leave(self, number: int) -> None:
        self._leaving.pop(number)()
