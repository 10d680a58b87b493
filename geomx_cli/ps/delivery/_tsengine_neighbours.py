"""The processes with which a TSEngine process exchanges reports: the servers above, its peers, and members.

A report says how many bytes the sender has received over the link, at what rate it can send, and how fast it reaches
each server above. A report also tells that the peer runs. A peer that is silent for DEAD seconds relays nothing more.
"""

import math
import random
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, NotRequired, TypedDict

import msgspec

from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.cluster.bodies import Body, Count, Rate, Topic
from geomx_cli.ps.net.link import Link

__all__ = ["AGE", "DIRECT", "Meter", "Neighbour", "Neighbours", "TOPIC", "TOPICS", "Ways", "choose"]

# TSEngine's measurements and choice: how fast a link is, and by which way a contribution is sent. A sender knows when
# it has handed bytes to a link, and the peer reports how many it has received. So a rate is measured only while the
# link is busy, whatever else the round waits for.

DIRECT = -1
"""The way to the root without a relay, in `choose`."""
AGE = 5
"""Rounds after which a rate that was not measured again is no longer known."""
FEW, LAST = 3, 5
"""So few samples are not enough to judge a link, because busy processes (all are busy at first) receive late. Until
then the rate is the highest sample. Later it is the median of the last samples.
"""
MARGIN = 1.2
"""How many times faster than the direct way a relay has to be."""
SMALLEST = 64 * 1024
"""The fewest bytes of a sample."""
SPAN = 0.1
"""Seconds of a sample."""
MARKS = 4096
"""Number of times of sending that are kept. They cover at least the last 40 s, because a process looks a hundred times
a second.
"""
IDLE = 4096
"""So many bytes on their way do not make a link busy: they are reports and credit."""


