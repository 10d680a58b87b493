"""The agent's listening socket, for the control machine and for programs that stop the job."""

import os
import selectors
import socket
import stat
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geomx_cli.core.conventions import number_before
from geomx_cli.core.errors import CheckFailed
from geomx_cli.core.jsonlines import LineBuffer, decode, encode

__all__ = ["Control", "Message", "Outbox"]

# Messages to the control machine that must survive a broken connection.

_FULL = 1 << 20  # bytes


class Outbox:
    """Numbered messages, kept until acknowledged. Not thread-safe.

    last: the number before the first one.

    Unbounded: while it is `full`, the agent leaves events in the event logs and adds only rare messages (starts,
    ends, failures).
    """

    def __init__(self, last: int = 0) -> None:
        self._lines: deque[tuple[int, bytes]] = deque()
        self._last = last
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


_CHUNK = 1 << 16
_LINE_LIMIT = 1 << 20
_BACKLOG_LIMIT = 16 << 20
_CONNECTIONS = 16
_VISITORS = ("stop", "kill", "freeze", "keep", "thaw", "upload", "publish", "drop")
"""Requests that any program of this account may send."""

Message = dict[str, Any]


@dataclass
class _Connection:
    """An accepted connection with its partial input line and unsent output. number: of all that were accepted."""

    stream: socket.socket
    number: int
    incoming: LineBuffer = field(default_factory=lambda: LineBuffer(_LINE_LIMIT))
    outgoing: bytearray = field(default_factory=bytearray)


class Control:
    """Messages from and to the control machine. Never blocks. Not thread-safe.

    The first line of a connection determines its kind. A request to stop the job, or to take a checkpoint, makes it a
    visitor (e.g. `geomx stop`): its requests are executed, it receives what `answer` sends to it, and its disconnect is
    ignored. Its number is in its requests as "visitor". Any other first line makes it the control machine; the previous
    one receives "replaced" and is dropped. Messages sent by `send_durable` are kept until acknowledged and resent to a
    later control machine.

    `lost` is set when the control machine disconnects, violates the protocol or does not drain its output, but not
    when it is replaced.

    life: of the agent; its messages have higher numbers than those of agents before it.
    """

    def __init__(self, path: str, selector: selectors.BaseSelector, life: int = 0) -> None:
        _make_private(Path(path).parent)
        if life:  # a killed agent leaves its socket
            Path(path).unlink(missing_ok=True)
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
        self._accepted = 0
        self._machine: _Connection | None = None
        self.outbox = Outbox(number_before(life))
        self.lost = False
        self.heard = time.monotonic()

    @property
    def connected(self) -> bool:
        """Whether a control machine is connected."""
        return self._machine is not None

    def handle(self, source: object, mask: int) -> list[Message]:
        """Handle a selector event on one of our sockets and return the messages received."""
        if source is self._listener:
            self._accept()
        elif isinstance(source, socket.socket) and (connection := self._connections.get(source)):
            if mask & selectors.EVENT_WRITE:
                self._flush(connection)
            if mask & selectors.EVENT_READ and source in self._connections:
                return self._receive(connection)
        return []

    def send(self, message: Message) -> None:
        """Queue a message; dropped if no control machine is connected."""
        self.queue(encode(message))

    def answer(self, visitor: int, message: Message, *, durable: bool = False) -> None:
        """Queue a message for a visitor, if it is still there; 0: for the control machine, as `send` does, or as
        `send_durable`.
        """
        if not visitor:
            (self.send_durable if durable else self.send)(message)
        for connection in [one for one in self._connections.values() if one.number == visitor]:
            connection.outgoing += encode(message)
            self._flush(connection)

    def send_durable(self, message: Message) -> None:
        """Queue a message for guaranteed delivery to this or a later control machine."""
        self.queue(self.outbox.add(message))

    def resend(self) -> None:
        """Queue all unacknowledged messages again."""
        self.queue(self.outbox.unseen())

    def close(self, limit: float) -> None:
        """Flush queued output for at most `limit` seconds and close all sockets."""
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
        self._accepted += 1
        self._connections[stream] = _Connection(stream, self._accepted)
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
        known = (message for message in messages if message.get("type") in _VISITORS)
        return [{**message, "visitor": connection.number} for message in known]

    def _take_over(self, connection: _Connection) -> None:
        if (before := self._machine) is not None:
            self.send({"type": "replaced"})
        self._machine = connection
        if before is not None and before.stream in self._connections:
            self._drop(before)
        self.lost = False

    def queue(self, data: bytes) -> None:
        """Queue encoded messages; dropped if no control machine is connected."""
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
    """Create the folder for sockets, or check that it is ours and inaccessible to others."""
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        facts = folder.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            message = f"{folder} is not a folder that only you can enter"
            raise CheckFailed(message, f"remove {folder}") from None
