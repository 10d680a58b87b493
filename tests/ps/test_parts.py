"""The parts of the parameter server that need no process: sums, partitions, windows, barriers, timers, link shapes."""

import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from geomx_cli.core.errors import InvalidSettings, PeerLost
from geomx_cli.core.event_log import EventLog
from geomx_cli.ps.aggregation.rounds import Accumulator, Contribution
from geomx_cli.ps.cluster.members import Barrier
from geomx_cli.ps.cluster.partition import Partition, Tensor
from geomx_cli.ps.cluster.rpc import MAX_OPEN, Rpc
from geomx_cli.ps.net import send_queue, shaping
from geomx_cli.ps.net.loop import Loop
from geomx_cli.ps.net.wan_log import WanLog
from geomx_cli.ps.net.wire import BadMessage


def ignore() -> None:
    """Ignored credit callback."""


def given(
    *ranks: int, array: np.ndarray, weight: float = 1.0, done: Callable[[], None] = ignore, **hyper: float
) -> Contribution:
    return Contribution(ranks, array, weight, hyper, done)


# Sums.

# Added in rank order this is 0, since the 1 is lost beside 1e8. In most other orders it is 1 or 2.
AWKWARD = [np.array([value], np.float32) for value in (1, 1e8, 1, -1e8)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_sum_is_made_in_rank_order_whatever_the_arrival(order: Sequence[int]) -> None:
    gathering, credit = Accumulator(), []
    for place, rank in enumerate(order):
        assert gathering.park(given(rank, array=AWKWARD[rank], done=lambda rank=rank: credit.append(rank)))
        assert gathering.merge(range(4)) == (place == 3)
        assert gathering.without_credit() == (set() if place == 3 else set(order[: place + 1]))
        assert not credit or place == 3, "who waits for another has no credit yet"
    assert gathering.total == np.float32(0)
    assert sorted(credit) == [0, 1, 2, 3]
    assert (gathering.ranks, gathering.weight) == ({0, 1, 2, 3}, 4.0)


def test_a_repeat_is_dropped_and_an_overlap_refused() -> None:
    gathering, one = Accumulator(), np.ones(1, np.float32)
    assert gathering.park(given(1, array=one))
    assert not gathering.park(given(1, array=one)), "parked"
    assert gathering.park(given(0, array=one))
    assert gathering.merge([0, 1])
    assert not gathering.park(given(0, array=one)), "added"
    with pytest.raises(BadMessage, match=r"of ranks \(1, 2\), and some of them are here"):
        gathering.park(given(1, 2, array=one))
    assert gathering.total == 2


def test_merged_ranks_count_as_all_of_them() -> None:
    gathering, one = Accumulator(), np.ones(1, np.float32)
    gathering.park(given(1, 3, array=one, weight=2.0))
    gathering.park(given(2, array=one))
    assert gathering.missing(range(4)) == {0}
    assert not gathering.merge(range(4))
    gathering.park(given(0, array=one))
    assert gathering.merge(range(4))
    assert (gathering.total, gathering.weight) == (3, 4.0)


def test_nobody_waits_for_who_has_left_but_what_they_gave_counts() -> None:
    gathering = Accumulator()
    gathering.park(given(0, array=np.full(1, 5, np.float32)))
    gathering.park(given(3, array=np.full(1, 7, np.float32)))
    assert not gathering.merge([1, 3])
    assert gathering.missing([1, 3]) == {1}
    assert gathering.merge([3])
    assert gathering.total == 12
    assert Accumulator().merge([]), "a round that nobody owes anything to"


SUMS_IN = [("float16", np.float32), ("float32", np.float32), ("float64", np.float64)]


@pytest.mark.parametrize(("dtype", "total"), SUMS_IN)
def test_half_precision_is_summed_in_single_and_double_in_double(dtype: str, total: type) -> None:
    gathering = Accumulator()
    parts = [np.random.default_rng(rank).standard_normal(100).astype(dtype) * 2000 for rank in range(3)]
    for rank, part in enumerate(parts):
        gathering.park(given(rank, array=part))
    assert gathering.merge(range(3))
    wanted = parts[0].astype(total) + parts[1].astype(total) + parts[2].astype(total)
    assert gathering.total.dtype == total
    assert gathering.total.tobytes() == wanted.tobytes()


def test_a_single_contribution_is_not_copied_and_none_is_written_to() -> None:
    gathering = Accumulator()
    first, second, third = (np.full(3, rank, np.float32) for rank in (1, 2, 4))
    for array in (first, second, third):
        array.flags.writeable = False
    gathering.park(given(0, array=first))
    gathering.merge([0])
    assert gathering.total is first
    gathering.park(given(1, array=second))
    gathering.park(given(2, array=third))
    gathering.merge([0, 1, 2])
    assert list(gathering.total) == [7, 7, 7]


def test_the_lowest_rank_with_hyper_parameters_is_heard() -> None:
    gathering, one = Accumulator(), np.ones(1, np.float32)
    gathering.park(given(2, array=one, learning_rate=0.2))
    gathering.park(given(1, array=one, learning_rate=0.1))
    gathering.park(given(0, array=one))
    gathering.merge([0, 1, 2])
    assert gathering.hyper == {"learning_rate": 0.1}


# Partitions.


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_a_partition_covers_everything_and_is_balanced(servers: int) -> None:
    partition, load = Partition(1000, servers), [0] * servers
    sizes = [int(size) for size in np.random.default_rng(servers).integers(1, 20_000, 60)] + [1, 999, 1000, 1001]
    for index, size in enumerate(sizes):
        dtype = ("float32", "float16", "float64")[index % 3]
        placement = partition.declare(Tensor(f"t{index}", size, dtype))
        assert placement.key == index
        end = 0
        for piece in placement.slices:
            assert (piece.offset, piece.root) == (end, piece.server)
            assert 0 < piece.length <= 1000
            load[piece.root] += piece.length * np.dtype(dtype).itemsize
            end += piece.length
        assert end == size
    assert max(load) <= 1.02 * sum(load) / servers


@pytest.mark.parametrize("servers", range(1, 17))
def test_by_itself_a_partition_of_a_small_model_is_balanced_too(servers: int) -> None:
    """The bundled network, whose largest tensor has three quarters of its bytes, and ResNet-50's largest."""
    partition, load = Partition(0, servers), [0] * servers
    sizes = [400, 16, 12_800, 32, 131_072, 256, 32_768, 128, 1280, 10]
    for index, size in enumerate(sizes):
        for piece in partition.declare(Tensor(str(index), size, "float32")).slices:
            load[piece.root] += piece.length
            assert piece.length <= 16_384
    assert max(load) <= 1.05 * sum(load) / servers
    rows = partition.declare(Tensor("rows", 80_000, "float32", row=20_000))
    assert rows.row == 20_000, "rows are kept whole, or they could not travel alone"
    slices = partition.declare(Tensor("large", 2_359_296, "float32")).slices
    assert 8 * servers <= len(slices) <= 18 * servers and max(piece.length for piece in slices) <= 262_144
    if servers > 1:
        assert {piece.root for piece in slices[:servers]} == set(range(servers)), "all have work from the start"


@pytest.mark.parametrize(("ratio", "scale"), [(0.5, 1), (1.0, 1), (2.0, 2), (8.0, 4), (29.0, 4), (30.0, 8), (200.0, 8)])
def test_slices_are_longer_where_a_codec_shortens_them(ratio: float, scale: int) -> None:
    slices = Partition(0, 2, ratio).declare(Tensor("large", 4_194_304, "float32")).slices
    assert [piece.length for piece in slices] == [262_144 * scale] * (16 // scale)
    partition, load = Partition(0, 4, ratio), [0] * 4
    for size in (400, 12_800, 131_072, 32_768, 1280):
        slices = partition.declare(Tensor(str(size), size, "float32")).slices
        assert len(slices) == 1 or ratio <= 1 or min(piece.length for piece in slices) >= 4096
        for piece in slices:
            load[piece.root] += piece.length
    assert max(load) <= 1.05 * sum(load) / 4, "a small model's load stays balanced"


def test_slices_are_shorter_where_single_layers_are_waited_for() -> None:
    slices = Partition(0, 2, urgent=True).declare(Tensor("large", 4_194_304, "float32")).slices
    assert [piece.length for piece in slices] == [65_536] * 64
    slices = Partition(0, 2, 4.0, urgent=True).declare(Tensor("large", 4_194_304, "float32")).slices
    assert [piece.length for piece in slices] == [262_144] * 16
    assert Partition(0, 2, urgent=True).declare(Tensor("rows", 4_000_000, "float32", 100_000)).row == 100_000


def test_declaring_again_changes_nothing_and_another_shape_is_refused() -> None:
    partition = Partition(100, 2)
    first = partition.declare(Tensor("w", 250, "float32"))
    partition.declare(Tensor("b", 10, "float32"))
    assert partition.declare(Tensor("w", 250, "float32")) is first
    for other in (Tensor("w", 251, "float32"), Tensor("w", 250, "float64")):
        with pytest.raises(InvalidSettings, match=r"'w' has 25. elements of float"):
            partition.declare(other)
    with pytest.raises(InvalidSettings, match="int32"):
        partition.declare(Tensor("i", 10, "int32"))
    with pytest.raises(InvalidSettings, match="at least one"):
        partition.declare(Tensor("none", 0, "float32"))


# Windows and emulated links.


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`clock.now` is the result of time.monotonic() in send_queue.py and shaping.py."""
    made = SimpleNamespace(now=100.0)
    made.monotonic = lambda: made.now
    for module in (send_queue, shaping):
        monkeypatch.setattr(module, "time", made)
    return made


def test_a_fixed_window_holds_and_credit_is_bounded() -> None:
    fixed = send_queue.Window(1000, 2500)
    fixed.sent(1000)
    fixed.sent(1000)
    assert not fixed.admits(1000)
    assert fixed.admits(500)
    fixed.returned(10**9)
    fixed.arrived(10**9)
    assert (fixed.under_way, fixed.held) == (0, 0)
    fixed.returned(1000)
    fixed.arrived(1000)
    assert (fixed.under_way, fixed.held, fixed.size) == (0, 0, 2500)


def test_one_message_may_always_be_under_way() -> None:
    small = send_queue.Window(1000, 10)
    assert small.admits(5000)
    small.sent(5000)
    assert not small.admits(1)
    small.returned(4999)
    assert not small.admits(10)
    small.returned(1)
    assert small.admits(5000)


def use(
    win: send_queue.Window, clock: SimpleNamespace, rate: float, round_trip: float, seconds: float, size: int = 2**20
) -> int:
    """Send slices over a path of `rate` bytes per second; returns how many bytes it carried."""
    end, free, returns, carried = clock.now + seconds, clock.now, [], 0
    while clock.now < end:
        while win.admits(size):
            win.sent(size)
            free = max(free, clock.now) + size / rate
            returns.append(free + round_trip)
        clock.now = max(clock.now, returns.pop(0))
        win.arrived(size)
        win.returned(size)
        carried += size
    for when in returns:
        clock.now = max(clock.now, when)
        win.arrived(size)
        win.returned(size)
    return carried


def test_on_a_wide_area_link_little_is_under_way_whatever_the_receiver_may_hold(clock: SimpleNamespace) -> None:
    """What waits at the sender can be overtaken, and what the receiver asks for waits for no credit."""
    rate, round_trip, size = 25e6, 0.03, 2**17
    win = send_queue.Window(2**20, wide_area=True)
    use(win, clock, rate, round_trip, 3.0, size)
    path = size + rate * (round_trip + send_queue.LATE)
    sent = 0
    while win.admits(size):
        win.sent(size)
        sent += size
    assert 0.9 * path <= sent <= 1.5 * path + size < 4 * 2**20
    win.arrived(sent)
    while win.admits(size):  # the receiver returns no credit
        win.sent(size)
        win.arrived(size)
        sent += size
    assert sent == win.held == 2 * 2**20 and win.admits(size, asked=True)
    while win.admits(size, asked=True):
        win.sent(size)
    assert win.under_way <= 1.5 * path + size, "nor does it fill the path"
    win.stay_small()
    assert win.admits(size, asked=True), "shared memory has no path"


def test_a_longer_route_is_filled_once_heartbeats_have_measured_it(clock: SimpleNamespace) -> None:
    rate, size = 25e6, 2**17
    win = send_queue.Window(2**20, wide_area=True)
    win.crossed(0.03)
    use(win, clock, rate, 0.03, 3.0, size)
    win.crossed(0.2)
    use(win, clock, rate, 0.2, 5.0, size)
    assert use(win, clock, rate, 0.2, 5.0, size) > 0.9 * 5.0 * rate


def test_a_window_grows_until_it_fills_the_path_and_shrinks_when_the_path_is_short(clock: SimpleNamespace) -> None:
    rate, round_trip = 250e6, 0.1
    win = send_queue.Window(2**20)
    assert win.size < rate * round_trip
    use(win, clock, rate, round_trip, 3.0)
    assert rate * round_trip <= win.size <= 2 * rate * round_trip
    assert use(win, clock, rate, round_trip, 5.0) > 0.9 * 5.0 * rate
    use(win, clock, 10e6, 0.001, 30.0)
    assert win.size == 2 * 2**20
    use(win, clock, 10e9, 0.1, 5.0)
    assert win.size <= send_queue.LARGEST


def test_an_emulated_link_has_a_rate_and_a_delay(clock: SimpleNamespace) -> None:
    shaper = shaping.Shaper("8mbit,30ms")
    assert shaper.leaves(1000, "tensors") == pytest.approx(100.0 + 0.001 + 0.015)
    assert shaper.leaves(2000, "tensors") == pytest.approx(100.0 + 0.003 + 0.015), "one after the other"
    assert shaper.leaves(1000, "control") == pytest.approx(100.0 + 0.001 + 0.015), "control messages overtake tensors"
    clock.now = 200.0
    assert shaper.leaves(1000, "tensors") == pytest.approx(200.0 + 0.001 + 0.015)
    assert shaper.arrives(1000, "tensors") == 200.0, "its own bytes have passed while they came"
    assert shaper.arrives(1000, "tensors") == pytest.approx(200.001)
    assert shaping.Shaper("8mbit", 0.5).leaves(1000, "tensors") == pytest.approx(200.002)
    assert shaping.Shaper("30ms").leaves(10**9, "control") == pytest.approx(200.015)
    links = ("A>B=4mbit,20ms", "C>A=5ms")
    shaper = shaping.Shaper("8mbit,30ms", 0.5, links, "A")
    assert shaper.leaves(1000, "tensors", "B") == pytest.approx(200.004 + 0.020)
    assert shaper.leaves(1000, "tensors", "C") == pytest.approx(200.002 + 0.015), "only the other direction has a link"
    assert [shaper.arrives(1000, "tensors", "C") for _ in range(3)] == [200.0] * 3, "the other end emulates it"
    shaper.arrives(1000, "tensors", "B")
    assert shaper.arrives(1000, "tensors", "B") == pytest.approx(200.002)
    assert shaping.Shaper("", links=links, party="D").leaves(10**9, "tensors", "A") == 200.0
    assert shaping.Shaper("", links=links, party="D"), "so that it shares no memory with those at a link"
    assert not shaping.Shaper("")
    assert shaping.Shaper("1ms")


# Barriers.


def test_a_rank_that_is_early_waits_for_the_next_barrier() -> None:
    barrier = Barrier(lambda: [0, 1])
    for number in (1, 2):
        barrier.reach(0, number)
    assert barrier.met == 0
    barrier.reach(1, 1)
    assert barrier.met == 1 and barrier.missing() == {1}
    barrier.reach(1, 2)
    assert barrier.met == 2 and barrier.missing() == {0, 1}


def test_a_barrier_that_is_reached_again_counts_once() -> None:
    """As by a request that is repeated, or applied again from a log."""
    barrier = Barrier(lambda: [0, 1])
    for rank, number in ((0, 1), (0, 1), (1, 1), (0, 2), (0, 1), (1, 1), (0, 2)):
        barrier.reach(rank, number)
    assert barrier.met == 1 and barrier.missing() == {1}


def test_who_leaves_is_not_waited_for_and_observers_pass_with_the_others() -> None:
    members = [0, 1]
    barrier = Barrier(lambda: members)
    barrier.reach(99, 1)
    barrier.reach(0, 1)
    assert barrier.met == 0
    members.remove(1)
    barrier.update()
    assert barrier.met == 1
    members.clear()
    barrier.reach(0, 2)
    assert barrier.met == 2


def test_an_observer_that_comes_late_does_not_wait_for_the_next_barrier() -> None:
    barrier = Barrier(lambda: [0, 1])
    for rank in (0, 1, 99, 99):
        barrier.reach(rank, 1)
    barrier.reach(99, 2)
    assert barrier.met == 1
    barrier.reach(0, 2)
    assert barrier.met == 1 and barrier.missing() == {1}


# Requests; tests/ps/test_cuts.py has them over connections that are cut.


class Wire:
    """A link that records the messages to be sent."""

    name = "the peer"

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []

    def control(self, topic: str, body: object, request: int, acked: int = 0) -> None:
        self.sent.append((topic, request))


def test_a_repeat_is_not_worked_on_but_answered_as_before() -> None:
    rpc, link = Rpc(Loop(), 1.0), Wire()
    request = rpc.receive(link, 7, 0, "own", {})
    assert request is not None
    assert rpc.receive(link, 7, 0, "own", {}) is None
    assert link.sent == []
    request.answer()
    assert rpc.receive(link, 7, 0, "own", {}) is None
    assert link.sent == [("answer", 7)] * 2
    said = rpc.receive(link, 0, 0, "stuck", {})
    assert said is not None
    said.answer()
    assert link.sent == [("answer", 7)] * 2, "nobody waits for an answer to what was only said"
    assert rpc.receive(Wire(), 7, 0, "own", {}) is not None, "another peer's number"


def test_what_is_not_kept_is_answered_anew() -> None:
    rpc, link = Rpc(Loop(), 1.0), Wire()
    for _ in range(2):
        request = rpc.receive(link, 7, 0, "own", {})
        assert request is not None
        assert rpc.receive(link, 7, 0, "own", {}) is None, "it is being worked on"
        request.answer({"piece": b"x"}, keep=False)
    assert link.sent == [("answer", 7)] * 2


def test_answers_are_kept_until_the_peer_says_that_it_has_them() -> None:
    rpc, link = Rpc(Loop(), 1.0), Wire()
    for number in range(1, 1001):
        request = rpc.receive(link, number, 0, "own", {})
        assert request is not None
        request.answer()
    assert all(rpc.receive(link, number, 0, "own", {}) is None for number in range(1, 1001))
    assert link.sent == [("answer", number) for number in range(1, 1001)] * 2
    assert rpc.receive(link, 1001, 990, "own", {}) is not None
    link.sent.clear()
    assert rpc.receive(link, 5, 4, "own", {}) is None
    assert link.sent == [], "a repeat that comes late is not worked on again"
    assert rpc.receive(link, 991, 990, "own", {}) is None
    assert link.sent == [("answer", 991)]


def test_a_peer_is_remembered_within_bounds() -> None:
    rpc, link = Rpc(Loop(), 1.0), Wire()
    for number in range(1, MAX_OPEN + 1):
        assert rpc.receive(link, number, 0, "own", {}) is not None
    with pytest.raises(BadMessage, match="requests at once"):
        rpc.receive(link, MAX_OPEN + 1, 0, "own", {})
    with pytest.raises(BadMessage):
        rpc.receive(link, MAX_OPEN + 1, MAX_OPEN + 1, "own", {})


def test_only_who_was_asked_answers_and_only_once_counts() -> None:
    rpc, link, other = Rpc(Loop(), 1.0), Wire(), Wire()
    heard: list[object] = []
    rpc.ask(link, "own", {}, heard.append, heard.append)
    with pytest.raises(BadMessage):
        rpc.answered(other, 1, {})
    with pytest.raises(BadMessage):
        rpc.answered(link, 2, {})
    rpc.repeat(other)
    rpc.repeat(link)
    assert (link.sent, other.sent) == ([("own", 1)] * 2, [])
    rpc.answered(link, 1, {"rank": 0})
    rpc.answered(link, 1, {"rank": 0})
    rpc.repeat(link)
    assert heard == [{"rank": 0}]
    assert link.sent == [("own", 1)] * 2


def test_an_answer_without_a_field_names_the_peer_where_the_field_is_read() -> None:
    talk, link, heard = Rpc(Loop(), 1.0), Wire(), []
    talk.ask(link, "own", {}, heard.append, heard.append)
    talk.answered(link, 1, {"rank": 0})
    assert heard[0]["rank"] == 0 and heard[0].get("placements") is None
    with pytest.raises(PeerLost, match="the peer gave a malformed answer to 'own', without 'placements'") as lost:
        heard[0]["placements"]
    assert lost.value.peer == "the peer"


def test_a_request_with_a_wrong_field_is_refused_and_named() -> None:
    rpc, link = Rpc(Loop(), 1.0), Wire()
    wrong = [
        ("optimizer", {"by": "w0", "name": "sgd", "params": 7}, "Expected `object`, got `int` - at `$.params`"),
        ("optimizer", {"by": "w0", "hold": 1}, "Expected `bool`, got `int` - at `$.hold`"),
        ("optimizer", {"by": "w0", "serial": -1}, "Expected `int` >= 0 - at `$.serial`"),
        ("declare", {"tensors": [["x", 1]]}, "Expected `array` of length 5, got 2 - at `$.tensors[0]`"),
        ("state_write", {"by": "w0", "at": 0, "piece": "text"}, "got `str` - at `$.piece`"),
        ("barrier", {"scope": "nowhere"}, "Invalid enum value 'nowhere' - at `$.scope`"),
        ("mode", {}, "Object missing required field `asynchronous`"),
    ]
    for number, (topic, body, said) in enumerate(wrong, start=1):
        with pytest.raises(BadMessage, match=re.escape(said)) as refused:
            rpc.receive(link, number, 0, topic, body)
        assert topic in str(refused.value)
        assert link.sent.pop() == ("answer", number)
    assert rpc.receive(link, 99, 0, "mode", {"asynchronous": True, "more": 1}).body == {"asynchronous": True}  # type: ignore[union-attr]


def test_an_answer_with_a_wrong_field_fails_the_request_and_names_the_peer() -> None:
    rpc, link = Rpc(Loop(), 1.0), Wire()
    given, failed = list[object](), list[PeerLost]()
    wrong = [
        ("declare", {"placements": [[0, [[0, 5, 0]]]]}), ("declare", {}), ("cluster", {"workers": "many"}),
        ("join", {"rank": 0, "scheduler": "s", "members": [7]}), ("state_read", {"piece": 7}),
        ("stragglers", {"processes": 7}),
    ]  # fmt: skip
    for number, (topic, body) in enumerate(wrong, start=1):
        rpc.ask(link, topic, {}, given.append, failed.append)  # type: ignore[arg-type]
        rpc.answered(link, number, body)
        assert f"the peer gave a malformed answer to {topic!r}, " in failed[-1].message
        assert failed[-1].peer == "the peer"
    assert not given and len(failed) == len(wrong)


# The loop.


def test_sent_bytes_are_written_after_bursts_and_not_otherwise(tmp_path: Path) -> None:
    loop, events, counts = Loop(), EventLog(tmp_path / "events.jsonl"), [0]
    log = WanLog(loop, events, lambda: counts[0])

    def burst() -> None:
        for _ in range(1000):
            counts[0] += 10
            log.sent()

    burst()
    loop.call_later(0.2, burst)
    over = []
    loop.call_later(0.4, lambda: over.append(True))
    loop.run(until=lambda: bool(over))
    found = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["wan"] for event in found if event["event"] == "sent"] == [10_000, 20_000]
    loop.close()
    events.close()


def test_timers_come_in_order_and_can_be_taken_back() -> None:
    loop, seen = Loop(), []
    loop.call_later(0.02, lambda: seen.append("b"))
    loop.call_later(0.01, lambda: seen.append("a"))
    loop.call_later(0.015, lambda: seen.append("never")).cancel()
    when = time.monotonic() + 0.03
    for name in "cde":
        loop.call_at(when, lambda name=name: seen.append(name))
    loop.every(0.01, lambda: seen.append("tick"))
    loop.run(until=lambda: seen.count("tick") >= 6)
    assert [name for name in seen if name != "tick"] == list("abcde")
    loop.close()


def test_other_threads_submit_and_nothing_is_lost_at_the_end() -> None:
    loop, seen = Loop(), []
    thread = threading.Thread(target=lambda: [loop.submit(lambda: seen.append(1)) for _ in range(500)])
    thread.start()
    loop.run(until=lambda: len(seen) == 500)
    thread.join()
    loop.submit(lambda: seen.append(2))
    loop.close()
    assert seen[-1] == 2
    loop.submit(lambda: seen.append(3))
    assert seen[-1] == 3
