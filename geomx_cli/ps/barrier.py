"""A barrier: whoever asks is answered when all live members have asked."""

from collections import defaultdict, deque
from collections.abc import Callable, Collection

from geomx_cli.ps.talk import Request

__all__ = ["Barrier"]


class Barrier:
    """One barrier, over the ranks that `members` returns. A rank that asks again before the others have asked waits for
    the next one.

    A rank that is no member (a master worker that does not train) is answered with the others.
    """

    def __init__(self, members: Callable[[], Collection[int]]) -> None:
        self._members = members
        self._asked: defaultdict[int, deque[Request]] = defaultdict(deque)

    def ask(self, rank: int, request: Request) -> None:
        """Note that `rank` has reached the barrier."""
        self._asked[rank].append(request)

    def release(self) -> list[Request]:
        """The requests to answer now: empty while a live member is missing."""
        members = self._members()
        if not any(self._asked.values()) or not all(self._asked[rank] for rank in members):
            return []
        return [waiting.popleft() for waiting in self._asked.values() if waiting]
