"""How much a link may send: enough to fill its path, little enough for an urgent slice to overtake."""

import math
import time
from collections import deque

__all__ = ["Window"]

LARGEST = 64 * 2**20
START_SLICES = 8
NEAR = 8 * 2**20
SPAN = 0.05
LATE = 0.03
"""Seconds by which reports of arrivals may be late, in which bytes arrive that count as under way."""


class Window:
    """Counts the bytes sent on a link in two ways, and limits both. One message may always be sent.

    `held`: sent, and credit has not been returned; they may occupy the receiver's memory. `size` limits them to
    1.5 x rate x round trip, at least 2 slices: what one member is ahead of others waits at the receiver, and keeps the
    other direction of a link that they share idle.

    `under_way`: sent, and not arrived. Nothing overtakes these bytes, so that an urgent slice waits for them. On a
    link with `wide_area`, `path` limits them to rate x round trip, what the rate carries in LATE seconds, the
    largest message, as one counts until all of it has arrived, and one message more; elsewhere there is no queue to
    keep short.

    The round trip is the shortest time from sending to arrival, for `path` that of a heartbeat and its echo (see
    LinkHealth); the rate is the maximum over spans of SPAN seconds, decaying by a tenth each time. A fixed size
    (`fixed` > 0, bytes) limits both and never changes.
    """

    def __init__(self, slice_bytes: int, fixed: int = 0, *, wide_area: bool = False) -> None:
        self._most = LARGEST
        self.size = fixed or START_SLICES * slice_bytes
        self.path: float = self.size if wide_area else math.inf
        self._least = 0 if fixed else 2 * slice_bytes
        self.under_way = self.held = 0
        self._sent = self._arrived = self._largest = 0
        self._marks: deque[tuple[int, float]] = deque()
        self._round_trip = self._on_the_way = math.inf
        self._rate = 0.0
        self._span_start, self._span_bytes = 0.0, 0

    @property
    def rate(self) -> float:
        """Bytes per second that the path carries, as far as measured."""
        return self._rate

    def admits(self, size: int, *, asked: bool = False) -> bool:
        """Whether `size` more bytes may be sent now. asked: the receiver needs them, and has memory for them."""
        return self.held == 0 or (self.under_way < self.path and (asked or self.held + size <= self.size))

    def sent(self, size: int) -> None:
        """`size` bytes were handed to the socket."""
        if self.under_way == 0:
            self._span_start, self._span_bytes = time.monotonic(), 0
        self.under_way += size
        self._largest = max(self._largest, size)
        self.held += size
        self._sent += size
        if self._least:
            self._marks.append((self._sent, time.monotonic()))

    def arrived(self, size: int) -> None:
        """The peer has received `size` bytes. More than are under way count as all of them."""
        size = min(size, self.under_way)
        self.under_way -= size
        self._arrived += size
        if self._least:
            self._measure(size)

    def returned(self, size: int) -> None:
        """Credit for `size` bytes was received. More than are held count as all of them."""
        self.held -= min(size, self.held)

    def stay_small(self) -> None:
        """Limit the window for shared memory, where there is no path to fill. A fixed size is kept."""
        if self._least:
            self._most = max(NEAR, self._least)
            self.size = min(self.size, self._most)
            self.path = math.inf

    def restart(self) -> None:
        """A new connection: nothing is in flight on it."""
        self.under_way = self.held = 0
        self._arrived = self._sent
        self._marks.clear()

    def crossed(self, round_trip: float) -> None:
        """A small message and its echo took so many seconds on the way: slices take longer where others go before."""
        self._on_the_way = round_trip

    def _measure(self, size: int) -> None:
        now = time.monotonic()
        while self._marks and self._marks[0][0] <= self._arrived:
            self._round_trip = min(self._round_trip, now - self._marks.popleft()[1])
        self._span_bytes += size
        if now - self._span_start >= SPAN:
            self._rate = max(0.9 * self._rate, self._span_bytes / (now - self._span_start))
            self._span_start, self._span_bytes = now, 0
            if self._round_trip < math.inf:
                on_the_way = self._on_the_way if self._on_the_way < math.inf else self._round_trip
                path = self._rate * max(self._round_trip, on_the_way)  # the route may have become longer
                self.size = max(self._least, min(self._most, int(1.5 * path)))
                if self.path < math.inf:
                    self.path = self._largest + (on_the_way + LATE) * self._rate
