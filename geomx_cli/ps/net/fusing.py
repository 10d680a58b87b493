"""When small tensors that a link has fused into one message are sent."""

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from geomx_cli.ps.net.link import Link

__all__ = ["FusingLinks"]

LONGEST = 0.01
"""Seconds that the first of them waits, at most: a turn of a busy loop handles up to 64 messages of each peer. That may
take 100 ms, in which the receiver could have begun.
"""


class FusingLinks:
    """The links that have fused tensors to send. For the loop's thread."""

    def __init__(self) -> None:
        self._links: set[Link] = set()
        self._since = 0.0

    def add(self, link: "Link") -> None:
        """This link has one."""
        if not self._links:
            self._since = time.monotonic()
        self._links.add(link)
        self.flush_due()

    def flush_due(self) -> None:
        """Send them if the first has waited long enough."""
        if self._links and time.monotonic() - self._since >= LONGEST:
            self.flush()

    def flush(self) -> None:
        """Send all."""
        while self._links:
            self._links.pop().flush()
