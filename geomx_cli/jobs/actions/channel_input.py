"""Reads a channel to a host by lines and pieces."""

from collections.abc import Callable

from geomx_cli.core.errors import CheckFailed
from geomx_cli.hosts import Channel

__all__ = ["ChannelInput"]

_LINE = 16 << 20


class ChannelInput:
    """The bytes of a channel as lines and pieces. Raises EOFError at the end of the stream.

    `on_data` is called whenever some have come.
    """

    def __init__(self, channel: Channel, on_data: Callable[[], None]) -> None:
        self._channel = channel
        self._on_data = on_data
        self._rest = bytearray()

    def line(self, *, objects: bool = False) -> bytes:
        """Return the next line; with `objects` the next that begins as an object does, as an interpreter that is a
        wrapper script may print others first.
        """
        while True:
            while (end := self._rest.find(b"\n")) < 0:
                if len(self._rest) > _LINE:
                    raise CheckFailed("it sent a line without end")
                self._more()
            line = bytes(self._rest[:end])
            del self._rest[: end + 1]
            if not objects or line.startswith(b"{"):
                return line

    def some(self, most: int) -> bytes:
        """Return at least one byte and at most `most`."""
        if not self._rest:
            self._more()
        data = bytes(self._rest[:most])
        del self._rest[:most]
        return data

    def _more(self) -> None:
        data = self._channel.receive()
        if not data:
            raise EOFError
        self._on_data()
        self._rest += data
