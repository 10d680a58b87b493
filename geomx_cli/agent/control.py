"""The socket on which an agent listens, and the one control machine that speaks to it."""

import json
import os
import selectors
import socket
import stat
import time
from pathlib import Path
from typing import Any

from geomx_cli.errors import CheckFailed

__all__ = ["Control"]

_CHUNK = 1 << 16
_LINE_LIMIT = 1 << 20
_BACKLOG_LIMIT = 16 << 20

Message = dict[str, Any]


class Control:
    """Messages from and to the control machine. Never blocks; used by one thread.

    `lost` becomes true when a control machine that was connected is so no longer: it went away, broke the
    protocol, or does not read what it is sent.
    """

    def __init__(self, path: str, selector: selectors.BaseSelector) -> None:
        _make_private(Path(path).parent)
        self._selector = selector
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        mask = os.umask(0o177)
        try:
            self._listener.bind(path)
        finally:
            os.umask(mask)
        self._listener.listen(1)
        selector.register(self._listener, selectors.EVENT_READ)
        self._stream: socket.socket | None = None
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self.lost = False
        self.heard = time.monotonic()

    @property
    def connected(self) -> bool:
        """Whether a control machine is connected."""
        return self._stream is not None

    def handle(self, source: object, mask: int) -> list[Message]:
        """Do what the selector reported for one of our sockets; the messages that came by it."""
        if source is self._listener:
            self._accept()
        elif source is self._stream and self._stream is not None:
            if mask & selectors.EVENT_WRITE:
                self._flush()
            if mask & selectors.EVENT_READ:
                return self._receive()
        return []

    def send(self, message: Message) -> None:
        """Queue a message; without a control machine it is dropped."""
        if self._stream is not None:
            self._outgoing += json.dumps(message).encode() + b"\n"
            self._flush()
            if len(self._outgoing) > _BACKLOG_LIMIT:
                self._drop()

    def close(self, limit: float) -> None:
        """Send what is queued, for at most `limit` seconds, and close both sockets."""
        if self._stream is not None:
            self._stream.settimeout(limit)
            try:
                self._stream.sendall(self._outgoing)
            except OSError:
                pass
            self._drop()
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        stream, _ = self._listener.accept()
        if self._stream is not None:
            stream.close()  # one control machine at a time
            return
        stream.setblocking(False)
        self._stream = stream
        self.lost, self.heard = False, time.monotonic()
        self._selector.register(stream, selectors.EVENT_READ)

    def _receive(self) -> list[Message]:
        assert self._stream is not None
        try:
            data = self._stream.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self._drop()
            return []
        self.heard = time.monotonic()
        *lines, rest = (self._incoming + data).split(b"\n")
        self._incoming = bytearray(rest)
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            messages = [None]
        if len(rest) > _LINE_LIMIT or not all(isinstance(message, dict) for message in messages):
            self._drop()
            return []
        return messages

    def _flush(self) -> None:
        assert self._stream is not None
        try:
            while self._outgoing:
                del self._outgoing[: self._stream.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop()
            return
        write = selectors.EVENT_WRITE if self._outgoing else 0
        self._selector.modify(self._stream, selectors.EVENT_READ | write)

    def _drop(self) -> None:
        if self._stream is not None:
            self._selector.unregister(self._stream)
            self._stream.close()
            self._stream = None
            self.lost = True
            self._incoming.clear()
            self._outgoing.clear()


def _make_private(folder: Path) -> None:
    """Make the folder for sockets, or check that nobody else made it or can enter it."""
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        facts = folder.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            message = f"{folder} is not a folder that only you can enter"
            raise CheckFailed(message, f"remove {folder}") from None
