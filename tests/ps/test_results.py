"""Answers to the members of a round: always of their own round, however late they ask, even if they abstain."""

from typing import Any

import numpy as np
import pytest
from bench import SIZE, Bench, KeptLink, gradient
from tree import Tree

from geomx_cli.ps.aggregation.rounds import SERIAL, Accumulator, Contribution
from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.net.wire import BadMessage, Header, Kind, decode_header, encode_header
from geomx_cli.runtime.algorithms.diloco import MeanServer
from geomx_cli.runtime.algorithms.fsa import FsaServer
from geomx_cli.runtime.algorithms.hfa import HfaServer

COMPENSATED = {"learning_rate": 1.0, "lamda": 0.5}
WHO = [(0, 0), (0, 1), (1, 0), (1, 1)]


def full(value: float, dtype: str = "float32", size: int = 8) -> Array:
    return np.full(size, value, dtype)


@pytest.mark.parametrize("optimizer", ["", "sgd", "adam"])
def test_a_repeat_gets_the_result_of_its_own_round(optimizer: str) -> None:
    bench = Bench(optimizer)
    bench.init(np.zeros(SIZE, np.float32))
    for number in range(1, 9):
        for rank in (0, 1):
            bench.push(rank, number, gradient(rank, number))
        wanted = bench.results()[0][2].copy()
        for _ in range(2):
            bench.push(1, number, gradient(1, number))
            ((request, answered, value),) = bench.results()
            assert (request, answered) == (10 * number + 1, number)
            assert value.tobytes() == wanted.tobytes()


def test_a_result_is_kept_until_the_next_round_is_finished() -> None:
    """Who contributes to the next round has it, and that round does not close without any of the members."""
    bench = Bench()
    bench.init(np.zeros(SIZE, np.float32))
    for number in (1, 2):
        for rank in (0, 1):
            bench.push(rank, number, gradient(rank, number))
    bench.push(0, 3, gradient(0, 3))
    bench.results()
    bench.push(1, 2, gradient(1, 2))
    assert [number for _, number, _ in bench.results()] == [2], "rank 1 has lost it"
    bench.push(1, 1, gradient(1, 1))
    assert bench.results() == [], "a late repeat from one that has moved on"
    bench.push(1, 3, gradient(1, 3))
    assert [number for _, number, _ in bench.results()] == [3, 3]


def test_a_server_keeps_one_result() -> None:
    bench = Bench("sgd")
    bench.init(np.zeros(SIZE, np.float32))
    entry = bench.rounds.table.entries[0, 0]
    for number in range(1, 20):
        for rank in (0, 1):
            bench.push(rank, number, gradient(rank, number))
        result = entry.cohort(0).result
        assert result is not None
        (view,) = result.views
        assert view.array is entry.value, "no copy"


@pytest.mark.parametrize("number", [0, 2, 5])
def test_a_round_other_than_the_open_one_is_refused(number: int) -> None:
    bench = Bench()
    bench.init(np.zeros(SIZE, np.float32))
    bench.push(1, 1, gradient(1, 1))
    with pytest.raises(BadMessage, match=f"round {number} while round 1 is open"):
        bench.push(0, number, gradient(0, number))


# Abstaining.


def test_who_abstains_counts_for_nothing_in_a_sum_and_gets_it() -> None:
    job = Tree([2, 2], lambda workers, is_root: FsaServer())
    job.init(full(0))
    for who, value in zip(WHO, (1, None, 2, None), strict=True):
        job.push(who, 1, None if value is None else full(value))
    assert [job.last(who)[0] for who in WHO] == [3] * 4
    for who, value in zip(WHO, (None, None, 5, 6), strict=True):
        job.push(who, 2, None if value is None else full(value))
    assert [job.last(who)[0] for who in WHO] == [11] * 4
    assert {job.got(who)[-1].weight for who in WHO} == {2.0}


