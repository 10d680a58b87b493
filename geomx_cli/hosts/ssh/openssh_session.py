"""One command over a connection of OpenSSH's client: a process of ssh and its streams."""

import os
import select
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Protocol

import paramiko

from geomx_cli.core.untrusted import last_line
from geomx_cli.hosts.ssh.openssh_settings import environment
from geomx_cli.hosts.ssh.streams import drain

__all__ = ["Lifeline", "OpensshSession", "end_group"]

_OWN_STATUS = 255  # of ssh itself: it did not connect, or the connection broke
_SOON = 1.0  # seconds after which the master has ended, too


class Lifeline(Protocol):
    """The connection of a session. heard_at: when the host last sent something, by the monotonic clock."""

    heard_at: float

    @property
    def active(self) -> bool:
        """Whether it is not known to be broken."""

    def ends_within(self, limit: float) -> bool:
        """Whether it is broken, or breaks within `limit` seconds."""


class OpensshSession:
    """A process of ssh and its streams: see Session.

    The streams are sockets, so that `close` ends what waits for them in other threads.
    """

    def __init__(self, connection: Lifeline, argv: Sequence[str]) -> None:
        self._connection = connection
        self._argv = argv
        self.closed = False
        self.process: subprocess.Popen[bytes] | None = None
        self._read = False  # to the end
        self._begun = b""  # of its stderr

    def exec_command(self, command: str) -> None:
        """Start a command, and wait for its first output. Raises ChannelException if the host opens no session,
        EOFError if the connection is broken.
        """
        self.start(["--", "host", command])
        if self._stream.recv(1, socket.MSG_PEEK) or self.closed:
            return
        status = self.recv_exit_status()
        if not self._connection.active:
            raise EOFError
        if status == _OWN_STATUS:
            drain(self._err.recv, self._note)
            refusal = self._begun.decode(errors="replace").partition("session request failed: ")[2]
            if refusal:
                raise paramiko.ChannelException(1, last_line(refusal.partition("\n")[0], ""))

    def invoke_subsystem(self, name: str) -> None:
        """Start a subsystem, without waiting for it."""
        self.start(["-s", "--", "host", name])

    def start(self, arguments: Sequence[str]) -> None:
        """Start ssh. Raises EOFError if the session is closed already."""
        self._stream, stream = socket.socketpair()  # one for both directions: many hosts need many descriptors
        self._err, stderr = socket.socketpair()
        self._release = weakref.finalize(self, _close, (self._stream, self._err))
        with stream, stderr:
            self.process = subprocess.Popen(
                [*self._argv, *arguments], stdin=stream.fileno(), stdout=stream.fileno(), stderr=stderr.fileno(),
                env=environment(), start_new_session=True,
            )  # fmt: skip
        if self.closed:  # meanwhile
            self.close()
            raise EOFError

    def recv(self, size: int) -> bytes:
        """Receive from stdout; b"" at its end."""
        data = self._stream.recv(size)
        if data:
            self._connection.heard_at = time.monotonic()
        self._read = not data
        return data

    def recv_stderr(self, size: int) -> bytes:
        """Receive from stderr; b"" at its end."""
        data, self._begun = self._begun, b""
        return data or self._err.recv(size)

    def send(self, data: "bytes | memoryview") -> int:
        """Send a part of `data`; return its length."""
        return self._stream.send(data)

    def shutdown_write(self) -> None:
        """Close its stdin."""
        self._stream.shutdown(socket.SHUT_WR)

    def get_name(self) -> str:
        """A name for paramiko's log."""
        return "openssh"

    @property
    def over(self) -> bool:
        """Whether it has ended and its output has been received."""
        return self.closed or (self._read and self.exit_status_ready())

    def recv_ready(self) -> bool:
        """Whether `recv` would return at once."""
        poll = select.poll()
        poll.register(self._stream, select.POLLIN)
        return bool(poll.poll(0))

    def recv_by(self, end: float, size: int) -> bytes:
        """As `recv`. Raises TimeoutError at `end`, by the monotonic clock."""
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._stream.settimeout(left)
        try:
            return self.recv(size)
        finally:
            self._stream.settimeout(None)

    def exit_status_ready(self) -> bool:
        """Whether it has ended."""
        return self.process is not None and self.process.poll() is not None

    def recv_exit_status(self) -> int:
        """Wait for the command's exit status; -1 if the connection broke, or the command was ended with it.

        ssh ends with 255 of its own if the connection breaks, and then the master ends too.
        """
        assert self.process is not None
        status = self.process.wait()
        if status < 0 or (status == _OWN_STATUS and self._connection.ends_within(_SOON)):
            return -1
        return status

    def close(self) -> None:
        """End ssh; the host then ends the command's streams."""
        self.closed = True
        if self.process is None:
            return
        for stream in (self._stream, self._err):
            with suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        if self.process.poll() is None:
            end_group(self.process)
        self.process.wait()
        self._release()

    def _note(self, data: bytes) -> None:
        self._begun += data


def end_group(process: "subprocess.Popen[bytes]", number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to ssh and to what it has started, such as a ProxyCommand that does not end with it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _close(streams: Iterable[socket.socket]) -> None:
    for stream in streams:
        stream.close()
