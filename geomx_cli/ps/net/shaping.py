"""Emulates wide-area links, with rates and delays, inside a process, to try a job on one machine without root."""

import itertools
import time
from collections.abc import Callable, Iterable
from functools import partial

from geomx_cli.core.conventions import party_of
from geomx_cli.core.units import parse_wan
from geomx_cli.ps.net.loop import Loop

__all__ = ["DelayLine", "Shaper"]


class _Pipe:
    """One direction of a link. Each lane has its own queue, so control messages overtake tensors.

    rate: bits per second; 0 for unlimited.
    delay: seconds.
    """

    def __init__(self, rate: float, delay: float) -> None:
        self._rate = rate
        self._delay = delay
        self._free = {"tensors": 0.0, "control": 0.0}

    def sends(self, size: int, lane: str) -> float:
        """When (monotonic) `size` bytes that are sent now reach the far end."""
        self._free[lane] = max(time.monotonic(), self._free[lane]) + self._duration(size)
        return self._free[lane] + self._delay

    def receives(self, size: int, lane: str) -> float:
        """When (monotonic) `size` bytes, the last of which is read now, have passed the link."""
        self._free[lane] = max(time.monotonic(), self._free[lane] + self._duration(size))
        return self._free[lane]

    def _duration(self, size: int) -> float:
        return size * 8 / self._rate if self._rate else 0.0


class Shaper:
    """Computes when a message to another party leaves, and when a received message has arrived.

    text: rate and round trip of the party's own link, in each direction. Each end delays by half the round trip.
    share: this process's fraction of its party's links.
    links: rate and delay from one party to another, as "A>B=100mbit,15ms". For this direction they replace `text`, and
        the sending end emulates them.
    party: this process's party.
    """

    def __init__(self, text: str, share: float = 1.0, links: Iterable[str] = (), party: str = "") -> None:
        rate, round_trip = parse_wan(text)
        self._shapes = bool(rate or round_trip)
        self._egress, self._ingress = _Pipe(rate * share, round_trip / 2), _Pipe(rate * share, 0.0)
        self._to: dict[str, _Pipe] = {}
        self._from: set[str] = set()
        for link in links:  # of all parties, so that both ends of any link know that there is an emulation
            self._shapes = True
            pair, _, shape = link.partition("=")
            source, _, target = pair.partition(">")
            if source == party:
                link_rate, delay = parse_wan(shape)
                self._to[target] = _Pipe(link_rate * share, delay)
            elif target == party:
                self._from.add(source)

    def __bool__(self) -> bool:
        return self._shapes

    def leaves(self, size: int, lane: str, party: str = "") -> float:
        """When (monotonic) `size` bytes sent now to a party reach the far end of the link."""
        return self._to.get(party, self._egress).sends(size, lane)

    def arrives(self, size: int, lane: str, party: str = "") -> float:
        """When (monotonic) `size` bytes of a party, read from the socket now, have passed this party's own link."""
        return time.monotonic() if party in self._from else self._ingress.receives(size, lane)


class DelayLine:
    """Calls back when the emulated link has passed a message. Used by the loop's thread only."""

    def __init__(self, loop: Loop, shaper: Shaper) -> None:
        self._loop = loop
        self._shaper = shaper
        self._order = itertools.count()
        self._leaving: dict[int, Callable[[], None]] = {}

    def send(self, size: int, lane: str, peer: str, write: Callable[[], None]) -> None:
        """Call `write` when `size` bytes sent now to a process of another party reach the far end of the link."""
        number = next(self._order)
        self._leaving[number] = write
        self._loop.call_at(self._shaper.leaves(size, lane, party_of(peer)), partial(self._leave, number))

    def receive(self, size: int, lane: str, peer: str, deliver: Callable[[], None]) -> None:
        """Call `deliver` when `size` bytes of a process, read now, have passed this party's own link."""
        self._loop.call_at(self._shaper.arrives(size, lane, party_of(peer)), deliver)

    def flush(self) -> None:
        """Write all pending messages now, because the loop does not run again."""
        for number in list(self._leaving):
            self._leave(number)

    def _leave(self, number: int) -> None:
        self._leaving.pop(number)()
