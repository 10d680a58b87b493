"""A barrier, which answers its requests when all live members have sent one."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection

from geomx_cli.ps.cluster.rpc import Request

__all__ = ["Barrier"]


class Barrier:
    """A barrier over the ranks that `members` returns. A rank that asks again before the others have asked is counted
    for the next barrier.

    A rank that is not a member (a master worker that does not train) is not waited for. It is answered with the others,
    or at once if they have passed already.
    """

    def __init__(self, members: Callable[[], Collection[int]]) -> None:
        self._members = members
        self._asked: defaultdict[int, deque[tuple[float, Request]]] = defaultdict(deque)
        self._passed: defaultdict[int, int] = defaultdict(int)
        self._met = 0

    def ask(self, rank: int, request: Request) -> None:
        """Record that `rank` has reached the barrier."""
        self._asked[rank].append((time.monotonic(), request))

    def release(self) -> list[Request]:
        """The requests to answer now: all if complete, else only those of non-members that the members have
        passed.
        """
        members = self._members()
        ranks = [rank for rank, waiting in self._asked.items() if waiting]
        if ranks and all(self._asked[rank] for rank in members):
            self._met += 1
        else:
            ranks = [rank for rank in ranks if rank not in members and self._passed[rank] < self._met]
        for rank in ranks:
            self._passed[rank] += 1
        return [self._asked[rank].popleft()[1] for rank in ranks]

    def waiting(self) -> tuple[float, frozenset[int]] | None:
        """Since when (time.monotonic seconds) members wait here, and the missing ranks; None if no member waits."""
        begun = [waiting[0][0] for waiting in self._asked.values() if waiting]
        missing = frozenset(rank for rank in self._members() if not self._asked[rank])
        return (min(begun), missing) if begun else None
