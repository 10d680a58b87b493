"""Messages to the control machine that must survive a broken connection."""

from collections import deque
from typing import Any

from geomx_cli.core.jsonlines import encode

__all__ = ["Outbox"]

_FULL = 1 << 20  # bytes


class Outbox:
    """Numbered messages, kept until acknowledged. Not thread-safe.

    Unbounded: while it is `full`, the agent leaves events in the event logs and adds only rare messages (starts,
    ends, failures).
    """

    def __init__(self) -> None:
        self._lines: deque[tuple[int, bytes]] = deque()
        self._last = 0
        self._size = 0

    @property
    def full(self) -> bool:
        """Whether the unacknowledged backlog is so large that events should be held back."""
        return self._size > _FULL

    def add(self, message: dict[str, Any]) -> bytes:
        """Number and store a message; return its line."""
        self._last += 1
        line = encode({**message, "n": self._last})
        self._lines.append((self._last, line))
        self._size += len(line)
        return line

    def acknowledge(self, seen: int) -> None:
        """Discard messages up to number `seen`."""
        while self._lines and self._lines[0][0] <= seen:
            self._size -= len(self._lines.popleft()[1])

    def unseen(self) -> bytes:
        """Return all stored lines in order."""
        return b"".join(line for _, line in self._lines)