@pytest.mark.parametrize("name", ["sgd", "adam", "dcasgd"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_where_all_abstain_the_optimizer_makes_no_update(name: str, asynchronous: bool) -> None:
    job = Tree([1, 1], lambda workers, is_root: FsaServer(asynchronous=asynchronous))
    job.use(name, learning_rate=0.1, **({} if name == "adam" else {"momentum": 0.9}))
    job.init(full(1))
    for number, values in enumerate([(1, 1), (None, None), (None, None)], start=1):
        for party, value in enumerate(values):
            job.push((party, 0), number, None if value is None else full(value))
    first, second, third = job.got((1, 0))
    assert first.value[0] != 1
    assert first.value.tobytes() == second.value.tobytes() == third.value.tobytes()
    assert first.version == second.version == third.version
    assert job.roots[0].rounds.table.updates() == (2 if asynchronous else 1)


def test_without_anybody_a_sum_is_zero() -> None:
    job = Tree([1, 1], lambda workers, is_root: FsaServer())
    for party in (0, 1):
        job.push((party, 0), 1, None)
    assert not job.last((0, 0)).any()


def test_a_mean_is_of_those_who_contribute() -> None:
    job = Tree([2, 1], lambda workers, is_root: MeanServer())
    job.init(full(10))
    for who, value in zip(WHO, (2, None, 4), strict=False):
        job.push(who, 1, None if value is None else full(value))
    assert job.last((0, 1))[0] == 10 - 3
    for who in WHO[:3]:
        job.push(who, 2, None)
    assert job.last((0, 1))[0] == 7


@pytest.mark.parametrize("by_samples", [False, True])
def test_hfa_means_are_of_those_who_contribute(by_samples: bool) -> None:
    """Two parties, K2 = 2. One worker abstains in one round, a party in all: it does not dampen the other."""
    job = Tree([2, 2], lambda workers, is_root: HfaServer(2, workers, by_samples))
    job.init(full(0))
    for number in (1, 2):
        for who, value in zip(WHO, (4, None if number == 2 else 6, None, None), strict=True):
            job.push(who, number, None if value is None else full(value / 2))  # scripts divide by the party's workers
    assert job.got((0, 0))[0].value[0] == 5, "the mean of 4 and 6"
    assert job.got((1, 1))[0].value[0] == 0, "nobody of this party contributes"
    assert [job.last(who)[0] for who in WHO] == [4] * 4, "party A's mean of one is the milestone"
    for number in (3, 4):
        for who in WHO:
            job.push(who, number, None)
    assert [job.last(who)[0] for who in WHO] == [4] * 4, "nobody contributes: the milestone stays"
    for number in (5, 6):
        for who, value in zip(WHO, (None, None, 8, None), strict=True):
            job.push(who, number, None if value is None else full(value / 2))
    assert [job.last(who)[0] for who in WHO] == [8] * 4


def test_a_contribution_of_weight_0_has_no_payload() -> None:
    bench = Bench()
    bench.init(np.zeros(SIZE, np.float32))
    with pytest.raises(BadMessage):
        bench.push(0, 1, gradient(0, 1), weight=0.0)
    with pytest.raises(BadMessage):
        decode_header(encode_header(Header(weight=-1.0)), 0)


# Merged contributions, and the width of sums.


@pytest.mark.parametrize("parties", [[3, 3], [6]])
def test_sums_of_fp16_do_not_overflow_between_the_levels(parties: list[int]) -> None:
    job = Tree(parties, lambda workers, is_root: FsaServer(), dtype="float16")
    job.init(full(0, "float16"))
    ranks = [(party, rank) for party, count in enumerate(parties) for rank in range(count)]
    for index, who in enumerate(ranks):
        job.push(who, 1, full(60_000 if index < 3 else -60_000, "float16"))
    assert all(job.last(who).tobytes() == full(0, "float16").tobytes() for who in ranks)
    for index, who in enumerate(ranks):
        job.push(who, 2, full(2048 if index in (0, 3) else 1, "float16"))
    assert job.last(ranks[0])[0] == np.float16(4100), "as in one sum: 2048 + 1 + 1 is no number of fp16's"


def test_hyper_parameters_of_all_ranks_are_merged_and_conflicts_reported() -> None:
    warnings: list[str] = []
    bench = Bench("sgd")
    bench.rounds._warn = warnings.append
    bench.init(np.zeros(SIZE, np.float32))
    ones = np.ones(SIZE, np.float32)
    bench.push(0, 1, ones, hyper={"wd": 0.5})
    bench.push(1, 1, ones, hyper={"learning_rate": 0.25})
    assert bench.rounds.optimizer is not None
    assert (bench.rounds.optimizer.params["wd"], bench.rounds.optimizer.params["learning_rate"]) == (0.5, 0.25)
    assert not warnings
    for number in (2, 3):
        bench.push(1, number, ones, hyper={"learning_rate": 4.0})
        bench.push(0, number, ones, hyper={"learning_rate": 1.0, "momentum": 0.5})
    assert (bench.rounds.optimizer.params["learning_rate"], bench.rounds.optimizer.params["momentum"]) == (1.0, 0.5)
    assert len(warnings) == 1 and "learning_rate to 1 and to 4" in warnings[0]


@pytest.mark.parametrize(
    ("hyper", "said"),
    [
        ({SERIAL: 7.0, "learning_rate": 0.5}, "asks for optimizer 7, which nobody has set"),
        ({"own": 1.0}, "sets a hyper-parameter: sgd has no hyper-parameter 'own'"),
        ({"momentum": 5.0, "wd": -1.0}, "sets a hyper-parameter: momentum of sgd must be a finite number"),
    ],
    ids=lambda item: "" if isinstance(item, str) else "+".join(item),
)
def test_hyper_parameters_that_the_optimizer_cannot_take_are_ignored_and_named(
    hyper: dict[str, float], said: str
) -> None:
    warnings: list[str] = []
    bench, ones = Bench("sgd", warn=warnings.append), np.ones(SIZE, np.float32)
    bench.init(np.zeros(SIZE, np.float32))
    for number in (1, 2):
        bench.push(0, number, ones, hyper={"learning_rate": 0.25} if number == 2 and SERIAL not in hyper else {})
        bench.push(1, number, ones, hyper=hyper)
    rate = 0.1 if SERIAL in hyper else 0.25
    assert bench.results()[-1][2][0] == pytest.approx(-2 * (0.1 + rate))
    assert warnings[0].startswith(f"a contribution of the member {said}")
    assert len(warnings) == len(hyper.keys() - {"learning_rate"}), "once of each"


# Asynchronous jobs.


def test_dcasgd_compensates_from_what_the_party_has_pulled() -> None:
    """Party 1 pulls for the first time after two updates of party 0."""
    for pulls, drift in ((True, 0), (False, 2)):
        job = Tree([1, 1], lambda workers, is_root: FsaServer(asynchronous=True))
        job.use("dcasgd", **COMPENSATED)
        job.init(full(0))
        job.pull((0, 0))
        for number in (1, 2):
            job.push((0, 0), number, full(-1))
        if pulls:
            job.pull((1, 0))
            assert job.last((1, 0))[0] == 2
        job.push((1, 0), 1, full(-1))
        assert job.last((1, 0))[0] == 2 + 1 - 0.5 * drift


def test_a_pull_of_one_who_trains_gets_the_newest_value_of_the_global_server() -> None:
    job = Tree([1, 1], lambda workers, is_root: FsaServer(asynchronous=True)).use("dcasgd", **COMPENSATED)
    job.init(full(0))
    job.push((0, 0), 1, full(-1))
    job.push((1, 0), 1, full(-1))
    assert job.last((0, 0))[0] == 1
    job.pull((0, 0), number=1)
    assert (job.last((0, 0))[0], job.got((0, 0))[-1].version) == (1.5, 2)
    job.push((0, 0), 2, full(-1))
    assert job.last((0, 0))[0] == 2.5, "nothing is compensated for: this party has seen it"


# The sending side.


@pytest.mark.parametrize(
    "change", [{"round": 6}, {"slice": 1}, {"key": 1}, {"length": 7}, {"dtype": 1}, {"wide": True}], ids=str
)
def test_a_result_of_another_round_or_slice_is_refused(change: dict[str, Any]) -> None:
    link, taken, upstream = KeptLink(), [], UpstreamClient()
    asked = Header(kind=Kind.EXCHANGE, key=0, slice=0, length=8, round=5, weight=1.0)
    upstream.send(link, asked, full(1).data.cast("B"), lambda header, array: taken.append(array))  # type: ignore[arg-type]
    right = {"kind": Kind.RESULT, "request": asked.request, "key": 0, "slice": 0, "length": 8, "round": 5}
    fields = {**right, **change}
    size = fields["length"] * (8 if fields.get("dtype") else 4)
    with pytest.raises(BadMessage):
        upstream.on_result(link, Header(**fields), memoryview(bytes(size)))  # type: ignore[arg-type]
    assert not taken and upstream.waiting == 1
    upstream.on_result(link, Header(**right), full(3).data.cast("B"))  # type: ignore[arg-type]
    assert taken[0][0] == 3 and not upstream.waiting


def test_hyper_parameters_of_rounds_that_stay_in_the_party_go_up_with_the_next() -> None:
    """HFA with K2 = 2 and an optimizer on the global server: changes in round 1 take effect from round 2 on."""
    job = Tree([1, 1], lambda workers, is_root: HfaServer(2, workers, False)).use("sgd", learning_rate=1.0)
    job.init(full(0))
    for number in (1, 2):
        for party in (0, 1):
            hyper = {"learning_rate": 0.5} if number == 1 else {}
            job.push((party, 0), number, full(4), hyper=hyper)
    assert job.last((0, 0))[0] == 2, "half of the mean difference of 4"


def test_what_is_meant_for_an_older_optimizer_does_not_change_a_newer_one() -> None:
    accumulator, ones = Accumulator(), np.ones(1, np.float32)
    for rank, hyper in enumerate(({"learning_rate": 0.1, "wd": 0.5}, {SERIAL: 1.0, "learning_rate": 0.5}, {"wd": 0.7})):
        accumulator.park(Contribution((rank,), ones, 1.0, hyper, lambda: None))
    accumulator.merge([0, 1, 2])
    assert accumulator.hyper == {SERIAL: 1.0, "learning_rate": 0.5}
    assert not accumulator.conflicts


def test_a_party_that_abstains_is_given_what_it_gets() -> None:
    """Party 0 abstains and receives the weights updated by party 1: its next gradient is computed there."""
    job = Tree([1, 1], lambda workers, is_root: FsaServer(asynchronous=True)).use("dcasgd", **COMPENSATED)
    job.init(full(0))
    job.push((0, 0), 1, full(-1))
    for number in (1, 2):
        job.push((1, 0), number, full(-1))
    before = job.last((1, 0))[0]
    job.push((0, 0), 2, None)
    assert job.last((0, 0))[0] == before
    job.push((0, 0), 3, full(-1))
    assert job.last((0, 0))[0] == before + 1, "nothing to compensate for"
