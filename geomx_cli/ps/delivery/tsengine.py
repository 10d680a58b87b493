"""TSEngine: local servers send their sums through the party that brings them to the global servers soonest.

Zhou et al., IEEE TNSM 18(4), 2021. A party behind a slow link hands its sum to another party's local server, which adds
it to its own, sends one contribution to the global server, and passes the result back. Each local server chooses anew
for every slice and round, by rates that it and its peers measure. See docs/delivery.md.
"""

import random
import time
from functools import partial
from typing import TYPE_CHECKING

from geomx_cli.core import plugins
from geomx_cli.core.options import Option
from geomx_cli.ps.delivery.direct import Direct

if TYPE_CHECKING:
    from collections.abc import Collection

    from geomx_cli.core.plugins import Spec
    from geomx_cli.ps.aggregation.delivery_interface import ContributionInbox
    from geomx_cli.ps.aggregation.upstream import OnResult, UpstreamClient
    from geomx_cli.ps.cluster.node import Node
    from geomx_cli.ps.cluster.rpc import Request
    from geomx_cli.ps.delivery._tsengine_neighbours import Neighbour
    from geomx_cli.ps.net.link import Link
    from geomx_cli.ps.net.payload import Content
    from geomx_cli.ps.net.wire import Header

name = "tsengine"
chosen_by = "tsengine"
options = (
    Option(
        "tsengine", "text", "", "GEOMX_TSENGINE",
        "Let parties relay for each other. inter: the sum of a party behind a slow link goes through the local server"
        " of another party, which adds it to its own, and the result back the same way.", "transport",
        choices=("", "inter"),
    ),
    Option(
        "ts_greed", "float", 0.9, "MAX_GREED_RATE_TS",
        "Highest probability of the fastest way that is known, where others have not been measured of late (tsengine).",
        "transport", minimum=0, maximum=1,
    ),
)  # fmt: skip

TICK = 0.01
"""Seconds between looks at neighbours and contributions on their way."""
NOTED = 16 * 1024
"""Bytes of a message whose arrival is reported at once."""
LARGE, SOON = 64 * 1024, 0.2
"""Bytes that a contribution has at least to measure a way; seconds that it may take by what was known of it."""
SAME = 0.8
"""Cost of a party that was used before, in proportion: to change costs a round."""
TRY = 2.0
"""Seconds until a way that was tried, and not measured thereby, is tried again."""


def refuses(spec: "Spec") -> str | None:
    """Needs local servers, and sums that can be added to others on their way."""
    if not spec.options["tsengine"]:
        return "write --tsengine inter, which says where"
    if spec.options["topology"] == "flat":
        return "a flat cluster has no local servers, which relay for each other"
    if spec.options["compress"] not in ("", "none"):
        what = f"sums encoded by --compress {spec.options['compress']} cannot be added to others on their way"
        return f"{what}: encoding the sum again would lose more, and the residual of that would belong to no party"
    algorithm = plugins.algorithms().get(str(spec.options["algo"]))
    if algorithm is not None and algorithm.asynchronous:
        return f"parties go through rounds by themselves with --algo {algorithm.name}, so their sums cannot be added"
    return None


def party_peers(parties: int) -> "Collection[tuple[int, int]]":
    """Each local server dials those of the parties before its own."""
    return [(dialler, listener) for dialler in range(parties) for listener in range(dialler)]


