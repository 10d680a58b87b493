"""ESync's state server: the reference's own answers, an independent version of its rule, and a simulated clock."""

import heapq
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
from cluster import ROOT, Cluster
from hypothesis import given, settings
from hypothesis import strategies as st

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.algorithms._esync_client import MAX_COUNT, MAX_SECONDS, MAX_WORKERS, Decision, StateServer
from geomx_cli.runtime.algorithms.esync import EsyncServer

# The answers of the reference's state server, in the order of the calls.
THREE_WORKERS: list[tuple[str, tuple[float, ...], Any]] = [
    ("init", (3, 0.5), None),
    ("apply", (0.0, 0, 0, 0.1, 0.0), False),
    ("apply", (0.0, 1, 0, 0.2, 0.0), False),
    ("apply", (0.0, 2, 0, 3.5, 0.0), False),
    ("apply", (0.1, 0, 1, 0.1, 0.1), False),
    ("apply", (2.85, 0, 20, 0.1, 2.85), False),
    ("apply", (2.9, 0, 21, 0.1, 2.9), False),
    ("apply", (2.95, 0, 22, 0.1, 2.95), True),
    ("apply", (2.8, 1, 10, 0.2, 2.8), False),
    ("apply", (3.5, 2, 1, 3.5, 3.5), True),
    ("apply", (3.55, 1, 11, 0.2, 3.55), True),
    ("home", (), [[0, 22, 0.1, 2.95, True, 1], [1, 11, 0.2, 3.55, True, 1], [2, 1, 3.5, 3.5, True, 1]]),
    ("reset", (0, 2, 4.0), None),
    ("home", (), [[0, 0, 0.1, 4.0, False, 2], [1, 0, 0.2, 3.55, False, 1], [2, 0, 3.5, 3.5, False, 1]]),
    ("apply", (4.01, 0, 0, 0.1, 4.0), False),
    ("apply", (4.11, 0, 1, 0.1, 4.11), False),
    ("reset", (2, 2, 4.2), None),
    ("apply", (4.21, 0, 2, 0.1, 4.21), False),
    ("reset", (1, 2, 4.3), None),
    ("home", (), [[0, 2, 0.1, 4.21, False, 2], [1, 0, 0.2, 4.3, False, 2], [2, 0, 3.5, 4.2, False, 2]]),
]
TWO_STRAGGLERS: list[tuple[str, tuple[float, ...], Any]] = [
    ("init", (3, 0.5), None),
    ("apply", (0.0, 0, 0, 0.1, 0.0), False),
    ("apply", (0.0, 1, 0, 3.0, 0.0), False),
    ("apply", (0.0, 2, 0, 3.0, 0.0), False),
    ("apply", (3.0, 2, 1, 3.0, 3.0), True),
    ("apply", (3.0, 1, 1, 3.0, 3.0), True),
]


def apply(state: StateServer, now: float, r: int, k: int, c: float, te: float) -> bool:
    """The reference's call: whether r is ready, whose step ended at te by the server's clock."""
    return state.query(now, r, k, c, now - te).ready


def reset(state: StateServer, r: int, t: int, te: float) -> None:
    """The reference's call: r began round t at te."""
    state.entered(te, r, t)


def begun(*capabilities: float, epsilon: float | None = 0.5, min_steps: int = 1) -> StateServer:
    """A state server whose workers began round 1 at 0.0 and have reported their step times."""
    state = StateServer()
    state.init(len(capabilities), epsilon, min_steps)
    for rank, c in enumerate(capabilities):
        assert not apply(state, 0.0, rank, 0, c, 0.0)
    return state


CALLS: dict[str, Callable[..., Any]] = {
    "init": StateServer.init, "apply": apply, "reset": reset, "home": StateServer.home,
}  # fmt: skip


@pytest.mark.parametrize("calls", [THREE_WORKERS, TWO_STRAGGLERS])
def test_answers_as_the_reference_did(calls: list[tuple[str, tuple[float, ...], Any]]) -> None:
    state = StateServer()
    for number, (method, arguments, answer) in enumerate(calls):
        given = CALLS[method](state, *arguments)
        if method == "home":
            assert (given["num_workers"], given["epsilon"]) == (3, 0.5)
            assert given["t"] == max(record[5] for record in answer)
            given = given["records"]
        assert given == answer, (number, method, arguments)


