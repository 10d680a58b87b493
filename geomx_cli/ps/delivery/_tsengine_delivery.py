"""TSEngine in one process: it chooses a way for each contribution, and takes those that come through it."""

import random
import time
from collections.abc import Collection
from functools import partial
from operator import attrgetter
from typing import Any, Literal

from geomx_cli.core import deliveries, plugins
from geomx_cli.core.events import WarningRaised
from geomx_cli.ps.aggregation.upstream import OnResult, UpstreamClient
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.delivery._tsengine_neighbours import (
    DIRECT,
    MARGIN,
    SPAN,
    TOPIC,
    TOPICS,
    Neighbour,
    Neighbours,
    choose,
)
from geomx_cli.ps.delivery._tsengine_relay import MISSES, Relay, can_be_relayed
from geomx_cli.ps.delivery.direct import Direct
from geomx_cli.ps.net.lanes import Lane
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import Content
from geomx_cli.ps.net.wire import BadMessage, Header, Kind

__all__ = ["TsEngine", "Ways"]

# The choice of a way for each contribution: directly, or through a peer.

LARGE = 64 * 1024
"""Bytes that a contribution has at least to measure a way."""
SAME = 0.8
"""Cost of a peer that was used before, in proportion: to change costs a round."""
TRY = 0.5
"""Seconds until a way that was tried, and of which too little is known still, is tried again."""


class Ways:
    """Chooses a way for each contribution. round: the present one. Used by the loop's thread only."""

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
        """The rank of the peer through which to send `size` bytes to this server, or DIRECT, and whether that is chosen
        in order to measure it. before: the peers that expect the slice.
        """
        straight = self._neighbours.of(self._upstream.links[server])
        direct = straight.seconds(size)
        if direct is None:
            return DIRECT, False
        # A process may take some hundredths of a second to see what has arrived: little, measured against much of this.
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
        """Whether the contribution of a peer that was expected here may still come."""
        neighbour = self._neighbours.of(self._upstream.peers[rank])
        return neighbour.is_alive() and not neighbour.has_left

    def _cost(self, neighbour: Neighbour, seconds: float, measures: bool) -> float | None:
        """The seconds, or None if too little is known of the way, or what is known is old, and this contribution is
        good to measure it, and does not take more than twice as long as the last round has taken.
        """
        old = neighbour.meter.is_stale(self.round) and time.monotonic() - neighbour.tried > TRY
        return None if old and measures and seconds <= 2 * self._period else seconds


TICK = 0.01
"""Seconds between looks at neighbours and contributions on their way."""
NOTED = 16 * 1024
"""Bytes of a message whose arrival is reported at once."""


