"""Interface of connectors: run commands on a host, open streams to them, and transfer files."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Channel", "Completed", "Connector", "File"]


@dataclass(frozen=True)
class Completed:
    """A finished command. `status` is its exit status, or the negated number of the signal that ended it, if known."""

    status: int
    output: bytes
    errors: bytes


@dataclass(frozen=True)
class File:
    """A file to be written to a host."""

    data: bytes
    mode: int = 0o600


class Channel(Protocol):
    """A running command on a host, with its stdin and stdout as a byte stream.

    One thread may receive while others send; any thread may close. A broken connection ends the stream within
    seconds.
    """

    def send(self, data: bytes) -> None:
        """Send all of `data`. Raises OSError if the stream is broken or closed."""

    def receive(self) -> bytes:
        """Receive at least one byte; b"" if the command has ended or the connection is broken."""

    def errors(self) -> str:
        """Return the last 4 KiB of the command's stderr so far; complete after the end."""

    def close(self) -> None:
        """Close its stdin; remaining output may still be received. Idempotent."""


class Connector(Protocol):
    """Access to one host of the inventory. Paths are absolute paths on that host. Thread-safe.

    Output of a command is the command's own: what the account's start-up files print is not part of it. Every method
    raises HostUnreachable if the host cannot be reached, and OSError if the operation is rejected.
    """

    @property
    def name(self) -> str:
        """Its name in the inventory."""

    @property
    def python(self) -> str:
        """The interpreter that has geomx."""

    @property
    def address(self) -> str:
        """The address that is dialled, with aliases of the user's ~/.ssh/config resolved. Raises InvalidSettings if
        they cannot be.
        """

    def run(self, argv: Sequence[str], *, data: bytes = b"", limit: float) -> Completed:
        """Run a command to completion with `data` as its stdin. Raises TimedOut after `limit` seconds; over SSH the
        command may keep running.
        """

    def open(self, argv: Sequence[str]) -> Channel:
        """Start a command without waiting for it. It should exit at the end of its stdin, the only sign of a broken
        connection. Each of its answers has to end with a newline: srun holds back up to 1023 bytes without one.
        """

    def put(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """Write a file atomically; missing folders are created with mode 0700."""

    def get(self, path: str) -> bytes:
        """Read a file. Raises FileNotFoundError."""

    def check_files(self) -> None:
        """Check that files can be transferred, before any has to be."""

    def close(self) -> None:
        """Disconnect. Detached processes keep running."""
