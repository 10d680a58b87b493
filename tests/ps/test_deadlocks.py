"""Which members are asked for which slices if windows are full of waiting contributions."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench import SIZE, Bench, KeptLink

from geomx_cli.ps.aggregation.aggregator import Aggregator
from geomx_cli.ps.aggregation.slices import SliceTable
from geomx_cli.ps.aggregation.straggler_monitor import SHARE, DeadlockBreaker
from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.delivery.direct import Direct
from geomx_cli.ps.net.wire import Header, Kind
from geomx_cli.runtime.algorithms.fsa import FsaServer

ONES = np.ones(SIZE, np.float32)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open rounds count as stalled immediately."""
    monkeypatch.setattr("geomx_cli.ps.aggregation.straggler_monitor.STALLED_AFTER", 0.0)


def test_who_has_passed_on_the_contributions_of_others_is_asked_for_its_own() -> None:
    """They occupy its window, and wait for it."""
    bench = Bench()
    bench.push(0, 1, ONES, key=1, contributors=(1,))
    bench.deadlocks.check()
    assert [link.asked for link in bench.links] == [[(1, 0, 1)], []]


def test_who_is_stuck_by_what_waits_elsewhere_is_asked_until_it_moves() -> None:
    bench = Bench()
    bench.push(0, 1, ONES, key=1)
    bench.deadlocks.check()
    bench.deadlocks.stuck_elsewhere(1)
    bench.deadlocks.check()
    assert bench.links[1].asked == [(1, 0, 1)]
    bench.push(1, 1, ONES, key=1)
    assert len(bench.results()) == 2
    bench.push(0, 2, ONES, key=1)
    bench.deadlocks.check()
    assert len(bench.links[1].asked) == 1, "it has sent something since"


def test_members_are_asked_while_others_contributions_come_within_a_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [time.monotonic() + 1]

    def monotonic() -> float:
        now[0] += 0.001  # so each check takes a millisecond
        return now[0]

    monkeypatch.setattr("geomx_cli.ps.aggregation.straggler_monitor.time", SimpleNamespace(monotonic=monotonic))
    bench = Bench()
    bench.push(1, 1, ONES, key=9)
    for key in (1, 2):
        bench.push(0, 1, ONES, key=key)
        bench.deadlocks.check()
    assert bench.links[1].asked == [(1, 0, 1)], "not again so soon"
    now[0] += 0.001 / SHARE
    bench.push(0, 1, ONES, key=3)
    bench.deadlocks.check()
    assert bench.links[1].asked == [(1, 0, 1), (2, 0, 1), (3, 0, 1)]


class Party:
    """A local server with two workers, and its roots."""

    def __init__(self) -> None:
        self.links, self.told = [KeptLink(), KeptLink()], 0
        upstream, delivery = UpstreamClient(), Direct()
        upstream.links.append(KeptLink())  # type: ignore[arg-type]
        delivery.begin(None, upstream, None)  # type: ignore[arg-type]
        table = SliceTable(algorithm=FsaServer(), roots=lambda: 1, required_contributors=lambda: [0, 1])
        self.rounds = Aggregator(delivery=delivery, upstream=upstream, own_rank=lambda: 0, table=table)
        self.deadlocks = DeadlockBreaker(table, lambda rank: [self.links[rank]], self._tell)  # type: ignore[list-item]

    def _tell(self) -> None:
        self.told += 1

    def push(self, rank: int, number: int, key: int) -> None:
        link: Any = self.links[rank]
        header = Header(
            kind=Kind.EXCHANGE, key=key, length=SIZE, round=number, weight=1.0, contributors=(rank,),
            request=100 * key + number,
        )  # fmt: skip
        self.rounds.on_exchange(link, header, ONES.data.cast("B"), rank)


def test_a_party_that_waits_for_its_roots_says_so_and_gives_what_one_of_them_wants() -> None:
    party = Party()
    for rank in (0, 1):
        party.push(rank, 1, key=1)  # it is forwarded
        party.push(rank, 1, key=2 + rank)  # they wait for each other
    for _ in range(3):
        party.deadlocks.check()
    assert (party.told, [link.asked for link in party.links]) == (1, [[(3, 0, 1)], [(2, 0, 1)]])
    party.deadlocks.request_slice(7, 0, 1)
    party.deadlocks.check()
    assert [link.asked[1:] for link in party.links] == [[(7, 0, 1)]] * 2, "nobody has sent any of that slice yet"
    party.deadlocks.on_reconnect(0)
    party.deadlocks.check()
    assert [len(link.asked) for link in party.links] == [4, 2], "its connection was cut, and the questions with it"
    for rank in (0, 1):
        party.push(rank, 1, key=7)
    party.deadlocks.check()
    assert [len(link.asked) for link in party.links] == [4, 2]


def test_a_party_whose_worker_is_only_late_tells_and_asks_nothing() -> None:
    party = Party()
    party.push(0, 1, key=1)
    party.deadlocks.request_slice(7, 0, 1)
    for _ in range(3):
        party.deadlocks.check()
    assert [link.asked for link in party.links] == [[], []]
