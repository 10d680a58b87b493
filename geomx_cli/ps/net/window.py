"""How many bytes a link keeps in flight: enough to fill the path, few enough for an urgent slice to overtake."""

import time
from collections import deque

__all__ = ["Window"]

LARGEST = 64 * 2**20
START_SLICES = 8
NEAR = 8 * 2**20
SPAN = 0.05


class Window:
    """Counts bytes in flight and measures how many the path needs.

    The size is 1.5 x rate x round trip, but at least 2 slices, and at least what the rate carries in `slack` seconds,
    up to 8 slices: members that share a wide-area link take turns at being ahead, and a congestion control that probes
    for bandwidth slowly (BBR) loses more by each stop than by a longer queue. The round trip is the shortest time from
    sending to credit; the rate is the maximum over spans of SPAN seconds, decaying by a tenth each time. A fixed size
    (`fixed` > 0, bytes) never changes. One message may always be in flight.
    """

    def __init__(self, slice_bytes: int, fixed: int = 0, slack: float = 0.0) -> None:
        self._slack = slack
        self._most = LARGEST
        self.size = fixed or START_SLICES * slice_bytes
        self._least = 0 if fixed else 2 * slice_bytes
        self.under_way = 0
        self._sent = self._returned = 0
        self._marks: deque[tuple[int, float]] = deque()
        self._round_trip = float("inf")
        self._rate = 0.0
        self._span_start, self._span_bytes = 0.0, 0

    def admits(self, size: int) -> bool:
        """Whether `size` more bytes may be sent now."""
        return self.under_way == 0 or self.under_way + size <= self.size

    def sent(self, size: int) -> None:
        """`size` bytes were handed to the socket."""
        if self.under_way == 0:
            self._span_start, self._span_bytes = time.monotonic(), 0
        self.under_way += size
        self._sent += size
        if self._least:
            self._marks.append((self._sent, time.monotonic()))

    def returned(self, size: int) -> None:
        """Credit for `size` bytes was received. More than is in flight counts as all of it."""
        size = min(size, self.under_way)
        self.under_way -= size
        self._returned += size
        if self._least:
            self._measure(size)

    def stay_small(self) -> None:
        """Limit the window for shared memory, where there is no path to fill. A fixed size is kept."""
        if self._least:
            self._most = max(NEAR, self._least)
            self.size = min(self.size, self._most)

    def restart(self) -> None:
        """A new connection: nothing is in flight on it."""
        self.under_way = 0
        self._returned = self._sent
        self._marks.clear()

    def _measure(self, size: int) -> None:
        now = time.monotonic()
        while self._marks and self._marks[0][0] <= self._returned:
            self._round_trip = min(self._round_trip, now - self._marks.popleft()[1])
        self._span_bytes += size
        if now - self._span_start >= SPAN:
            self._rate = max(0.9 * self._rate, self._span_bytes / (now - self._span_start))
            self._span_start, self._span_bytes = now, 0
            if self._round_trip < float("inf"):
                path = min(self._most, int(1.5 * self._rate * self._round_trip))
                self.size = max(self._least, path, min(4 * self._least, int(self._slack * self._rate)))