def test_nobody_is_ready_while_no_step_was_measured() -> None:
    state = StateServer()
    state.init(2, 0.5)
    assert not apply(state, 0.0, 0, 1, 0.0, 0.0)
    assert state.query(0.0, 1, 3, 0.0, 0.0) == Decision(ready=False, slowest=False)
    assert state.query(1.0, 1, 4, 0.25, 0.0) == Decision(ready=True, slowest=True)


def test_before_init() -> None:
    for call in (lambda: StateServer().query(0.0, 0, 1, 0.1, 0.0), lambda: StateServer().entered(0.0, 0, 2)):
        with pytest.raises(InvalidSettings, match="does not know how many workers"):
            call()
    assert StateServer().home() == {"num_workers": 0, "t": 1, "epsilon": 0.0, "records": []}


class Rule:
    """The decision as described by ESync's paper and the reference's records, written from that alone."""

    def __init__(self, num_workers: int, epsilon: float) -> None:
        self.epsilon, self.t = epsilon, 1
        self.records = [[r, 0, 0, 0, False, 1] for r in range(num_workers)]

    def apply(self, now: float, r: int, k: int, c: float, te: float) -> bool:
        self.records[r][1:4] = [k, c, te]
        if k == 0:
            return False
        s, most = None, 0.0
        for rank, record in enumerate(self.records):
            if record[2] > most:
                s, most = rank, record[2]
        if s is None or self.records[s][5] != self.t:
            return False
        rest = self.records[s][2] + self.records[s][3] - now
        if r == s or self.records[s][4] or self.records[r][2] + self.epsilon > rest:
            self.records[r][4] = True
            return True
        return False

    def reset(self, r: int, t: int, te: float) -> None:
        if t != self.t:
            self.t = t
            for record in self.records:
                record[1], record[4] = 0, False
        self.records[r][5], self.records[r][3] = t, te


quarters = st.integers(0, 24).map(lambda number: number / 4)  # exact, so that boundaries are hit
steps = st.tuples(st.integers(0, 3), st.integers(0, 3), quarters, quarters, quarters, st.integers(0, 5))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([0.0, 0.25, 0.5]), st.lists(steps, max_size=40))
def test_follows_the_rule_whatever_is_told(
    epsilon: float, told: list[tuple[int, int, float, float, float, int]]
) -> None:
    state, rule = StateServer(), Rule(4, epsilon)
    state.init(4, epsilon)
    for turn, (r, k, c, later, age, kind) in enumerate(told):
        now = turn + later
        if kind:
            assert state.query(now, r, k, c, age).ready == rule.apply(now, r, k, c, now - age)
        else:
            state.entered(now, r, rule.t + k % 2)
            rule.reset(r, rule.t + k % 2, now)
        assert state.home()["records"] == rule.records


def simulate(
    capabilities: list[float], epsilon: float | None, *, rounds: int = 4, min_steps: int = 1, way: float = 0.001
) -> list[int]:
    """Steps of each worker in the last of `rounds` rounds. A query and its answer take `way` seconds each."""
    state = begun(*capabilities, epsilon=epsilon, min_steps=min_steps)
    start, counts = 0.0, [0] * len(capabilities)
    for t in range(1, rounds + 1):
        if t > 1:
            for rank in range(len(capabilities)):
                state.entered(start, rank, t)
        counts, ends = [0] * len(capabilities), {}
        asking = [(start + way, rank) for rank in range(len(capabilities))]
        while asking:
            now, rank = heapq.heappop(asking)
            if state.query(now, rank, counts[rank], capabilities[rank], way).ready:
                ends[rank] = now + way
            else:
                counts[rank] += 1
                heapq.heappush(asking, (now + 2 * way + capabilities[rank], rank))
        start = max(ends.values())
    return counts


@pytest.mark.parametrize(
    ("epsilon", "scale", "fast"),
    [(0.5, 1.0, 93), (0.07, 1.0, 107), (0.03, 1.0, 108), (0.0, 1.0, 109), (0.5, 0.1, 1), (0.05, 0.1, 60)],
)
def test_steps_of_a_heterogeneous_group(epsilon: float, scale: float, fast: int) -> None:
    steps = simulate([0.03 * scale] * 4 + [3.5 * scale] * 2, epsilon)
    assert steps == [pytest.approx(fast, rel=0.05, abs=1)] * 4 + [1, 1]


