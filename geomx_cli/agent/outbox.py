"""What an agent has to tell the control machine and must not be lost when a connection breaks."""

from collections import deque
from typing import Any

from geomx_cli.core.jsonlines import encode

__all__ = ["Outbox"]

_FULL = 1 << 20  # bytes


class Outbox:
    """Numbered messages, kept until the control machine says that it has seen them. Used by one thread.

    It has no limit of its own: when it is `full`, the agent leaves events in the event logs, and adds only what
    is rare (starts, ends, failures).
    """

    def __init__(self) -> None:
        self._lines: deque[tuple[int, bytes]] = deque()
        self._last = 0
        self._size = 0

    @property
    def full(self) -> bool:
        """Whether so much is unacknowledged that events had better wait."""
        return self._size > _FULL

    def add(self, message: dict[str, Any]) -> bytes:
        """Number a message; the line to be sent."""
        self._last += 1
        line = encode({**message, "n": self._last})
        self._lines.append((self._last, line))
        self._size += len(line)
        return line

    def acknowledge(self, seen: int) -> None:
        """Forget messages up to number `seen`."""
        while self._lines and self._lines[0][0] <= seen:
            self._size -= len(self._lines.popleft()[1])

    def unseen(self) -> bytes:
        """The lines of all that is kept, in order."""
        return b"".join(line for _, line in self._lines)
