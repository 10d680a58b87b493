"""The tensors that wait for a link's window."""

import heapq
import itertools
from collections import deque

from geomx_cli.ps.net.wire import Header, Kind

__all__ = ["SendQueue"]

MAX_WANTED = 65_536
LEAST = 512
"""Bytes that a queued message takes at least."""


class SendQueue:
    """A queue by priority, then by request number, so a slice's rounds stay in order even if repeated.

    Messages of slices that the peer asked for leave the queue in the order of its requests, ahead of the others; it
    remembers requests for slices that are not queued. pulled: bytes of the queued results of pulls.
    """

    def __init__(self) -> None:
        self.pulled = 0
        self._heap: list[tuple[int, int, int, Header, memoryview]] = []
        self._order = itertools.count()
        self._asked: deque[tuple[Header, memoryview]] = deque()
        # kind and priority of what is queued with a number; a repeat has both too, and parts differ in the latter
        self._queued: dict[tuple[bool, int], set[tuple[Kind, int]]] = {}
        self._wanted: dict[tuple[int, int, int], None] = {}

    def __bool__(self) -> bool:
        return bool(self._heap or self._asked)

    def __contains__(self, header: Header) -> bool:
        return (header.kind, header.priority) in self._queued.get(_number(header), ())

    def push(self, header: Header, payload: memoryview) -> None:
        """Queue a message; a repeat of one that is queued is dropped."""
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
        """Whether the peer asked for the first message."""
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
        """The peer asks for the contribution to a slice, or its parts: they go first, now or when they are queued.

        Returns True if some were queued.
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
        # A slice in flight already is never queued here again, so its entry would stay: evict the oldest.
        self._wanted[wanted] = None
        if len(self._wanted) > MAX_WANTED:
            del self._wanted[next(iter(self._wanted))]
        return False

    def _is_wanted(self, header: Header) -> bool:
        """Whether the peer asked for this slice and round before; true once for each time that it asked."""
        wanted = (header.key, header.slice, header.round)
        if wanted not in self._wanted:
            return False
        if header.kind != Kind.PART:  # other parts may follow
            del self._wanted[wanted]
        return True


def _number(header: Header) -> tuple[bool, int]:
    """The request's number, and whether the peer has given it."""
    return header.kind == Kind.RESULT, header.request


def _slice_of(header: Header) -> tuple[int, int, int] | None:
    """Key, slice and round, of a contribution or its part."""
    return (header.key, header.slice, header.round) if header.kind in (Kind.EXCHANGE, Kind.PART) else None


def _of_pull(header: Header, payload: memoryview) -> int:
    """The bytes that count as pulled."""
    return max(len(payload), LEAST) if header.kind == Kind.RESULT and not header.round else 0
