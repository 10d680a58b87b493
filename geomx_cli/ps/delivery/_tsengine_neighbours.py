"""The processes that a TSEngine process exchanges reports with: the servers above, its peers, and members.

A report says how many bytes the sender has received over the link, at what rate it can send, and how fast it reaches
each server above. Reports also tell that the peer runs: one that is silent for DEAD seconds relays nothing more.
"""

import math
import time
from collections.abc import Sequence
from typing import Annotated, NotRequired, TypedDict

import msgspec

from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.cluster.bodies import Body, Count, Rate, Topic
from geomx_cli.ps.delivery._tsengine_rates import IDLE, Meter
from geomx_cli.ps.net.link import Link

__all__ = ["TOPIC", "TOPICS", "Neighbour", "Neighbours"]

TOPIC = "overlay"
OFTEN, SELDOM = 0.01, 0.2
"""Seconds between reports while bytes arrive, and otherwise."""
DEAD = 0.75
"""Seconds without a message after which a peer relays nothing more; also those without progress on a busy link."""
LOST = 3.0
"""Seconds after which bytes that a peer which is heard has not received were lost with a connection."""


class _Report(TypedDict):
    """received: bytes so far; rate: bytes per second towards the receiver; servers: to and from each server above.
    expect: key and slice of contributions that the receiver is to relay; skip: key, slice and round of those that do
    not come there; refused: requests that the sender does not serve.
    """

    received: NotRequired[Count]
    rate: NotRequired[Rate]
    servers: NotRequired[Annotated[list[tuple[Rate, Rate]], msgspec.Meta(max_length=4096)]]
    left: NotRequired[bool]
    expect: NotRequired[list[tuple[Count, Count]]]
    skip: NotRequired[list[tuple[Count, Count, Count]]]
    refused: NotRequired[list[Count]]


TOPICS = {TOPIC: Topic(_Report, notifies=True)}


class Neighbour:
    """One process of the overlay. `down`: the rate at which it sends to this process. `servers`: its rates to and from
    each server above; 0 if unknown, or if it does not relay. `has_left`: it contributes no more. Used by the loop's
    thread only.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.meter = Meter()
        self.down = 0.0
        self.servers: list[tuple[float, float]] = []
        self.has_left = False
        self.tried = 0.0  # when something was last sent to measure the link
        self._reported = False
        self._told, self._told_at = 0, 0.0

    def is_alive(self) -> bool:
        """Whether it has been heard of late."""
        return self._reported and time.monotonic() - self.link.health.heard < DEAD

    def relays(self) -> bool:
        """Whether contributions may be handed to it: it is alive, and takes what is sent."""
        stuck = self.meter.backlog > IDLE and time.monotonic() - self.meter.moved > DEAD
        return self.is_alive() and not self.has_left and not stuck

    def seconds(self, size: int) -> float | None:
        """How long `size` bytes take there, and as many back; None if unknown."""
        up, down = self.meter.rate, self.down or self.meter.rate
        return size / up + size / down if up else None

    def seconds_to_server(self, server: int, size: int) -> float | None:
        """How long `size` bytes take from there to a server above and back; None if it does not relay to that."""
        up, down = self.servers[server] if server < len(self.servers) else (0.0, 0.0)
        return size / up + size / (down or up) if up else None

    def update(self, body: Body, round_: int) -> None:
        """Take a report."""
        now = time.monotonic()
        self._reported = True
        self.meter.sent(self.link.sent, now)
        self.meter.received(int(body.get("received", 0)), now, round_)
        if "rate" in body:
            self.down = _bounded(body["rate"])
            self.servers = [(_bounded(up), _bounded(down)) for up, down in body.get("servers", ())]
        self.has_left = self.has_left or bool(body.get("left"))

    def report(self, servers: Sequence[tuple[float, float]], has_left: bool, *, now: bool = False) -> None:
        """Send a report if it is time."""
        clock = time.monotonic()
        self.meter.sent(self.link.sent, clock)
        if self.meter.backlog and self._reported and self.is_alive() and clock - self.meter.moved > LOST:
            self.meter.restart(clock)
        arriving = self.link.received - self._told > IDLE
        if not now and clock - self._told_at < (OFTEN if arriving else SELDOM):
            return
        self._told, self._told_at = self.link.received, clock
        body = {"received": self.link.received, "rate": self.meter.rate, "servers": list(servers)}
        self.link.control(TOPIC, {**body, "left": True} if has_left else body)


class Neighbours:
    """All neighbours: the servers above and peers of one that relays, and members that have reported. upstream:
    of a process that relays. Used by the loop's thread only.
    """

    def __init__(self, upstream: UpstreamClient | None) -> None:
        self._upstream = upstream
        self._has_left = False
        self._found: dict[Link, Neighbour] = {}

    def of(self, link: Link) -> Neighbour:
        """The neighbour at the other end of this link."""
        if link not in self._found:
            self._found[link] = Neighbour(link)
        return self._found[link]

    def note(self, link: Link) -> None:
        """Report at once what has arrived, if this peer takes reports."""
        if link in self._found:
            self._found[link].report(self._to_servers(), self._has_left, now=True)

    def report(self) -> None:
        """Report to those for which it is time."""
        for link in (*self._upstream.links, *self._upstream.peers.values()) if self._upstream is not None else ():
            self.of(link)
        servers = self._to_servers()
        for neighbour in self._found.values():
            neighbour.report(servers, self._has_left)

    def leave(self) -> None:
        """This process contributes no more: tell all."""
        self._has_left = True
        for link in self._found:
            self.note(link)

    def _to_servers(self) -> list[tuple[float, float]]:
        links = self._upstream.links if self._upstream is not None else ()
        return [self._to_server(self.of(link)) for link in links]

    def _to_server(self, server: Neighbour) -> tuple[float, float]:
        """The rates at which this process can relay to and from a server above; 0 if it does not."""
        return (0.0, 0.0) if self._has_left or not server.is_alive() else (server.meter.rate, server.down)


def _bounded(rate: float) -> float:
    return float(rate) if math.isfinite(rate) else 0.0
