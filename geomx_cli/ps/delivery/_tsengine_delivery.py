"""TSEngine in one process: it chooses a way for each contribution, and handles contributions that pass through it."""

import random
from collections.abc import Collection
from functools import partial
from operator import attrgetter
from typing import Any, Literal

from geomx_cli.core import deliveries, plugins
from geomx_cli.core.events import WarningRaised
from geomx_cli.ps.aggregation.upstream import OnResult, UpstreamClient
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.delivery._tsengine_neighbours import DIRECT, TOPIC, TOPICS, Neighbours, Ways
from geomx_cli.ps.delivery._tsengine_relay import MISSES, Relay, can_be_relayed
from geomx_cli.ps.delivery.direct import Direct
from geomx_cli.ps.net.lanes import Lane
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import Content
from geomx_cli.ps.net.wire import BadMessage, Header, Kind

__all__ = ["TsEngine"]

TICK = 0.01
"""Seconds between checks of neighbours and of contributions on their way."""
NOTED = 16 * 1024
"""The arrival of a message with so many bytes is reported at once."""


class TsEngine(Direct):
    """The delivery of a worker ("intra"), whose peers are the other workers of its plane, or of a server ("inter"). The
    peers of a local server are local servers of other parties. A root has no peers, and only measures. `_by` sends a
    process's own contribution if it is not relayed: directly, or by the job's other delivery.
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
        # Contributions are passed on alone if they cannot be added: if they are encoded, or if parties go through
        # rounds by themselves, which the first result tells.
        self._alone: bool | None = None
        self._via: dict[int, tuple[int, Header]] = {}  # contributions that pass through a peer, by request
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
        """A member may bring the contributions of any other member, if members relay."""
        on = self._is_on("inter" if plane == "global" else "intra")
        members = self._node.settings.upper if plane == "global" else self._node.settings.local
        return range(members.workers) if on and members is not None else (rank,)

    def leave(self) -> None:
        """See ServerDelivery.leave."""
        self._neighbours.leave()

    def up(self, server: int, header: Header, payload: memoryview | None, on_result: OnResult) -> None:
        """Send a contribution to the server, with the peers' contributions if this process relays. Or send it through a
        peer.
        """
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
            self._relay.send_with_others(header, payload, then)
            return
        self._relay.send_apart(header)
        if way == DIRECT:
            self._by.up(server, header, payload, then)
        else:
            self._send_through(way, header, payload, then, alone=alone)

    def receive(self, link: Link, header: Header, payload: memoryview | None) -> bool:
        """Accept contributions of peers, and pass results on."""
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
            self._relay.on_contribution(link, rank, header, payload)
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
        link.consumed(len(payload or b""))  # of a contribution that was meanwhile sent another way
        return True

    def on_request(self, request: Request) -> bool:
        """Apply a neighbour's report, and its notices about contributions."""
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
        """A peer's notices about contributions may be lost. Ask the servers for the results of these contributions."""
        self._by.on_reconnect(link, lane)
        rank = self._peer_at(link)
        if lane == "control" and rank is not None:
            for number in [number for number, (way, _) in self._via.items() if way == rank]:
                self._skip(self._go_direct(number))

    def on_renewed(self, link: Link) -> None:
        """See Delivery; `on_reconnect` follows."""
        self._by.on_renewed(link)

    def on_asked(self, link: Link, header: Header) -> None:
        """A process above lacks a slice that was sent through a peer, or a peer lacks a slice that it sent through this
        process."""
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
        """Tell a peer that this slice will be sent through it."""
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
        # A local server adds the contributions of its workers, even if parties go through rounds by themselves.
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
        """Tell the other peers, through which the slice was recently sent, that it is not sent through them."""
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
        self._relay.expire_waits()
        for number, (rank, _) in list(self._via.items()):
            if not self._neighbours.of(self.upstream.peers[rank]).relays():
                self._skip(self._go_direct(number))

    def _count(self, what: str, amount: int) -> None:
        """Count the relayed bytes, for the telemetry."""
        relayed = self._node.telemetry.relayed
        self._node.telemetry.relayed = {**relayed, what: relayed.get(what, 0) + amount}
