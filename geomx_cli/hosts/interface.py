"""What every connector has: commands run on a machine, streams to them, files put there and got from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Channel", "Completed", "Connector", "File"]


@dataclass(frozen=True)
class Completed:
    """A command that has ended. `status` is its exit status; negative when a signal ended it, by minus its number
    where that is known.
    """

    status: int
    output: bytes
    errors: bytes


@dataclass(frozen=True)
class File:
    """A file to be put on a host."""

    data: bytes
    mode: int = 0o600


class Channel(Protocol):
    """A command under way on a host: its standard input and output as a byte stream.

    One thread may receive while others send; any thread may close. A connection that breaks ends the stream
    within seconds.
    """

    def send(self, data: bytes) -> None:
        """Send all of `data`. Raises OSError once the stream is broken or closed."""

    def receive(self) -> bytes:
        """What has come, at least one byte; b"" when the command has ended or the connection broke."""

    def errors(self) -> str:
        """The last 4 KiB of what the command wrote on its standard error so far; all of it after the end."""

    def close(self) -> None:
        """End its standard input; what it still writes may be received. Closing twice does no harm."""


class Connector(Protocol):
    """The way to one machine of the inventory. Paths are absolute and of that machine. Each method may be called by any
    thread.

    Every method raises HostUnreachable when the machine cannot be reached, and OSError for what it refuses.
    """

    @property
    def name(self) -> str:
        """As the inventory calls it."""

    @property
    def python(self) -> str:
        """The interpreter that has geomx."""

    @property
    def address(self) -> str:
        """What is dialled to reach it, once names that only this user has (in ~/.ssh/config) are looked up. Raises
        InvalidSettings where they cannot be.
        """

    def run(self, argv: Sequence[str], *, data: bytes = b"", limit: float) -> Completed:
        """Run a command with `data` on its standard input to its end, at most `limit` seconds. Then TimedOut; a
        command behind SSH may go on all the same.
        """

    def open(self, argv: Sequence[str]) -> Channel:
        """Start a command and return at once. It should end when its standard input does: a connection that
        breaks says no more than that.
        """

    def put(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """Write a file at once or not at all; folders that are missing are made with mode 0700."""

    def get(self, path: str) -> bytes:
        """A file's content. Raises FileNotFoundError where there is none."""

    def close(self) -> None:
        """Let go of the machine. What has detached itself there keeps running."""