def test_a_second_step_fits_when_the_slowest_takes_twice_as_long_and_epsilon() -> None:
    for mine, epsilon in [(0.25, 0.5), (1.0, 0.25), (2.0, 0.0), (0.5, 1.0)]:
        for slowest in (2 * mine + epsilon - 0.125, 2 * mine + epsilon, 2 * mine + epsilon + 0.125):
            steps = simulate([mine, slowest], epsilon, way=0.0)
            assert (steps[0] >= 2) == (slowest >= 2 * mine + epsilon), (mine, epsilon, slowest)


def test_automatic_epsilon() -> None:
    for slowest, epsilon in [(0.35, 0.0175), (3.5, 0.175), (30.0, 0.5)]:
        assert begun(0.003, slowest, epsilon=None).home()["epsilon"] == pytest.approx(epsilon)
    assert simulate([0.003] * 4 + [0.35] * 2, None)[0] > 50
    edge = begun(1.0, 10.0, epsilon=None)
    assert not apply(edge, 8.5, 0, 8, 1.0, 8.5)
    assert apply(edge, 8.501, 0, 8, 1.0, 8.5)


def test_least_number_of_steps() -> None:
    assert simulate([1.0, 1.0, 1.0], 0.0, min_steps=5, way=0.0) == [5, 5, 5]
    assert simulate([0.5, 2.0], 0.25, min_steps=3, way=0.0) == [11, 3]
    state = begun(1.0, 2.0, min_steps=3)
    assert state.query(2.0, 1, 1, 2.0, 0.0) == Decision(ready=False, slowest=True)
    assert not state.query(5.9, 0, 2, 1.0, 0.0).ready  # there is no time left, but it owes a step
    assert state.query(5.9, 0, 3, 1.0, 0.0).ready


def test_what_a_decision_tells() -> None:
    state = begun(0.5, 4.0)
    assert state.query(1.0, 0, 2, 0.5, 0.0) == Decision(ready=False, slowest=False)
    assert state.query(4.5, 0, 8, 0.5, 0.0) == Decision(ready=True, slowest=False)
    assert state.query(4.75, 1, 1, 4.0, 0.25) == Decision(ready=True, slowest=True)
    assert state.query(4.75, 0, 8, 0.5, 0.25) == Decision(ready=True, slowest=False)
    state.entered(5.0, 0, 2)
    assert state.query(5.5, 0, 1, 0.5, 0.0) == Decision(ready=False, slowest=False)
    state.entered(6.0, 1, 2)
    assert state.query(6.5, 0, 2, 0.5, 0.0) == Decision(ready=False, slowest=False)


def test_a_worker_that_left_keeps_nobody_waiting() -> None:
    state = begun(0.1, 1.0, 30.0, epsilon=0.25)
    assert not apply(state, 0.9, 0, 8, 0.1, 0.9)
    assert not apply(state, 1.0, 1, 1, 1.0, 1.0)
    state.leave(2)
    state.leave(2)
    assert state.query(1.0, 1, 1, 1.0, 0.0) == Decision(ready=True, slowest=True)
    assert apply(state, 1.0, 0, 9, 0.1, 1.0)
    state.entered(2.0, 0, 2)
    state.leave(1)  # before it has begun the round
    assert state.query(2.1, 0, 1, 0.1, 0.0) == Decision(ready=True, slowest=True)
    with pytest.raises(InvalidSettings, match="worker 1 has left"):
        apply(state, 2.5, 1, 1, 1.0, 2.0)
    state.init(3, 0.25)
    assert not apply(state, 0.0, 2, 0, 30.0, 0.0)


def test_a_worker_that_was_killed_after_it_left_comes_back() -> None:
    """Its next life goes on from before that, so it enters its round again; and leaves again at the end."""
    server = EsyncServer("global", 0.25, 1)

    def ask(do: str, rank: int, **fields: float) -> dict[str, Any] | None:
        return server.on_request("esync", {"do": do, "r": rank, "workers": 2, **fields}, True)

    for rank in range(2):
        ask("query", rank, k=1, c=1.0, age=0.0)
        ask("enter", rank, t=2)
    ask("leave", 1)
    assert ask("enter", 1, t=2) == {}
    assert not ask("query", 0, k=0, c=0.1, age=0.0)["ready"], "worker 1 is waited for"  # type: ignore[index]
    assert ask("query", 1, k=1, c=1.0, age=0.0) == {"ready": True, "slowest": True, "epsilon": 0.25}
    ask("leave", 1)
    with pytest.raises(InvalidSettings, match="round 1"):
        ask("enter", 1, t=1)
    assert server._state._records[1].left


