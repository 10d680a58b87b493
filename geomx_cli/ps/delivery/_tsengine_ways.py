"""The choice of a way for each contribution: directly, or through a peer."""

import random
import time
from collections.abc import Collection

from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.delivery._tsengine_neighbours import Neighbour, Neighbours
from geomx_cli.ps.delivery._tsengine_rates import DIRECT, MARGIN, SPAN, choose

__all__ = ["Ways"]

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
