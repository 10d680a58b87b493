"""Decides which links of a process use shared memory, and keeps track of offers and loans."""

from typing import Any

from geomx_cli.core.event_log import EventLog
from geomx_cli.core.events import WarningRaised
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.shared_memory import Arena
from geomx_cli.ps.net.wire import BadMessage

__all__ = ["Sharing"]


class Sharing:
    """The dialling end of a unix socket offers its memory; a peer that can map it is on the same host and offers its
    own.

    Used by the loop's thread only.
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._arena: Arena | None = None
        self._has_no_arena = self._was_full = False
        self._allowed: set[Link] = set()
        self._offered: set[Link] = set()
        self._gone: set[Link] = set()

    def allow(self, link: Link) -> None:
        """Mark a link over a unix socket that is not an emulated wide-area link."""
        self._allowed.add(link)

    def offer(self, link: Link) -> None:
        """Offer this process's memory once, if the link allows it."""
        if link not in self._allowed or link in self._offered:
            return
        if self._arena is None and not self._has_no_arena:
            try:
                self._arena = Arena()
            except OSError:
                self._has_no_arena = True
        if self._arena is not None:
            self._offered.add(link)
            link.control("memory", self._arena.offer())

    def receive(self, link: Link, topic: str, body: dict[str, Any]) -> None:
        """Handle "memory" (an offer), "mapped" (ours was accepted) or "freed" (blocks). Raises BadMessage."""
        if link not in self._allowed:
            raise BadMessage("an offer of memory from another host")
        if topic == "memory":
            if link.map(body):
                link.control("mapped")
                self.offer(link)
        elif topic == "mapped":
            if link in self._offered:
                link.enable_shared_memory(self.lend)
        elif self._arena is not None and link not in self._gone:
            self._arena.freed(link, body.get("blocks"))

    def lend(self, link: Link, payload: memoryview, *, lasting: bool) -> bytes | None:
        """The place of a copy of the payload in shared memory; None if there is no room. See Arena.put."""
        assert self._arena is not None
        if link in self._gone:
            return None
        place = self._arena.put(link, payload, lasting=lasting)
        if place is None and not self._was_full:
            self._was_full = True
            message = "shared memory with processes of this host is full; falling back to sockets"
            self._events.write(WarningRaised(message=message))
        return place

    def forget(self, link: Link) -> None:
        """Release everything lent to a peer that has left or is lost. It may still be freeing blocks, which others may
        have by then: that has no effect, and it is lent nothing more.
        """
        self._gone.add(link)
        if self._arena is not None:
            self._arena.forget(link)