class TsEngine(Direct):
    """The delivery of a worker, whose peers are the other workers of its plane ("intra"), or of a server ("inter"): the
    peers of a local server are those of other parties; a root has none and only measures. What a process sends for
    itself alone goes by `_by`: directly, or by the other delivery that the job has.
    """

    option = "tsengine"
    """The option that says at which levels processes relay."""

    def __init__(self, level: Literal["inter", "intra"]) -> None:
        self._level = level
        self._above = attrgetter("root" if level == "inter" else "server")  # of a header: the rank of its receiver

    def begin(self, node: Node, upstream: UpstreamClient | None, others: Any, /) -> None:
        """See ServerDelivery.begin and WorkerDelivery.begin."""
        super().begin(node, upstream, others)
        self._node = node
        node.rpc.add_topics(TOPICS)
        name = (*deliveries.chain(node.settings.options)[1:], "direct")[0]
        side: plugins.Side = "server" if self._level == "inter" else "worker"
        make = plugins.factory(plugins.find("delivery", name), side)
        assert make is not None
        self._by = make()
        self._by.begin(node, upstream, others)
        # Contributions are passed on alone if they cannot be added: they are encoded, or parties go through rounds by
        # themselves, which the first result says.
        self._alone: bool | None = None
        self._via: dict[int, tuple[int, Header]] = {}  # what goes through a peer, by request
        self._expecting: dict[tuple[int, int], dict[int, int]] = {}  # see Relay: by the peer that expects the slice
        relays = upstream is not None and self._is_on(self._level)
        self._neighbours = Neighbours(upstream if relays else None)
        self._ways: Ways | None = None
        self._relay: Relay | None = None
        if upstream is not None and relays:
            draw, greed = random.Random(node.process), node.settings.number("ts_greed")
            self._ways = Ways(upstream, self._neighbours, greed, draw)
            self._relay = Relay(upstream, self._by.up, self._above, self._ways.lead_here, self._warn)
        if relays or self._level == "inter":
            node.loop.every(TICK, self._tick)

    def brings(self, plane: str, rank: int) -> Collection[int]:
        """A member may bring the contributions of any other, where they relay."""
        on = self._is_on("inter" if plane == "global" else "intra")
        members = self._node.settings.upper if plane == "global" else self._node.settings.local
        return range(members.workers) if on and members is not None else (rank,)

    def leave(self) -> None:
        """See ServerDelivery.leave."""
        self._neighbours.leave()

    def up(self, server: int, header: Header, payload: memoryview | None, on_result: OnResult) -> None:
        """Send a contribution to the server, with those of others, or through a peer."""
        if self._relay is None or self._ways is None or self.upstream is None:
            self._by.up(server, header, payload, on_result)
            return
        self._ways.enter(header.round, len(payload or b""))
        then = partial(self._on_result, on_result)
        alone = self._alone or bool(header.codec)
        if payload is None or self._alone is None or not can_be_relayed(header, payload):
            self._relay.send_apart(header)
            self._skip(header)
            self._by.up(server, header, payload, then)
            return
        before = self._expecting.get((header.key, header.slice), {})
        way, measured = DIRECT, False
        if not self._relay.serves(header):
            way, measured = self._choose(server, len(payload), before)
        if way != DIRECT and not alone and way not in before:
            self._announce(header, way)
            way = way if measured else DIRECT  # the peer waits for it from the next round on
        self._skip(header, way)
        if way == DIRECT and not alone:
            self._relay.take_own(header, payload, then)
            return
        self._relay.send_apart(header)
        if way == DIRECT:
            self._by.up(server, header, payload, then)
        else:
            self._send_through(way, header, payload, then, alone=alone)

    def receive(self, link: Link, header: Header, payload: memoryview | None) -> bool:
        """Take contributions of peers, and pass results on."""
        if payload is not None and len(payload) >= NOTED:
            self._neighbours.note(link)
        return self._receive(link, header, payload) or self._by.receive(link, header, payload)

    def _receive(self, link: Link, header: Header, payload: memoryview | None) -> bool:
        if self._relay is None or self.upstream is None:
            return False
        if header.kind == Kind.EXCHANGE:
            rank = self._peer_at(link)
            if rank is None:
                return False
            self._relay.take(link, rank, header, payload)
            self._count("received", len(payload or b""))
            return True
        if header.kind != Kind.RESULT:
            return False
        if link in self.upstream.links:
            if self.upstream.awaits(link, header.request):
                self._relay.on_result(header, payload)
            return False
        if self.upstream.awaits(link, header.request):
            return False
        link.consumed(len(payload or b""))  # of a contribution that was sent another way meanwhile
        return True

    def on_request(self, request: Request) -> bool:
        """Take a neighbour's report, and what it says about contributions."""
        if request.topic == "split" and self._relay is not None:
            if self.upstream is None or request.link not in self.upstream.links:
                raise BadMessage("a refusal of a sum from a process that is no server above")
            self._relay.split(int(request.body["request"]))
            return True
        if request.topic != TOPIC:
            return bool(self._by.on_request(request))
        self._neighbours.of(request.link).update(request.body, self._ways.round if self._ways is not None else 0)
        rank = self._peer_at(request.link)
        if rank is not None and self._relay is not None:
            for number in request.body.get("refused", ()):
                if number in self._via and self._via[number][0] == rank:
                    header = self._go_direct(number)
                    if not header.asynchronous:
                        self._announce(header, rank)
            self._relay.expect(rank, request.body.get("expect", ()))
            self._relay.skip(rank, request.body.get("skip", ()))
        return True

    def on_reconnect(self, link: Link, lane: Lane) -> None:
        """What a peer has said about contributions may be lost: ask the servers for their results."""
        self._by.on_reconnect(link, lane)
        rank = self._peer_at(link)
        if lane == "control" and rank is not None:
            for number in [number for number, (way, _) in self._via.items() if way == rank]:
                self._skip(self._go_direct(number))

    def on_asked(self, link: Link, header: Header) -> None:
        """A process above lacks a slice that went through a peer, or a peer one that it sent through this process."""
        where = header.key, header.slice, header.round
        if self._relay is None or self.upstream is None:
            return
        rank = self._peer_at(link)
        ways = [way for way, sent in self._via.values() if (sent.key, sent.slice, sent.round) == where]
        if rank is None:
            for way in ways:
                self.upstream.peers[way].request_slice(*where)
            return
        if rank not in ways and self._relay.has_chosen(where):  # the peer may not know
            link.control(TOPIC, {"skip": [where]})

    # Choosing.

    def _is_on(self, level: Literal["inter", "intra"]) -> bool:
        """Whether processes of this level relay."""
        return self._node.settings.text(self.option) in (level, "both")

    def _announce(self, header: Header, way: int) -> None:
        """Tell a peer to expect this slice."""
        assert self.upstream is not None
        self._expecting.setdefault((header.key, header.slice), {})[way] = 0
        self.upstream.peers[way].control(TOPIC, {"expect": [(header.key, header.slice)]})

    def _choose(self, server: int, size: int, before: Collection[int]) -> tuple[int, bool]:
        """See Ways.choose."""
        assert self._ways is not None
        return self._ways.choose(server, size, before)

    # On their way.

    def _send_through(
        self, way: int, header: Header, payload: memoryview, on_result: OnResult, *, alone: bool
    ) -> None:
        """Send to a peer, which adds this to its own contribution, or passes it on alone."""
        assert self.upstream is not None
        header.asynchronous = alone
        if not alone:
            self._expecting.setdefault((header.key, header.slice), {})[way] = 0
        self.upstream.send(self.upstream.peers[way], header, payload, on_result)
        self._via[header.request] = way, header
        self._count("sent", len(payload))

    def _on_result(self, on_result: OnResult, header: Header, found: Content) -> None:
        # A local server adds the contributions of its workers whatever parties do.
        self._alone = header.asynchronous and self._level == "inter"
        self._via.pop(header.request, None)
        on_result(header, found)

    def _go_direct(self, number: int) -> Header:
        """Ask the server for the result of a contribution that was on its way through a peer; returns its header."""
        assert self.upstream is not None
        _, header = self._via.pop(number)
        self._count("rerouted", 1)
        self.upstream.redirect(number, self.upstream.links[self._above(header)])
        return header

    def _skip(self, header: Header, way: int = DIRECT) -> None:
        """Tell the other peers that the slice was sent through of late that it does not come there."""
        assert self.upstream is not None
        expecting = self._expecting.get((header.key, header.slice), {})
        for rank in [rank for rank in expecting if rank != way]:
            self.upstream.peers[rank].control(TOPIC, {"skip": [(header.key, header.slice, header.round)]})
            expecting[rank] += 1
            if expecting[rank] == MISSES:
                del expecting[rank]

    def _peer_at(self, link: Link) -> int | None:
        """The rank of the peer at the other end; None for another process."""
        peers = self.upstream.peers if self.upstream is not None else {}
        return next((rank for rank, peer in peers.items() if peer is link), None)

    def _warn(self, message: str) -> None:
        self._node.events.write(WarningRaised(message=message))

    def _tick(self) -> None:
        self._neighbours.report()
        if self.upstream is None or self._relay is None:
            return
        self._relay.check()
        for number, (rank, _) in list(self._via.items()):
            if not self._neighbours.of(self.upstream.peers[rank]).relays():
                self._skip(self._go_direct(number))

    def _count(self, what: str, amount: int) -> None:
        """Count what was relayed, for the telemetry."""
        relayed = self._node.telemetry.relayed
        self._node.telemetry.relayed = {**relayed, what: relayed.get(what, 0) + amount}
