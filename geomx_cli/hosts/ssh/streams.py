"""Streams of a command over SSH: output is always drained, with bounded memory."""

import io
import shlex
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import paramiko

from geomx_cli.hosts.ssh.connection import Session

__all__ = ["LARGEST", "Kept", "OwnOutput", "SshChannel", "drain", "in_thread", "remote_command", "send_input"]

LARGEST = 16 << 20  # maximum response size in bytes
_MARK = "geomx-command-output-begins"
_CHUNK = 1 << 16
_ERRORS = 4096
_ENDING = 2.0


class SshChannel:
    """A session's streams as a channel. A thread drains the command's stderr."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._closed = False
        self._own = OwnOutput()
        self._errors = b""
        self._listener = in_thread(lambda: drain(session.recv_stderr, self._note))

    def send(self, data: bytes) -> None:
        if self._closed:
            raise BrokenPipeError("the channel is closed")
        _send_all(self._session, data)

    def receive(self) -> bytes:
        with suppress(OSError):
            while data := self._session.recv(_CHUNK):
                if own := self._own.of(data):
                    return own
        return b""

    def errors(self) -> str:
        if self._session.closed or self._session.exit_status_ready():
            self._listener.join(_ENDING)
        return self._errors.decode(errors="replace")

    def close(self) -> None:
        self._closed = True
        with suppress(OSError, EOFError, paramiko.SSHException):
            self._session.shutdown_write()

    def _note(self, data: bytes) -> None:
        self._errors = (self._errors + data)[-_ERRORS:]


class Kept(io.BytesIO):
    """Buffer for a command's output, up to `LARGEST` bytes; calls `end` on overflow."""

    def __init__(self, end: Callable[[], object]) -> None:
        super().__init__()
        self._end = end
        self.full = False

    def write(self, data: Any) -> int:
        """Same as BytesIO.write."""
        if self.tell() + len(data) > LARGEST:
            self.full = True
            self._end()
            return 0
        return super().write(data)


def remote_command(argv: Sequence[str]) -> str:
    """Return the text for the login shell that runs a command, in a way that `OwnOutput` knows where it begins."""
    program, *arguments = argv
    # A leading ~ is left unquoted, for the login shell to expand.
    home = "~/" * program.startswith("~/")
    words = [home + shlex.quote(program.removeprefix(home)), *map(shlex.quote, arguments)]
    return " ".join(["sh", "-c", shlex.quote('echo "$0" && exec "$@"'), _MARK, *words])


class OwnOutput:
    """Separates a command's output from what the account's start-up files printed before it."""

    def __init__(self) -> None:
        self._before: bytes | None = b""

    @property
    def begun(self) -> bool:
        """Whether the command has been started."""
        return self._before is None

    @property
    def before(self) -> str:
        """While it has not: what was printed in its place, at most the last 4 kB."""
        return (self._before or b"").decode(errors="replace")

    def of(self, data: bytes) -> bytes:
        """Return the part of `data` that belongs to the command; b"" if none yet."""
        if self._before is None:
            return data
        _, mark, own = (self._before + data).partition(_MARK.encode() + b"\n")
        self._before = None if mark else (self._before + data)[-_ERRORS:]
        return own


def in_thread(do: Callable[[], object]) -> threading.Thread:
    """Run `do` in a daemon thread."""
    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    return thread


def _send_all(session: Session, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        sent = session.send(rest)
        if not sent:  # paramiko's sendall would retry forever
            raise BrokenPipeError("the channel is closed")
        rest = rest[sent:]


def send_input(session: Session, data: bytes) -> None:
    """Send all of a command's input, then EOF."""
    with suppress(OSError, EOFError, paramiko.SSHException):  # a command may ignore its input
        _send_all(session, data)
        session.shutdown_write()


def drain(receive: Callable[[int], bytes], take: Callable[[bytes], Any]) -> None:
    """Pass received data to `take` until the stream ends or breaks."""
    with suppress(OSError):
        while data := receive(_CHUNK):
            take(data)
