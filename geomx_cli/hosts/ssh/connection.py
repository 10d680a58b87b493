"""Interface of connections to a host: what paramiko and OpenSSH's client both give."""

from typing import Any, Protocol

__all__ = ["Connection", "Session"]


class Session(Protocol):
    """One command on the host, or one subsystem, and its streams: a part of paramiko's Channel."""

    closed: bool

    def exec_command(self, command: str) -> None:
        """Start a command. Raises paramiko's SSHException, EOFError or OSError."""

    def invoke_subsystem(self, name: str) -> None:
        """Start a subsystem. Raises as `exec_command`."""

    def recv(self, size: int) -> bytes:
        """Receive from stdout; b"" at its end."""

    def recv_ready(self) -> bool:
        """Whether `recv` would return at once."""

    def recv_stderr(self, size: int) -> bytes:
        """Receive from stderr; b"" at its end."""

    def send(self, data: bytes | memoryview) -> int:
        """Send a part of `data` to stdin, and return its length."""

    def shutdown_write(self) -> None:
        """Close its stdin."""

    def exit_status_ready(self) -> bool:
        """Whether the command has ended."""

    def recv_exit_status(self) -> int:
        """Wait for its exit status; -1 if there is none."""

    def close(self) -> None:
        """End its streams, and all waits on them."""


class Connection(Protocol):
    """A connection to a host, with mutual authentication. Created by one thread, then thread-safe.

    If the host, a jump host or the network is lost, it breaks within 5 seconds: `active` becomes False and all waits on
    it end.
    """

    @property
    def active(self) -> bool:
        """Whether it is not known to be broken."""

    def open_session(self, limit: float) -> Session:
        """Open a session within `limit` seconds. Raises paramiko's ChannelException if the host refuses it, its
        SSHException, EOFError or OSError if the connection is broken.
        """

    def open_files(self) -> Any:
        """Open an SFTP client of paramiko. Raises as `open_session`, and SFTPError for output that is no SFTP."""

    def close(self) -> None:
        """Disconnect; pending operations end."""
