"""The rounds of a server and the upstream client below it, with links that only record messages."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench import SIZE, Bench, KeptLink, RecordingTransport
from tree import Tree

from geomx_cli.contract.config import NodeSettings
from geomx_cli.ps.aggregation import value_service
from geomx_cli.ps.aggregation.codec import parse_codec
from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.aggregation.value_service import MAX_PULLS
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.cluster.partition import Placement, Placements, Slice, Tensor
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import view
from geomx_cli.ps.net.wire import BadMessage, DamagedPayload, Form, Header, Kind, decode_header, encode_header
from geomx_cli.ps.server import Server
from geomx_cli.runtime.algorithms.fsa import FsaServer


def test_each_round_of_a_slice_starts_from_the_result_of_the_one_before() -> None:
    bench = Bench("sgd")
    bench.init(np.zeros(SIZE, np.float32))
    ones = np.ones(SIZE, np.float32)
    bench.push(1, 1, ones)
    assert bench.results() == []
    assert (bench.links[0].credit, bench.links[1].credit) == (4 * SIZE, 0), "init's"
    bench.push(0, 1, ones)
    for rank in (0, 1):
        bench.push(rank, 2, ones)
    found = bench.results()
    assert [(request, number) for request, number, _ in found] == [(11, 1), (10, 1), (20, 2), (21, 2)]
    assert found[0][2][0] == np.float32(-0.2)
    assert found[-1][2][0] == pytest.approx(-0.4)


def test_pulls_without_a_value_are_limited_for_each_member() -> None:
    bench = Bench()
    for number in (*range(MAX_PULLS), 0, MAX_PULLS - 1):  # the last two are repeats
        bench.rounds.values.on_pull(bench.links[0], bench.header(Kind.PULL, request=number), 0)
    with pytest.raises(BadMessage, match="more than 4096 pulls"):
        bench.rounds.values.on_pull(bench.links[0], bench.header(Kind.PULL, request=MAX_PULLS), 0)
    bench.rounds.values.on_pull(bench.links[1], bench.header(Kind.PULL, request=5), 1)
    array = np.arange(SIZE, dtype=np.float32)
    bench.rounds.values.on_push(bench.links[0], bench.header(Kind.PUSH), array.data.cast("B"))
    pulled = [(link, header.request) for link, header, payload in bench.delivery.downs if payload is not None]
    assert pulled == [*((bench.links[0], number) for number in range(MAX_PULLS)), (bench.links[1], 5)]


def test_results_of_pulls_are_limited_for_a_member_that_does_not_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its window stays full. The other member gets its own, and this one more once it has read some."""
    monkeypatch.setattr(value_service, "MAX_UNREAD", 10 * 4 * SIZE)
    monkeypatch.setattr(value_service, "MAX_COPIES", 1)
    bench, transport = Bench(), RecordingTransport(4 * SIZE, 4 * SIZE)
    link: Any = Link(transport, "w0", wide_area=False)  # type: ignore[arg-type]
    bench.init(np.zeros(SIZE, np.float32))
    values = bench.rounds.values
    bench.delivery.down = lambda to, header, payload: to.send(header, payload)  # type: ignore[method-assign]
    for number in range(1, 12):  # one is in flight
        values.on_pull(link, bench.header(Kind.PULL, request=number), 0)
    assert transport.sent == [1] and link.unread == 10 * 4 * SIZE
    with pytest.raises(BadMessage, match="a pull beyond 40000 bytes of pulled values that w0 has not read"):
        values.on_pull(link, bench.header(Kind.PULL, request=999), 0)
    values.on_pull(bench.links[1], bench.header(Kind.PULL, request=5), 1)
    assert [header.request for header, _ in bench.links[1].sent] == [5]
    link.credit(4 * SIZE)
    values.on_pull(link, bench.header(Kind.PULL, request=999), 0)
    for read in range(2, 13):
        link.credit(read * 4 * SIZE)
    assert transport.sent == [*range(1, 12), 999] and not link.unread


def test_what_does_not_fit_is_refused() -> None:
    bench = Bench()
    bench.init(np.zeros(SIZE, np.float32))
    with pytest.raises(BadMessage, match="round 66"):
        bench.push(0, 66, np.zeros(SIZE, np.float32))
    with pytest.raises(BadMessage, match="weight 0"):
        bench.push(0, 1, np.zeros(SIZE, np.float32), weight=0.0)
    with pytest.raises(BadMessage, match="for a slice of 1000"):
        bench.push(0, 1, np.zeros(SIZE - 1, np.float32), length=SIZE - 1)
    with pytest.raises(BadMessage, match="bytes of payload"):
        bench.push(0, 1, np.zeros(SIZE - 1, np.float32))


