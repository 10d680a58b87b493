"""How to reach a host: one small interface, one module for each way.

Nothing else in geomx knows whether a host is this machine or one behind SSH. What runs there for long (the
agent) is started detached and outlives the connection; it is spoken to through a channel, a plain byte stream
that the host relays to the agent's unix socket.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Channel", "Completed", "Host"]


@dataclass(frozen=True)
class Completed:
    """A command that has ended. `status` is its exit status, or minus the number of the signal that ended it.
    """

    status: int
    output: bytes
    errors: bytes


class Channel(Protocol):
    """A byte stream to an agent. One thread may receive while others send; any thread may close."""

    def send(self, data: bytes) -> None:
        """Send all of `data`. Raises OSError once the stream is broken or closed."""

    def receive(self) -> bytes:
        """What has come, at least one byte; b"" when the other side has ended, the stream broke or was
        closed.
        """

    def close(self) -> None:
        """End the stream; a `receive` under way returns b"". Closing twice does no harm."""


class Host(Protocol):
    """One machine of the inventory. Paths are absolute and of that machine. Each method may be called by any
    thread.

    Every method raises HostUnreachable when the machine cannot be reached, and OSError for what it refuses.
    """

    @property
    def name(self) -> str:
        """As the inventory calls it."""

    @property
    def python(self) -> str:
        """The interpreter that has geomx."""

    def run(self, argv: Sequence[str], *, data: bytes = b"", limit: float) -> Completed:
        """Run a command with `data` on its standard input to its end, at most `limit` seconds (then
        TimedOut).
        """

    def start(self, argv: Sequence[str], *, log: str) -> int:
        """Start a command in a session of its own, its output appended to the file `log`; returns its pid."""

    def put(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """Write a file at once or not at all; folders that are missing are made with mode 0700."""

    def get(self, path: str) -> bytes:
        """A file's content. Raises FileNotFoundError where there is none."""

    def connect(self, socket: str, pid: int, limit: float) -> Channel:
        """A channel to the agent `pid`, as soon as it listens on the unix socket `socket`.

        Raises TimedOut after `limit` seconds, and ConnectionError when the agent ends before it listens.
        """

    def close(self) -> None:
        """Let go of the machine. What was started there keeps running."""
