"""The socket on which an agent listens: the control machine speaks to it there, and whoever stops the job."""

import os
import selectors
import socket
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geomx_cli.agent.outbox import Outbox
from geomx_cli.core.errors import CheckFailed
from geomx_cli.core.jsonlines import LineBuffer, decode, encode

__all__ = ["Control"]

_CHUNK = 1 << 16
_LINE_LIMIT = 1 << 20
_BACKLOG_LIMIT = 16 << 20
_CONNECTIONS = 16
_VISITORS = ("stop", "kill")  # what any program of this account may ask for

Message = dict[str, Any]


@dataclass
class _Connection:
    """One that has connected; what came of its unfinished line, and what it is still to be sent."""

    stream: socket.socket
    incoming: LineBuffer = field(default_factory=lambda: LineBuffer(_LINE_LIMIT))
    outgoing: bytearray = field(default_factory=bytearray)


class Control:
    """Messages from and to the control machine. Never blocks; used by one thread.

    A connection is nobody's until its first line. If that asks to stop it is a visitor, as `geomx stop` on
    this host is one: obeyed, told nothing, and its end means nothing. Any other first line makes it the
    control machine, in the place of the one before, which is told "replaced". What it is told by `tell` is kept
    until it acknowledges it, and sent again to one that connects later.

    `lost` becomes true when a control machine that was connected is so no longer: it went away, broke the
    protocol, or does not read what it is sent; not when another has taken its place.
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
        self._listener.listen(_CONNECTIONS)
        selector.register(self._listener, selectors.EVENT_READ)
        self._connections: dict[socket.socket, _Connection] = {}
        self._machine: _Connection | None = None
        self._outbox = Outbox()
        self.lost = False
        self.heard = time.monotonic()

    @property
    def connected(self) -> bool:
        """Whether a control machine is connected."""
        return self._machine is not None

    def handle(self, source: object, mask: int) -> list[Message]:
        """Do what the selector reported for one of our sockets; the messages that came by it."""
        if source is self._listener:
            self._accept()
        elif isinstance(source, socket.socket) and (connection := self._connections.get(source)):
            if mask & selectors.EVENT_WRITE:
                self._flush(connection)
            if mask & selectors.EVENT_READ and source in self._connections:
                return self._receive(connection)
        return []

    @property
    def full(self) -> bool:
        """Whether so much of what was told is unacknowledged that events had better wait."""
        return self._outbox.full

    def send(self, message: Message) -> None:
        """Queue a message; without a control machine it is dropped."""
        self._queue(encode(message))

    def tell(self, message: Message) -> None:
        """Queue a message that must reach the control machine, this one or the next."""
        self._queue(self._outbox.add(message))

    def acknowledge(self, seen: int) -> None:
        """The control machine has seen what was told up to number `seen`."""
        self._outbox.acknowledge(seen)

    def unseen(self) -> bytes:
        """What was told and never acknowledged, as lines."""
        return self._outbox.unseen()

    def tell_again(self) -> None:
        """Queue all that is unacknowledged."""
        self._queue(self._outbox.unseen())

    def close(self, limit: float) -> None:
        """Send what is queued, for at most `limit` seconds, and close all sockets."""
        if self._machine is not None:
            self._machine.stream.settimeout(limit)
            try:
                self._machine.stream.sendall(self._machine.outgoing)
            except OSError:
                pass
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        stream, _ = self._listener.accept()
        if len(self._connections) >= _CONNECTIONS:
            stream.close()
            return
        stream.setblocking(False)
        self._connections[stream] = _Connection(stream)
        self._selector.register(stream, selectors.EVENT_READ)

    def _receive(self, connection: _Connection) -> list[Message]:
        try:
            data = connection.stream.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return []
        try:
            messages = [decode(line) for line in connection.incoming.feed(data)]
        except ValueError:
            self._drop(connection)
            return []
        if messages and connection is not self._machine and messages[0].get("type") not in _VISITORS:
            self._take_over(connection)
        if connection is self._machine:
            self.heard = time.monotonic()
            return messages
        return [message for message in messages if message.get("type") in _VISITORS]

    def _take_over(self, connection: _Connection) -> None:
        if (before := self._machine) is not None:
            self.send({"type": "replaced"})
        self._machine = connection
        if before is not None and before.stream in self._connections:
            self._drop(before)
        self.lost = False

    def _queue(self, data: bytes) -> None:
        if self._machine is not None:
            self._machine.outgoing += data
            self._flush(self._machine)
        if self._machine is not None and len(self._machine.outgoing) > _BACKLOG_LIMIT:
            self._drop(self._machine)

    def _flush(self, connection: _Connection) -> None:
        try:
            while connection.outgoing:
                del connection.outgoing[: connection.stream.send(connection.outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        write = selectors.EVENT_WRITE if connection.outgoing else 0
        self._selector.modify(connection.stream, selectors.EVENT_READ | write)

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.stream)
        connection.stream.close()
        del self._connections[connection.stream]
        if connection is self._machine:
            self._machine, self.lost = None, True


def _make_private(folder: Path) -> None:
    """Make the folder for sockets, or check that nobody else made it or can enter it."""
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        facts = folder.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            message = f"{folder} is not a folder that only you can enter"
            raise CheckFailed(message, f"remove {folder}") from None