def test_only_the_first_initial_value_counts_and_pulls_wait_for_it() -> None:
    bench = Bench()
    for link in bench.links:
        bench.rounds.values.on_pull(link, bench.header(Kind.PULL, request=5), 0)
    assert bench.results() == []
    ones = np.ones(SIZE, np.float32).data.cast("B")
    bench.rounds.values.on_push(bench.links[0], bench.header(Kind.PUSH, request=1), ones)
    assert [request for request, *_ in _with_values(bench)] == [5, 5]
    bench.init(np.zeros(SIZE, np.float32))
    bench.rounds.values.on_pull(bench.links[1], bench.header(Kind.PULL, request=6), 0)
    assert bench.results()[0][2][0] == 1


def _with_values(bench: Bench) -> list[tuple[int, int, Array]]:
    bench.delivery.downs = [item for item in bench.delivery.downs if item[2] is not None]
    return bench.results()


def test_a_round_goes_on_without_who_has_left() -> None:
    owing = [0, 1]
    bench = Bench(required_contributors=lambda: owing)
    bench.init(np.zeros(SIZE, np.float32))
    bench.push(1, 1, np.ones(SIZE, np.float32))
    owing.remove(0)
    bench.rounds.members_changed()
    assert bench.results()[0][2][0] == 1


def test_a_member_whose_window_is_filled_by_what_waits_is_asked_for_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("geomx_cli.ps.aggregation.straggler_monitor.STALLED_AFTER", 0.0)
    bench, ones = Bench(), np.ones(SIZE, np.float32)
    bench.push(0, 1, ones, key=1)
    bench.deadlocks.check()
    assert bench.links[1].asked == [], "it is late, and nothing of it is held up here"
    bench.push(1, 1, ones, key=2)
    bench.deadlocks.check()
    bench.deadlocks.check()
    assert bench.links[1].asked == [(1, 0, 1)], "once"
    assert bench.links[0].asked == [(2, 0, 1)], "each has something that waits for the other"
    bench.deadlocks.on_reconnect(1)
    bench.deadlocks.check()
    bench.deadlocks.check()
    assert bench.links[1].asked == 2 * [(1, 0, 1)], "its connection was cut, and the question with it"
    assert bench.links[0].asked == [(2, 0, 1)]


def test_a_server_does_not_look_for_what_is_stuck_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, ones, looks = Bench(), np.ones(SIZE, np.float32), []
    ask = bench.deadlocks._ask
    monkeypatch.setattr("geomx_cli.ps.aggregation.straggler_monitor.STALLED_AFTER", 0.0)
    monkeypatch.setattr(bench.deadlocks, "_ask", lambda now: looks.append(now) or ask(now))
    for key in range(4000):
        bench.push(0, 1, ones, key=key)
    for _ in range(50):
        bench.deadlocks.check()
    assert len(looks) <= 2, "one late worker, 4000 slices: nobody to ask"
    bench.push(1, 1, ones, key=4001)
    for _ in range(3):
        bench.deadlocks.check()
    assert len(bench.links[1].asked) >= 8, "now each holds up the other"


# The upstream client.


def test_a_repeat_is_answered_from_the_last_result_and_counts_once() -> None:
    """A worker's upstream client and a root: lost contributions or results are retransmitted, and nothing else."""
    bench, server, upstream = Bench("sgd"), KeptLink(), UpstreamClient()
    bench.init(np.zeros(SIZE, np.float32))
    seen: list[float] = []

    def carry_up() -> list[bool]:
        """Deliver the messages to the root; returns whether each had a payload."""
        carried, server.sent = server.sent, []
        for header, payload in carried:
            bench.rounds.on_exchange(bench.links[0], header, payload, 0)
        return [payload is not None for _, payload in carried]

    header = bench.header(Kind.EXCHANGE, round=1, contributors=(0,), weight=1.0)
    payload = np.ones(SIZE, np.float32).data.cast("B")
    upstream.send(server, header, payload, lambda _, array: seen.append(float(array[0])))
    upstream.repeat(server, "control")
    assert len(server.sent) == 1, "contributions and results are on the other lane"
    server.sent.clear()
    upstream.repeat(server, "tensors")
    upstream.repeat(server, "control")
    assert carry_up() == [False, False], "a question, which may be lost itself"
    assert bench.links[0].again == [header.request, header.request], "the contribution was lost"
    for request in bench.links[0].again:
        upstream.again(server, request)
    assert carry_up() == [True]
    upstream.repeat(server, "tensors")
    assert carry_up() == [False]
    bench.push(1, 1, np.ones(SIZE, np.float32))
    own = [item for item in bench.delivery.downs if item[0] is bench.links[0]]
    assert len(own) == 1 and len(bench.links[0].again) == 2, "it is here"
    bench.delivery.downs.clear()
    upstream.repeat(server, "tensors")
    upstream.repeat(server, "tensors")
    assert carry_up() == [False, False]
    answers = list(bench.delivery.downs)
    assert len(answers) == 2
    for _, answer, value in answers:
        upstream.on_result(server, answer, value)
    assert seen == [float(np.float32(-0.2))], "two contributions, one update, one result"
    assert upstream.waiting == 0
    upstream.repeat(server, "tensors")
    assert server.sent == []
    assert bench.links[0].credit == (1 + 1) * 4 * SIZE, "all that came is credited: init, the exchange"
    assert server.credit == 2 * 4 * SIZE