class TsServer(Direct):
    """The delivery of a server: local servers choose a way for each contribution and relay; a root only measures."""

    def begin(self, node: "Node", upstream: "UpstreamClient | None", inbox: "ContributionInbox", /) -> None:
        """See ServerDelivery.begin."""
        # Imported late: every command scans the deliveries.
        from geomx_cli.ps.delivery._tsengine_neighbours import Neighbours
        from geomx_cli.ps.delivery._tsengine_relay import Relay

        super().begin(node, upstream, inbox)
        self._node = node
        self._neighbours = Neighbours(upstream)
        self._draw = random.Random(node.process)
        self._max_greed = node.settings.number("ts_greed")
        self._round = 0
        self._sums = False  # whether a result has said that parties complete rounds together
        self._via: dict[int, tuple[int, Header]] = {}  # contributions on their way through a party, by request
        self._expecting: dict[tuple[int, int], dict[int, int]] = {}  # see Relay: by the party that expects the slice
        self._relay: Relay | None = None if upstream is None else Relay(upstream, self._comes_through)
        node.loop.every(TICK, self._tick)

    def peers(self, workers: int) -> "Collection[tuple[int, int]]":
        """See ServerDelivery.peers."""
        return party_peers(workers)

    def brings(self, plane: str, rank: int) -> "Collection[int]":
        """A party may bring the contributions of any other."""
        upper = self._node.settings.upper
        return range(upper.workers) if plane == "global" and upper is not None else (rank,)

    def leave(self) -> None:
        """See ServerDelivery.leave."""
        self._neighbours.leave()

    def up(self, server: int, header: "Header", payload: memoryview | None, on_result: "OnResult") -> None:
        """Send a contribution to the root, with those of others, or through another party."""
        from geomx_cli.ps.delivery._tsengine_relay import can_be_added

        assert self.upstream is not None and self._relay is not None
        self._round = max(self._round, header.round)
        then = partial(self._on_result, on_result)
        if payload is None or not can_be_added(header, payload):
            self._relay.passed(header)
            self._skip(header)
            self.upstream.send(self.upstream.links[server], header, payload, then)
            return
        before = self._expecting.get((header.key, header.slice), {})
        way = self._choose(server, len(payload), before) if self._sums and not self._relay.serves(header) else -1
        if way >= 0 and not self._is_expected(header, way):
            way = -1
        if way < 0:
            self._skip(header)
            self._relay.take_own(header, payload, then)
            return
        self._relay.passed(header)
        self._skip(header, way)
        self._expecting.setdefault((header.key, header.slice), {})[way] = 0
        self._neighbours.delegated[server] = time.monotonic()
        self.upstream.send(self.upstream.peers[way], header, payload, then)
        self._via[header.request] = way, header
        self._count("sent", len(payload))

    def receive(self, link: "Link", header: "Header", payload: memoryview | None) -> bool:
        """Take contributions of other parties, and pass results on."""
        from geomx_cli.ps.net.wire import Kind

        if payload is not None and len(payload) >= NOTED:
            self._neighbours.note(link)
        if self._relay is None or self.upstream is None:
            return False
        if header.kind == Kind.EXCHANGE:
            rank = next((rank for rank, peer in self.upstream.peers.items() if peer is link), None)
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

    def on_request(self, request: "Request") -> bool:
        """Take a neighbour's report, and what it says about contributions."""
        from geomx_cli.ps.delivery._tsengine_neighbours import TOPIC

        if request.topic == "split" and self._relay is not None:
            self._relay.split(int(request.body["request"]))
            return True
        if request.topic != TOPIC:
            return False
        self._neighbours.of(request.link).update(request.body, self._round)
        if self._relay is not None and self.upstream is not None:
            for number in request.body.get("refused", ()):
                if number in self._via and self.upstream.peers[self._via[number][0]] is request.link:
                    way, header = self._via[number]
                    self._go_direct(number)
                    self._announce(header, way)
            for rank, link in self.upstream.peers.items():
                if link is request.link:
                    self._relay.expect(rank, request.body.get("expect", ()))
                    self._relay.skip(rank, request.body.get("skip", ()))
        return True

    # Choosing.

    def _is_expected(self, header: "Header", way: int) -> bool:
        """Whether the party waits for this slice before it sends its own. Otherwise it is told to, from the next round
        on; only what measures the link to it is sent there nevertheless.
        """
        assert self.upstream is not None
        if way in self._expecting.get((header.key, header.slice), {}):
            return True
        self._announce(header, way)
        return not self._neighbours.of(self.upstream.peers[way]).meter.rate

    def _announce(self, header: "Header", way: int) -> None:
        """Tell a party to expect this slice."""
        from geomx_cli.ps.delivery._tsengine_neighbours import TOPIC

        assert self.upstream is not None
        self._expecting.setdefault((header.key, header.slice), {})[way] = 0
        self.upstream.peers[way].control(TOPIC, {"expect": [(header.key, header.slice)]})

    def _choose(self, root: int, size: int, before: "Collection[int]" = ()) -> int:
        """The index of the party through which to send to this root, or DIRECT. before: those that expect the slice.
        """
        from geomx_cli.ps.delivery._tsengine_rates import DIRECT, MARGIN, choose

        assert self.upstream is not None
        straight = self._neighbours.of(self.upstream.links[root])
        direct = straight.seconds(size)
        if direct is None:
            return DIRECT
        costs = {DIRECT: self._known(straight, size, direct)}
        for rank, link in self.upstream.peers.items():
            peer = self._neighbours.of(link)
            onward = peer.seconds_to_root(root, size) if peer.relays() else None
            if onward is None or onward * MARGIN > direct:
                continue  # this also keeps two parties from sending through each other
            leg = peer.seconds(size)
            if leg is not None:
                leg = self._known(peer, size, max(leg, onward))
            elif size < LARGE or time.monotonic() - peer.tried < TRY:
                continue
            costs[rank] = leg * SAME if leg is not None and rank in before else leg
        way = choose(costs, self._max_greed, self._draw)
        if costs[way] is None:
            (straight if way == DIRECT else self._neighbours.of(self.upstream.peers[way])).tried = time.monotonic()
        return way

    def _known(self, neighbour: "Neighbour", size: int, seconds: float) -> float | None:
        """The seconds, or None if the rate is old and this contribution is good to measure it again."""
        old = neighbour.meter.is_stale(self._round) and time.monotonic() - neighbour.tried > TRY
        return None if old and size >= LARGE and seconds <= SOON else seconds

    def _comes_through(self, rank: int) -> bool:
        """Whether the contribution of a party that was expected here may still come."""
        assert self.upstream is not None
        neighbour = self._neighbours.of(self.upstream.peers[rank])
        return neighbour.is_alive() and not neighbour.has_left

    # On their way.

    def _on_result(self, on_result: "OnResult", header: "Header", found: "Content") -> None:
        self._sums = not header.asynchronous
        self._via.pop(header.request, None)
        on_result(header, found)

    def _go_direct(self, number: int) -> None:
        """Ask the root for the result of a contribution that was on its way through a party."""
        assert self.upstream is not None
        _, header = self._via.pop(number)
        self._count("rerouted", 1)
        self.upstream.redirect(number, self.upstream.links[header.root])

    def _skip(self, header: "Header", way: int = -1) -> None:
        """Tell the other parties that the slice was sent through of late that it does not come there."""
        from geomx_cli.ps.delivery._tsengine_neighbours import TOPIC
        from geomx_cli.ps.delivery._tsengine_relay import MISSES

        assert self.upstream is not None
        expecting = self._expecting.get((header.key, header.slice), {})
        for rank in [rank for rank in expecting if rank != way]:
            self.upstream.peers[rank].control(TOPIC, {"skip": [(header.key, header.slice, header.round)]})
            expecting[rank] += 1
            if expecting[rank] == MISSES:
                del expecting[rank]

    def _tick(self) -> None:
        self._neighbours.report()
        if self.upstream is None or self._relay is None:
            return
        self._relay.check()
        for number, (rank, header) in list(self._via.items()):
            if not self._neighbours.of(self.upstream.peers[rank]).relays():
                self._go_direct(number)
                self._skip(header)

    def _count(self, what: str, amount: int) -> None:
        """Count what was relayed, for the telemetry."""
        relayed = self._node.telemetry.relayed
        self._node.telemetry.relayed = {**relayed, what: relayed.get(what, 0) + amount}


def worker() -> Direct:
    """The delivery of a worker, whose contributions go to its local server."""
    return Direct()


def server() -> TsServer:
    """The delivery of a server."""
    return TsServer()
