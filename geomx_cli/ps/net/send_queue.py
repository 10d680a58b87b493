"""The tensors that wait for a link's window, and the window."""

import heapq
import itertools
import math
import time
from collections import deque

from geomx_cli.ps.net.wire import Header, Kind

__all__ = ["SendQueue", "Window"]

# Limits how much a link may send: enough to fill its path, and little enough for an urgent slice to overtake.

LARGEST = 64 * 2**20
START_SLICES = 8
NEAR = 8 * 2**20
SPAN = 0.05
LATE = 0.03
"""Seconds by which reports of arrivals may be late. Bytes that arrive in this time still count as under way."""


class Window:
    """Counts the bytes sent on a link in two ways, and limits both. One message may always be sent.

    slice_bytes: bytes of a usual slice.
    fixed: bytes of both limits, which then never change; 0: the path is measured.
    wide_area: whether the link has a queue to keep short.
    held: bytes sent for which credit has not been returned. They may occupy the receiver's memory.
    size: limits `held` to 1.5 x rate x round trip, at least 2 slices.
    under_way: bytes sent that have not arrived.
    path: limits `under_way` on a wide-area link to the sum of rate x round trip, the bytes that the rate carries in
        LATE seconds, the largest message, and one message more. On other links inf.
    """

    # Why two limits: if a member is ahead of others, its contributions wait at the receiver (`held`). Meanwhile the
    # other direction of a link that these members share is idle. And no message overtakes the bytes under way, so an
    # urgent slice waits for them. A message counts as under way until all of it has arrived, so `path` has room for the
    # largest one. The round trip is the shortest time from sending to arrival. For `path` it is the round trip of a
    # heartbeat and its echo (see LinkHealth). Times of slices would include the queue that `path` is to keep short. The
    # rate is the maximum over spans of SPAN seconds, and decays by a tenth each time. A span in which other processes
    # kept the link idle tells nothing about the rate.

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
        """Whether `size` more bytes may be sent now. asked: whether the receiver needs them, and has memory for them.
        """
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
        """The peer has received `size` bytes. If more than the bytes under way, these count as received."""
        size = min(size, self.under_way)
        self.under_way -= size
        self._arrived += size
        if self._least:
            self._measure(size)

    def returned(self, size: int) -> None:
        """Credit for `size` bytes was received. If more than the held bytes, these count as returned."""
        self.held -= min(size, self.held)

    def stay_small(self) -> None:
        """Limit the window for shared memory, which has no path to fill. A fixed size is kept."""
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
        """A small message and its echo took so many seconds on the way. Slices take longer if others go before them."""
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


MAX_WANTED = 65_536
LEAST = 512
"""The fewest bytes for which a queued message counts."""


class SendQueue:
    """A queue by priority, then by request number, so a slice's rounds stay in order even if repeated.

    Slices that the peer has requested leave the queue first, in the order of its requests. The queue remembers requests
    for slices that are not queued.

    pulled: bytes of the queued results of pulls.
    """

    def __init__(self) -> None:
        self.pulled = 0
        self._heap: list[tuple[int, int, int, Header, memoryview]] = []
        self._order = itertools.count()
        self._asked: deque[tuple[Header, memoryview]] = deque()
        # by number: kind and priority of the queued messages. A repeat has the same; parts differ in priority
        self._queued: dict[tuple[bool, int], set[tuple[Kind, int]]] = {}
        self._wanted: dict[tuple[int, int, int], None] = {}

    def __bool__(self) -> bool:
        return bool(self._heap or self._asked)

    def __contains__(self, header: Header) -> bool:
        return (header.kind, header.priority) in self._queued.get(_number(header), ())

    def push(self, header: Header, payload: memoryview) -> None:
        """Queue a message. A repeat of a queued message is dropped."""
        if header in self:
            return
        self._queued.setdefault(_number(header), set()).add((header.kind, header.priority))
        self.pulled += _of_pull(header, payload)
        if self._is_wanted(header):
            self._asked.append((header, payload))
        else:
            heapq.heappush(self._heap, (-header.priority, header.request, next(self._order), header, payload))

    def remove(self, header: Header) -> None:
        """Remove a contribution, whole or in parts, if it is queued."""
        number = _number(header)
        if self._queued.pop(number, None) is not None:
            self._heap = [entry for entry in self._heap if _number(entry[-2]) != number]
            heapq.heapify(self._heap)
            self._asked = deque(entry for entry in self._asked if _number(entry[0]) != number)

    @property
    def asked(self) -> bool:
        """Whether the peer requested the first message."""
        return bool(self._asked)

    def next_size(self) -> int:
        """The size in bytes of the first payload."""
        return len(self._asked[0][-1] if self._asked else self._heap[0][-1])

    def pop(self) -> tuple[Header, memoryview]:
        """Remove the first message."""
        *_, header, payload = self._asked.popleft() if self._asked else heapq.heappop(self._heap)
        queued = self._queued[_number(header)]
        queued.discard((header.kind, header.priority))
        if not queued:
            del self._queued[_number(header)]
        self.pulled -= _of_pull(header, payload)
        return header, payload

    def ask(self, key: int, index: int, round_: int) -> bool:
        """The peer requests the contribution to a slice. The contribution, or its parts, go first, now or when they are
        queued. Returns True if some were queued.
        """
        wanted = (key, index, round_)
        found = [entry for entry in self._heap if _slice_of(entry[-2]) == wanted]
        if found:
            self._heap = [entry for entry in self._heap if _slice_of(entry[-2]) != wanted]
            heapq.heapify(self._heap)
            self._asked += [(header, payload) for *_, header, payload in sorted(found)]
            return True
        if any(_slice_of(header) == wanted for header, _ in self._asked):
            return True
        # A slice in flight is never queued here again, so its entry would stay. Evict the oldest entry.
        self._wanted[wanted] = None
        if len(self._wanted) > MAX_WANTED:
            del self._wanted[next(iter(self._wanted))]
        return False

    def _is_wanted(self, header: Header) -> bool:
        """Whether the peer requested this slice and round before. True once for each request."""
        wanted = (header.key, header.slice, header.round)
        if wanted not in self._wanted:
            return False
        if header.kind != Kind.PART:  # other parts may follow
            del self._wanted[wanted]
        return True


def _number(header: Header) -> tuple[bool, int]:
    """The request's number, and whether the peer has assigned it."""
    return header.kind == Kind.RESULT, header.request


def _slice_of(header: Header) -> tuple[int, int, int] | None:
    """Key, slice and round of a contribution or of its part."""
    return (header.key, header.slice, header.round) if header.kind in (Kind.EXCHANGE, Kind.PART) else None


def _of_pull(header: Header, payload: memoryview) -> int:
    """The bytes that count as pulled."""
    return max(len(payload), LEAST) if header.kind == Kind.RESULT and not header.round else 0