def test_who_asks_for_a_contribution_that_another_brings_gets_the_result() -> None:
    """Its own would have to wait for credit, which may depend on this result."""
    bench = Bench()
    bench.init(np.zeros(SIZE, np.float32))
    asks = bench.header(Kind.EXCHANGE, round=1, contributors=(0,), weight=1.0, request=7)
    bench.rounds.on_exchange(bench.links[0], asks, None, 0)
    assert bench.links[0].again == [7] and bench.results() == []
    bench.push(1, 1, np.full(SIZE, 3, np.float32), contributors=(0, 1), weight=2.0, request=9)
    found = [(link, header.request, float(view(header, payload)[0])) for link, header, payload in bench.delivery.downs]
    assert sorted(found, key=lambda item: item[1]) == [(bench.links[0], 7, 3.0), (bench.links[1], 9, 3.0)]


def test_who_asks_for_others_does_not_say_that_they_have_their_results() -> None:
    """A member may bring the contributions of others (--tsengine), but not say what they have received."""
    bench, ones = Bench(), np.ones(SIZE, np.float32)
    bench.init(np.zeros(SIZE, np.float32))
    for rank in (0, 1):
        bench.push(rank, 1, ones)
    bench.results()
    asks = bench.header(Kind.EXCHANGE, round=2, contributors=(0, 1), weight=2.0, request=99)
    bench.rounds.on_exchange(bench.links[1], asks, None, 1)
    bench.push(0, 1, ones)
    assert [request for request, _, _ in bench.results()] == [10], "a repeat, of which the answer was lost"


def test_who_waits_in_a_round_is_not_blamed_for_a_barrier() -> None:
    """Rank 0 went to the barrier before it contributed to the round in which rank 1 waits for it."""
    bench = Bench()
    bench.init(np.zeros(SIZE, np.float32))
    bench.push(1, 1, np.ones(SIZE, np.float32))
    members = SimpleNamespace(initializing=lambda: [], complete=True)
    control = SimpleNamespace(at_barriers=lambda: [(1.0, frozenset([1])), (2.0, frozenset([1, 2]))])
    server: Any = SimpleNamespace(_table=bench.rounds.table, _members=members, _services=control)
    waits = [(wait.what, wait.ranks) for wait in Server._waits(server)]
    assert waits == [("contributed to round 1", {0}), ("reached a barrier", {2})]


def test_who_has_not_contributed_to_the_open_round_is_waited_for() -> None:
    bench = Bench()
    bench.init(np.zeros(SIZE, np.float32))
    ones, oldest = np.ones(SIZE, np.float32), bench.rounds.table.oldest
    assert oldest() is None
    bench.push(0, 1, ones)
    waits = oldest()
    assert waits is not None and (waits[0], waits[2]) == (1, {1})
    bench.push(1, 1, ones)
    assert oldest() is None


@pytest.mark.parametrize(("rank", "root"), [(0, 1), (1, 0), (2, 1)])
def test_the_first_message_of_a_slice_does_not_choose_its_root(rank: int, root: int) -> None:
    """The first root knows where the slice was placed, any other one that it is not its own."""
    placements = Placements(NodeSettings(), None, is_root=True, ratio=lambda: 1.0, rank=lambda: rank)  # type: ignore[arg-type]
    placements._keep([Placement(0, Tensor("w", SIZE, "float32"), (Slice(0, SIZE, 0, 0),))])
    header = Header(kind=Kind.EXCHANGE, length=SIZE, size=SIZE, root=rank)
    assert placements.has_declared(header)
    header.root = root
    assert not placements.has_declared(header)
    header.root, header.offset = rank, 8
    assert placements.has_declared(header) == (rank > 0)


def test_a_workers_weight_is_bounded_so_that_a_partys_is_too() -> None:
    tree = Tree([2], lambda _, __: FsaServer())
    tree.init(np.zeros(8, np.float32))
    with pytest.raises(BadMessage, match=r"weight 2.6\d*e\+154, of a worker at most"):
        tree.push((0, 0), 1, np.ones(8, np.float32), weight=2.0**513)
    tree.push((0, 0), 1, np.ones(8, np.float32), weight=2.0**480)  # as in an election
    tree.push((0, 1), 1, np.ones(8, np.float32), weight=1.0)
    assert tree.last((0, 0)).tobytes() == np.full(8, 2, np.float32).tobytes()
    header = Header(kind=Kind.EXCHANGE, weight=1e300)
    with pytest.raises(BadMessage, match=r"weight 1e\+300, of at most"):
        decode_header(encode_header(header), header.job)


