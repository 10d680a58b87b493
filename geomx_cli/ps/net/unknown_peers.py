"""Limits the cost of connections whose peer is not yet identified.

libzmq reads whatever a connection sends, up to the largest message size, before the key is checked. So unidentified
connections are watched here, and those that send too much or take too long are closed.
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
    """The unidentified connections of one listening socket, by file descriptor. `on_refused` gets a text for each one
    closed here. Used by the loop's thread only.
    """

    def __init__(self, loop: Loop, on_refused: Callable[[str], None]) -> None:
        self._loop = loop
        self._on_refused = on_refused
        self._unknown: dict[int, _Unknown] = {}

    def accepted(self, descriptor: int) -> None:
        """Register an accepted connection. It is closed at once if there are too many unidentified ones."""
        unknown = _Unknown(Connection(descriptor), time.monotonic())
        if len(self._unknown) >= MAX_CONNECTIONS:
            self._close(unknown, f"more than {MAX_CONNECTIONS} connections had not authenticated")
            return
        if not self._unknown:
            self._loop.call_later(LOOK, self._poll)
        self._unknown[descriptor] = unknown

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._unknown

    def known(self, descriptor: int) -> None:
        """The connection has sent an accepted hello, or has ended."""
        self._unknown.pop(descriptor, None)

    def _poll(self) -> None:
        """Close the connections that have exceeded the byte or time limit."""
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
            self._loop.call_later(LOOK, self._poll)

    def _close(self, unknown: _Unknown, text: str) -> None:
        unknown.connection.end()
        self._on_refused(text)