class Meter:
    """Measures one direction of a link. Times are in time.monotonic seconds.

    If the link was busy all the time, a sample is the link's rate. If the link was sometimes idle, the sample is a
    lower bound, because it includes delays of both ends. It counts only if it is higher than the known rate.

    rate: bytes per second; 0 if unknown.
    measured: the round of the last measurement.
    moved: when bytes last arrived, or the link became busy.
    """

    def __init__(self) -> None:
        self.rate = 0.0
        self.measured = 0
        self.moved = 0.0
        self._samples = deque[float](maxlen=LAST)
        self._taken = 0  # samples since the rate was unknown or old
        # bytes handed over so far, and a time before that; on a link that stays cut nothing is reported
        self._marks = deque[tuple[int, float]](maxlen=MARKS)
        self._looked = -math.inf
        self._sent = self._received = 0
        self._start = 0.0
        self._latency = math.inf  # the least time from a mark to a report of few bytes
        self._was_idle = True
        self._bytes, self._seconds, self._all_busy = 0, 0.0, True

    @property
    def backlog(self) -> int:
        """Bytes handed over and not reported."""
        return self._sent - self._received

    def sent(self, total: int, now: float) -> None:
        """`total` bytes have been handed to the link since it exists. The new bytes were handed over since the last
        call.
        """
        before, self._looked = self._looked, now
        if total <= self._sent:
            return
        if self.backlog <= IDLE:
            self.moved = now
        self._sent = total
        self._marks.append((total, before if math.isfinite(before) else now))

    def received(self, total: int, now: float, round_: int) -> None:
        """The peer has received `total` bytes since the link exists. `round_`: the present round."""
        total = min(total, self._sent)
        news = total - self._received
        if news <= 0:
            return
        first = self._marks[0][1]
        while self._marks and self._marks[0][0] <= total:
            _, mark = self._marks.popleft()
            if news <= IDLE:
                self._latency = min(self._latency, now - mark)
        waited = now - self._start
        if self._was_idle:
            latency = self._latency if math.isfinite(self._latency) else 0.0
            waited = max(0.0, now - max(first, self._start) - latency)
        self._received, self._start, self.moved = total, now, now
        is_idle = self.backlog <= IDLE
        self._all_busy = self._all_busy and not (self._was_idle or is_idle)
        self._was_idle = is_idle
        if news > IDLE:
            self._bytes += news
            self._seconds += waited
        if self._bytes >= SMALLEST and (self._seconds >= SPAN or is_idle):
            self._add_sample(self._bytes / max(self._seconds, 1e-3), round_)
            self._bytes, self._seconds, self._all_busy = 0, 0.0, True

    def restart(self, now: float) -> None:
        """The bytes on their way were lost with a connection."""
        self._received = self._sent
        self._marks.clear()
        self._was_idle = True
        self._start = self.moved = now

    def is_stale(self, round_: int) -> bool:
        """Whether the rate is unknown, too old to be relied on, or from too few samples."""
        return self._taken < FEW or round_ - self.measured > AGE

    def _add_sample(self, rate: float, round_: int) -> None:
        if round_ - self.measured > AGE:
            self._samples.clear()
            self._taken = 0
        self.measured = round_
        self._taken += 1
        if self._samples and not self._all_busy and rate <= self.rate:
            return
        self._samples.append(rate)
        ordered = sorted(self._samples)
        self.rate = ordered[-1 if len(ordered) <= FEW else len(ordered) // 2]


TOPIC = "overlay"
OFTEN, SELDOM = 0.01, 0.2
"""Seconds between reports: while bytes arrive, and otherwise."""
DEAD = 0.75
"""Seconds without a message after which a peer relays nothing more. The same limit holds without progress on a busy
link."""
LOST = 3.0
"""Seconds after which bytes count as lost with a connection, if the peer is heard but has not received them."""


class _Report(TypedDict):
    """A report to a neighbour.

    received: bytes so far.
    rate: bytes per second towards the receiver.
    servers: bytes per second to and from each server above.
    left: whether the sender contributes no more.
    expect: key and slice of contributions that the receiver is to relay.
    skip: key, slice and round of contributions that will not be sent to the receiver.
    refused: requests that the sender does not serve.
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
    """One process of the overlay. Used by the loop's thread only.

    meter: measures the link to it.
    down: bytes per second at which it sends to this process.
    servers: its bytes per second to and from each server above; 0 if unknown, or if it does not relay.
    has_left: whether it contributes no more.
    tried: when bytes were last sent to measure the link, in time.monotonic seconds.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.meter = Meter()
        self.down = 0.0
        self.servers: list[tuple[float, float]] = []
        self.has_left = False
        self.tried = 0.0
        self._reported = False
        self._told, self._told_at = 0, 0.0

    def is_alive(self) -> bool:
        """Whether a message from this peer has arrived recently."""
        return self._reported and time.monotonic() - self.link.health.heard < DEAD

    def relays(self) -> bool:
        """Whether this peer can relay: it is alive, and accepts messages."""
        stuck = self.meter.backlog > IDLE and time.monotonic() - self.meter.moved > DEAD
        return self.is_alive() and not self.has_left and not stuck

    def seconds(self, size: int) -> float | None:
        """How long `size` bytes take to this peer, and as many back; None if unknown."""
        up, down = self.meter.rate, self.down or self.meter.rate
        return size / up + size / down if up else None

    def seconds_to_server(self, server: int, size: int) -> float | None:
        """How long `size` bytes take from this peer to a server above and back; None if it does not relay to this
        server.
        """
        up, down = self.servers[server] if server < len(self.servers) else (0.0, 0.0)
        return size / up + size / (down or up) if up else None

    def update(self, body: Body, round_: int) -> None:
        """Apply a report."""
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
    """All neighbours: the servers above and the peers of a process that relays, and members that have reported.

    upstream: of a process that relays.
    Used by the loop's thread only.
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
        """Report arrived bytes at once, if this peer accepts reports."""
        if link in self._found:
            self._found[link].report(self._to_servers(), self._has_left, now=True)

    def report(self) -> None:
        """Send the reports that are due."""
        for link in (*self._upstream.links, *self._upstream.peers.values()) if self._upstream is not None else ():
            self.of(link)
        servers = self._to_servers()
        for neighbour in self._found.values():
            neighbour.report(servers, self._has_left)

    def leave(self) -> None:
        """This process contributes no more: tell all neighbours."""
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


# The choice of a way for each contribution: directly, or through a peer.

LARGE = 64 * 1024
"""A contribution needs at least so many bytes to measure a way."""
SAME = 0.8
"""Relative cost of a peer that was not used in the round before: a change costs a round."""
TRY = 0.5
"""Seconds until a way that was tried, and of which too little is still known, is tried again."""


def choose(costs: Mapping[int, float | None], max_greed: float, draw: random.Random) -> int:
    """Choose a way for a contribution.

    costs: for each way the expected seconds; None if they are unknown.

    With probability min(known / all, max_greed), return the fastest known way. A relay counts only if it is MARGIN
    times faster than DIRECT. Otherwise return any unknown way, so that it is measured.
    """
    known = {way: cost for way, cost in costs.items() if cost is not None}
    unknown = [way for way, cost in costs.items() if cost is None]
    greed = min(len(known) / len(costs), max_greed)
    if unknown and (not known or draw.random() >= greed):
        return draw.choice(unknown)
    return min(known, key=lambda way: known[way] if way == DIRECT else MARGIN * known[way])


class Ways:
    """Chooses a way for each contribution. Used by the loop's thread only.

    max_greed: see `choose`.
    round: the present round.
    """

    def __init__(
        self, upstream: UpstreamClient, neighbours: Neighbours, max_greed: float, draw: random.Random
    ) -> None:
        self.round = 0
        self._upstream = upstream
        self._neighbours = neighbours
        self._max_greed = max_greed
        self._draw = draw
        self._began, self._period = 0.0, 0.0  # when the present round began, and seconds of the one before
        self._largest, self._known_largest = 0, 0  # contribution so far, and before the present round

    def enter(self, round_: int, size: int) -> None:
        """A contribution of `size` bytes to this round is about to be sent."""
        if round_ > self.round:
            now = time.monotonic()
            self.round, self._began, self._period = round_, now, now - self._began if self._began else 0.0
            self._known_largest = self._largest
        self._largest = max(size, self._largest)

    def choose(self, server: int, size: int, before: Collection[int] = ()) -> tuple[int, bool]:
        """The rank of the peer through which to send `size` bytes to this server, or DIRECT. Also returns whether the
        way is chosen in order to measure it.

        before: the peers that expect the slice.
        """
        straight = self._neighbours.of(self._upstream.links[server])
        direct = straight.seconds(size)
        if direct is None:
            return DIRECT, False
        # A process may notice arrived bytes some hundredths of a second late. This hardly changes the rate of a long
        # transfer.
        measures = size >= LARGE and (size >= SPAN * straight.meter.rate or 2 * size >= self._known_largest > 0)
        costs = {DIRECT: self._cost(straight, direct, measures)}
        for rank, link in self._upstream.peers.items():
            peer = self._neighbours.of(link)
            onward = peer.seconds_to_server(server, size) if peer.relays() else None
            if onward is None or onward * MARGIN > direct:
                continue  # this also keeps two peers from sending through each other
            leg = peer.seconds(size)
            if leg is not None:
                leg = self._cost(peer, max(leg, onward), measures)
            elif not measures or time.monotonic() - peer.tried < TRY:
                continue
            costs[rank] = leg * SAME if leg is not None and rank in before else leg
        way = choose(costs, self._max_greed, self._draw)
        measured = costs[way] is None
        if measured:
            (straight if way == DIRECT else self._neighbours.of(self._upstream.peers[way])).tried = time.monotonic()
        return way, measured

    def lead_here(self, rank: int) -> bool:
        """Whether an expected contribution of a peer may still arrive here."""
        neighbour = self._neighbours.of(self._upstream.peers[rank])
        return neighbour.is_alive() and not neighbour.has_left

    def _cost(self, neighbour: Neighbour, seconds: float, measures: bool) -> float | None:
        """The seconds that this way takes. None if too little is known of it. Also None if the knowledge is old, this
        contribution is large enough to measure the way, and it takes at most twice as long as the last round.
        """
        old = neighbour.meter.is_stale(self.round) and time.monotonic() - neighbour.tried > TRY
        return None if old and measures and seconds <= 2 * self._period else seconds