def test_a_worker_that_waits_elsewhere_is_asked_for_when_another_one_ends_its_steps() -> None:
    state = begun(0.5, 2.0)
    assert not state.wait(1.0, 0, alone=True)
    assert not state.wait(3.0, 0, alone=False), "worker 1 may still come to what it waits for"
    assert state.query(3.0, 1, 1, 2.0, 0.0).ready
    assert state.wait(3.0, 0, alone=True)
    state.entered(3.5, 0, 2)
    state.entered(3.5, 1, 2)
    assert not state.wait(6.0, 0, alone=True), "in the next round no one has yet"
    assert not state.wait(6.0, 1, alone=True)
    assert not state.wait(5.0, 1, alone=False), "a step of the slowest takes longer"
    assert state.wait(6.0, 1, alone=False), "all of this group wait, so for another one"
    assert not state.query(6.0, 1, 0, 2.0, 0.0).ready
    assert not state.wait(9.0, 0, alone=False), "worker 1 takes steps again"
    state.leave(1)
    with pytest.raises(InvalidSettings, match="worker 1 has left"):
        state.wait(9.0, 1, alone=True)


def test_a_round_that_is_over_does_not_come_back() -> None:
    state = begun(1.0, 2.0)
    state.entered(3.0, 0, 2)
    state.entered(3.5, 0, 2)  # reported twice
    before = state.home()
    with pytest.raises(InvalidSettings, match="worker 1 begins round 1, but round 2 has begun already"):
        state.entered(4.0, 1, 1)
    assert state.home() == before


@pytest.mark.parametrize(
    ("method", "arguments", "says"),
    [
        ("query", (1.0, 3, 1, 0.5, 0.0), "r, the rank, is 3 .*from 0 to 2"),
        ("query", (1.0, -1, 1, 0.5, 0.0), "rank, is -1"),
        ("query", (1.0, True, 1, 0.5, 0.0), "rank, is True"),
        ("query", (1.0, 0, -1, 0.5, 0.0), "k, the number of steps, is -1"),
        ("query", (1.0, 0, MAX_COUNT + 1, 0.5, 0.0), "number of steps"),
        ("query", (1.0, 0, 1.5, 0.5, 0.0), "number of steps, is 1.5 .*whole"),
        ("query", (1.0, 0, 1, -0.5, 0.0), "time of a step, is -0.5"),
        ("query", (1.0, 0, 1, math.nan, 0.0), "time of a step, is nan"),
        ("query", (1.0, 0, 1, "0.5", 0.0), "time of a step, is '0.5'"),
        ("query", (1.0, 0, 1, 0.5, -0.1), "age .* is -0.1"),
        ("query", (1.0, 0, 1, 2 * MAX_SECONDS, 0.1), "time of a step"),
        ("query", (1.0, 0, 1, 0.5, math.nan), "age .* is nan"),
        ("entered", (1.0, 0, 0), "t, the round, is 0"),
        ("entered", (1.0, 0, MAX_COUNT + 1), "t, the round"),
        ("entered", (1.0, 9, 2), "rank"),
        ("leave", (3,), "rank"),
        ("init", (0, 0.5), "number of workers is 0"),
        ("init", (MAX_WORKERS + 1, 0.5), "number of workers"),
        ("init", (2, -0.5), "epsilon is -0.5"),
        ("init", (2, 0.5, 0), "least number of steps is 0"),
    ],
)
def test_what_is_out_of_range_changes_nothing(method: str, arguments: tuple[Any, ...], says: str) -> None:
    state = begun(0.5, 1.0, 2.0)
    before = state.home()
    with pytest.raises(InvalidSettings, match=says):
        getattr(state, method)(*arguments)
    assert state.home() == before


def test_a_worker_hears_what_was_refused_when_it_next_waits(cluster: Cluster) -> None:
    cluster.environment = {"GEOMX_ALGO": "esync"}
    ranks = {f"w{rank}": {"GEOMX_RANK": str(rank)} for rank in range(2)}
    cluster.launch_flat([sys.executable, str(ROOT / "tests/scripts/refused.py")], workers=2, worker_env=ranks)
    cluster.finish()
    raised, left = cluster.output("w1").splitlines()
    assert raised.startswith("step raised: worker 1 begins round 2, but round 3 has begun already") and left == "left"
