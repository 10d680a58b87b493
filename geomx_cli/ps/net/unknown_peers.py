"""Connections that have not said who is at the other end: what they may cost before that.

libzmq reads whatever a connection sends, up to the largest message there is, before anybody is asked whether the key is
one of the job's. So such connections are watched from here, and those that take too much or too long are closed.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from geomx_cli.ps.net.loop import Loop
from geomx_cli.ps.net.tcp import Connection

__all__ = ["MAX_SECONDS", "UnknownPeers"]

LOOK = 0.02
"""Seconds between two looks at what they have sent."""
MAX_SECONDS = 30.0
"""Seconds for key and hello: some five round trips, each of several seconds where a slow link's queues are full."""
MAX_BYTES = 64 * 1024
MAX_CONNECTIONS = 1024  # a large job dials within seconds


class _Unknown(NamedTuple):
    connection: Connection
    since: float  # time.monotonic seconds


class UnknownPeers:
    """The connections of one listening socket, by file descriptor, until each is known. `on_refused` gets a text for
    each one that is closed here. Used by the loop's thread only.
    """

    def __init__(self, loop: Loop, on_refused: Callable[[str], None]) -> None:
        self._loop = loop
        self._on_refused = on_refused
        self._unknown: dict[int, _Unknown] = {}

    def accepted(self, descriptor: int) -> None:
        """A connection has come. It is closed at once where too many are unknown already."""
        unknown = _Unknown(Connection(descriptor), time.monotonic())
        if len(self._unknown) >= MAX_CONNECTIONS:
            self._close(unknown, f"more than {MAX_CONNECTIONS} connections had not authenticated")
            return
        if not self._unknown:
            self._loop.call_later(LOOK, self._look)
        self._unknown[descriptor] = unknown

    def known(self, descriptor: int) -> None:
        """It has said a hello that was believed, or has ended."""
        self._unknown.pop(descriptor, None)

    def _look(self) -> None:
        """Close those that have sent or taken too much."""
        now = time.monotonic()
        for descriptor, unknown in list(self._unknown.items()):
            if now - unknown.since > MAX_SECONDS:
                text = f"a connection had not authenticated within {MAX_SECONDS:g} s"
            elif unknown.connection.received() > MAX_BYTES:
                text = f"a connection had sent more than {MAX_BYTES} bytes before authentication"
            else:
                continue
            del self._unknown[descriptor]
            self._close(unknown, text)
        if self._unknown:
            self._loop.call_later(LOOK, self._look)

    def _close(self, unknown: _Unknown, text: str) -> None:
        unknown.connection.end()
        self._on_refused(text)