def test_requests_for_one_result_are_limited_for_each_member() -> None:
    """Also of one that only asks, with ever new numbers. Repeats do not count, and others are answered."""
    bench, ones = Bench(), np.ones(SIZE, np.float32)
    bench.init(np.zeros(SIZE, np.float32))

    def ask(rank: int, request: int) -> None:
        header = bench.header(Kind.EXCHANGE, round=1, contributors=(rank,), weight=1.0, request=request)
        bench.rounds.on_exchange(bench.links[rank], header, None, rank)

    for request in (1, 2, 3, 4, 4, 1):
        ask(0, request)
    with pytest.raises(BadMessage, match="more than 4 requests of one member"):
        ask(0, 5)
    with pytest.raises(BadMessage, match="more than 4 requests of one member"):
        bench.push(0, 1, ones, request=6)
    bench.push(0, 1, ones, request=4)
    bench.push(1, 1, ones, request=9)
    assert [(request, array[0]) for request, _, array in bench.results()] == [(1, 2), (2, 2), (3, 2), (4, 2), (9, 2)]


def test_a_sum_that_is_asked_about_is_not_split() -> None:
    """Its ranks have not come by another way, so it may still come whole."""
    bench = Bench()
    bench.init(np.zeros(SIZE, np.float32))
    asks = bench.header(Kind.EXCHANGE, round=1, contributors=(0, 1), weight=2.0, request=7)
    bench.rounds.on_exchange(bench.links[1], asks, None, 1)
    bench.rounds.on_reconnect(bench.links[1])
    assert bench.links[1].again == [7] and not bench.links[1].split


def test_who_sent_for_others_is_told_until_its_own_contribution_has_come() -> None:
    """What it is told may be lost with the control lane."""
    bench, ones = Bench(members=3, required_contributors=lambda: [0, 1, 2]), np.ones(SIZE, np.float32)
    bench.init(np.zeros(SIZE, np.float32))
    bench.push(0, 1, ones)
    bench.push(1, 1, 2 * ones, contributors=(0, 1), weight=2.0, request=9)
    bench.rounds.on_reconnect(bench.links[0])
    bench.rounds.on_reconnect(bench.links[1])
    assert bench.links[1].split == [9, 9] and not bench.links[0].split
    bench.push(1, 1, ones, request=9)
    bench.rounds.on_reconnect(bench.links[1])
    assert bench.links[1].split == [9, 9]
    bench.push(2, 1, ones)
    assert [(request, array[0]) for request, _, array in bench.results()] == [(10, 3.0), (9, 3.0), (12, 3.0)]


def test_a_result_of_an_unknown_peer_is_refused() -> None:
    upstream, server, other, dialler = UpstreamClient(), KeptLink(), KeptLink(), KeptLink()
    dialler.dialled = False
    asked = Header(kind=Kind.PULL, length=SIZE)
    upstream.send(server, asked, None, lambda _, array: None)
    for link in (other, dialler):
        with pytest.raises(BadMessage, match="not asked for it"):
            upstream.on_result(link, Header(kind=Kind.RESULT, request=asked.request), None)


def test_a_damaged_contribution_is_requested_until_it_has_come() -> None:
    """Also if the request was lost with the control lane. One in a codec that is not in use is refused for good."""
    bench = Bench("sgd", compress="fp16")
    bench.init(np.zeros(SIZE, np.float32))
    codec, link, array = parse_codec("fp16"), bench.links[0], np.ones(SIZE, np.float32)
    assert codec is not None
    payload, plain = codec.encode(array), memoryview(array).cast("B")
    about = {"round": 1, "contributors": (0,), "weight": 1.0}
    header = bench.header(Kind.EXCHANGE, request=7, **about)
    with pytest.raises(DamagedPayload):
        bench.rounds.on_exchange(link, header, plain[:-4], 0)
    assert link.damaged == [7]
    bench.rounds.on_reconnect(bench.links[1])
    bench.rounds.on_reconnect(link)
    assert link.damaged == [7, 7] and not bench.links[1].damaged
    other = bench.header(Kind.EXCHANGE, form=Form.ENCODED, codec="bf16", **about)
    with pytest.raises(BadMessage, match="encoded as 'bf16' where 'fp16' is in use"):
        bench.rounds.on_exchange(link, other, payload, 0)
    bench.rounds.on_exchange(link, header, plain, 0)
    bench.rounds.on_reconnect(link)
    assert link.damaged == [7, 7], "it is here"
