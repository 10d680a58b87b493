"""A wide-area link inside one process: a rate and a delay, for trying a job on one machine without root."""

import time

from geomx_cli.core.units import parse_wan

__all__ = ["Shaper"]


class Shaper:
    """When a message may leave this process for another party, and when one from there has arrived.

    `rate` is in bits a second each way (0: no limit), `round_trip` in seconds. Both ends delay by half the round trip.
    `share` is this process's part of its party's link. Each lane has a queue of its own, so talk passes tensors.
    """

    def __init__(self, text: str, share: float = 1.0) -> None:
        rate, self.round_trip = parse_wan(text)
        self.rate = rate * share
        self._egress_free = {"tensors": 0.0, "talk": 0.0}
        self._ingress_free = {"tensors": 0.0, "talk": 0.0}

    def __bool__(self) -> bool:
        return bool(self.rate or self.round_trip)

    def leaves(self, size: int, lane: str) -> float:
        """Time (monotonic) at which `size` bytes, handed over now, are at the far end of the link."""
        start = max(time.monotonic(), self._egress_free[lane])
        self._egress_free[lane] = start + self._duration(size)
        return self._egress_free[lane] + self.round_trip / 2

    def arrives(self, size: int, lane: str) -> float:
        """Time (monotonic) at which `size` bytes, read from the socket now, have passed the party's own link."""
        self._ingress_free[lane] = max(time.monotonic(), self._ingress_free[lane] + self._duration(size))
        return self._ingress_free[lane]

    def _duration(self, size: int) -> float:
        return size * 8 / self.rate if self.rate else 0.0
