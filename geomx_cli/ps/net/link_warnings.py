"""Warnings about the links of a process: refused messages, cut connections, and links that drop large packets."""

import time
from collections import Counter
from typing import Any

from geomx_cli.core.event_log import EventLog
from geomx_cli.core.events import WarningRaised
from geomx_cli.ps.net.link import Link

__all__ = ["LinkWarnings"]

MAX_REASONS = 8192
LONGEST_WHY, MOST_REFUSALS = 500, 20
TOGETHER = 5.0
IN_VAIN, LARGE = 3, 16 * 1024
"""Connections in a row that were given up, though each was made, without so many bytes of tensors having arrived."""


class LinkWarnings:
    """Writes the warnings of `process` to its event log, and counts refused messages in `counters`, by reason and by
    peer.
    """

    def __init__(self, events: EventLog, process: str, counters: Counter[str]) -> None:
        self._events = events
        self._process = process
        self._counters = counters
        self._refusals: set[tuple[Link, str]] = set()
        self._restored: dict[Link, float] = {}  # when the log was last told
        self._in_vain: dict[Link, tuple[int, int]] = {}  # credit when tensor connections were given up, and how often

    def refuse(self, link: Link | None, reason: str, text: str) -> None:
        """This process dropped a message: count it, and log the first of each reason and peer."""
        peer = link.name if link else "an unknown peer"
        self._counters[reason] += 1
        self._counters[f"{reason} from {peer}"] += 1
        if self._counters[f"{reason} from {peer}"] == 1 and len(self._counters) < MAX_REASONS:
            self._warn(f"refused a message from {peer}: {text}", reason)

    def report_refusal(self, link: Link, text: str) -> None:
        """Tell the peer why its tensor or query was refused, if it has not sent many such messages."""
        if self._counters[f"malformed from {link.name}"] <= MOST_REFUSALS:
            link.control("refused", {"why": text[:LONGEST_WHY]})

    def refused(self, link: Link, body: dict[str, Any]) -> None:
        """The peer refused a tensor or a query: log why, for whoever waits for the answer."""
        why = str(body.get("why"))[:LONGEST_WHY]
        if len(self._refusals) < MOST_REFUSALS and (link, why) not in self._refusals:
            self._refusals.add((link, why))
            self._warn(f"{link.name} refused a message of this process: {why}")

    def restored(self, link: Link) -> None:
        """A connection was cut and replaced: log it once for both lanes, as they are usually cut together."""
        now = time.monotonic()
        if now - self._restored.get(link, 0.0) > TOGETHER:
            self._warn(f"the connection to {link.name} was cut, and is back")
        self._restored[link] = now

    def given_up(self, link: Link) -> None:
        """A tensor connection was given up without any acknowledgement: warn after several in a row."""
        before, count = self._in_vain.get(link, (0, 0))
        count = 1 if link.returned - before > LARGE else count + 1
        self._in_vain[link] = (link.returned, count)
        if count == IN_VAIN:
            what = f"the link {self._process} - {link.name} passes small messages but drops large ones"
            why = "does something on the way drop large packets (path MTU)?"
            hint = "Try a smaller MTU on this host's interface (ip link set dev INTERFACE mtu 1280)"
            self._warn(f"{what}: {why} {hint}")

    def _warn(self, message: str, reason: str = "") -> None:
        self._events.write(WarningRaised(message=message, reason=reason))
