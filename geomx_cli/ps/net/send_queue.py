"""The tensors that wait for a link's window."""

import heapq
import itertools

from geomx_cli.ps.net.wire import Header, Kind

__all__ = ["SendQueue"]

MAX_WANTED = 65_536
LEAST = 512
"""Bytes that a queued message takes at least."""


class SendQueue:
    """A queue by priority, then by request number, so a slice's rounds stay in order even if repeated.

    It also remembers the slices that the peer asked for and that were not queued. pulled: bytes of the queued results
    of pulls.
    """

    def __init__(self) -> None:
        self.pulled = 0
        self._heap: list[tuple[int, int, int, Header, memoryview]] = []
        self._order = itertools.count()
        self._queued: set[tuple[Kind, int]] = set()
        self._wanted: dict[tuple[int, int, int], None] = {}

    def __bool__(self) -> bool:
        return bool(self._heap)

    def __contains__(self, header: Header) -> bool:
        return (header.kind, header.request) in self._queued

    def push(self, header: Header, payload: memoryview) -> None:
        """Queue a message; a repeat of one that is queued is dropped."""
        if header not in self:
            self._queued.add((header.kind, header.request))
            self.pulled += _of_pull(header, payload)
            heapq.heappush(self._heap, (-header.priority, header.request, next(self._order), header, payload))

    def next_size(self) -> int:
        """The size in bytes of the first payload."""
        return len(self._heap[0][-1])

    def pop(self) -> tuple[Header, memoryview]:
        """Remove the first message."""
        *_, header, payload = heapq.heappop(self._heap)
        self._queued.discard((header.kind, header.request))
        self.pulled -= _of_pull(header, payload)
        return header, payload

    def take(self, key: int, index: int, round_: int) -> tuple[Header, memoryview] | None:
        """Remove the contribution to a slice that the peer asks for. If it is not queued, `is_wanted` will be true of
        it once.
        """
        wanted = (key, index, round_)
        for position, (*_, header, payload) in enumerate(self._heap):
            if (header.key, header.slice, header.round) == wanted and header.kind == Kind.EXCHANGE:
                del self._heap[position]
                heapq.heapify(self._heap)
                self._queued.discard((header.kind, header.request))
                return header, payload
        # A slice in flight already is never queued here again, so its entry would stay: evict the oldest.
        self._wanted[wanted] = None
        if len(self._wanted) > MAX_WANTED:
            del self._wanted[next(iter(self._wanted))]
        return None

    def is_wanted(self, header: Header) -> bool:
        """Whether the peer asked for this slice and round before; true once for each time that it asked."""
        wanted = (header.key, header.slice, header.round)
        if wanted not in self._wanted:
            return False
        del self._wanted[wanted]
        return True


def _of_pull(header: Header, payload: memoryview) -> int:
    """The bytes that count as pulled."""
    return max(len(payload), LEAST) if header.kind == Kind.RESULT and not header.round else 0
