"""Rows of a slice, from a worker to the roots and back: sums, checks, storage, and traffic between parties."""

from typing import Any

import numpy as np
import pytest
from tree import Tree

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.aggregation.rounds import Accumulator, Contribution
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.cluster.partition import Partition, Tensor
from geomx_cli.ps.net.payload import Rows, as_payload, content, row_numbers, sum_payload
from geomx_cli.ps.net.wire import BadMessage, Form, Header, Kind, Reply, decode_header, encode_header
from geomx_cli.runtime.algorithms.diloco import MeanServer
from geomx_cli.runtime.algorithms.fsa import FsaServer
from geomx_cli.runtime.algorithms.hfa import HfaServer

ROW, COUNT = 3, 10
SIZE = ROW * COUNT
WHO = [(0, 0), (0, 1), (1, 0), (1, 1)]
SGD = {"learning_rate": 0.5, "momentum": 0.5, "wd": 0.25}


def some(seed: Any, dtype: str = "float32", most: int = 5) -> Rows:
    """Up to `most` rows of small integers, whose sums are exact."""
    source = np.random.default_rng(seed)
    numbers = np.sort(source.choice(COUNT, source.integers(0, most), replace=False))
    return Rows(numbers, source.integers(-8, 9, (len(numbers), ROW)).astype(dtype))


def dense(seed: Any) -> Array:
    return np.random.default_rng(seed).integers(-8, 9, SIZE).astype(np.float32)


def tree(parties: tuple[int, ...] = (2, 2), *, asynchronous: bool = False, **more: Any) -> Tree:
    return Tree(parties, lambda workers, is_root: FsaServer(asynchronous=asynchronous), size=SIZE, row=ROW, **more)


def value_at(node: Any, where: tuple[int, int] = (0, 0)) -> Array:
    found: Array = node.rounds.table.entries[where].value
    return found


# Arithmetic.


@pytest.mark.parametrize("seed", range(20))
def test_rows_add_up_as_dense_arrays_do(seed: int) -> None:
    one, two = some([seed, 1]), some([seed, 2])
    assert np.array_equal(one.plus(two).dense(SIZE), one.dense(SIZE) + two.dense(SIZE))
    whole = dense(seed)
    assert np.array_equal(Rows.of(whole, ROW, one.numbers).dense(SIZE).reshape(COUNT, ROW)[one.numbers],
                          whole.reshape(COUNT, ROW)[one.numbers])  # fmt: skip
    parts = [one.cut(0, 4), one.cut(4, COUNT)]
    assert np.array_equal(np.concatenate([parts[0].dense(4 * ROW), parts[1].dense(SIZE - 4 * ROW)]), one.dense(SIZE))
    shuffled = np.random.default_rng(seed).permutation(len(one))
    twice = np.concatenate([shuffled, shuffled])
    assert np.array_equal(Rows.ordered(one.numbers[twice], one.values[twice]).dense(SIZE), 2 * one.dense(SIZE))


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("seed", range(10))
def test_a_gathering_adds_rows_and_arrays_in_rank_order(seed: int, dtype: str) -> None:
    source = np.random.default_rng(seed)
    kinds = source.integers(0, 3, 5)
    given: list[Any] = []
    for rank, kind in enumerate(kinds):
        rows = Rows(some([seed, rank]).numbers, source.standard_normal((len(some([seed, rank])), ROW)).astype(dtype))
        given.append((rows, source.standard_normal(SIZE).astype(dtype), None)[kind])
    work = np.float64 if dtype == "float64" else np.float32
    wanted = np.zeros(SIZE, work)
    for item in given:
        if item is not None:
            wanted = wanted + (item.dense(SIZE) if isinstance(item, Rows) else item).astype(work)
    for order in (range(5), (4, 2, 0, 3, 1)):
        accumulator, copies = Accumulator(), [None if item is None else _copy(item) for item in given]
        for rank in order:
            accumulator.park(Contribution((rank,), copies[rank], 1.0, {}, lambda: None))
            accumulator.merge(range(5))
        total = accumulator.total
        assert isinstance(total, Rows) == (1 not in kinds and 0 in kinds)
        found = np.zeros(SIZE, work) if total is None else total.dense(SIZE) if isinstance(total, Rows) else total
        assert found.dtype == work and np.array_equal(found, wanted)
        for before, after in zip(given, copies, strict=True):
            assert before is None or np.array_equal(_flat(before), _flat(after)), "nobody writes to a contribution"


def _copy(item: Any) -> Any:
    return Rows(item.numbers.copy(), item.values.copy()) if isinstance(item, Rows) else item.copy()


def _flat(item: Any) -> Array:
    return item.values if isinstance(item, Rows) else item  # type: ignore[no-any-return]


# Slices.


def test_slices_have_whole_rows_unless_a_row_is_too_long() -> None:
    partition = Partition(100, 2)
    placement = partition.declare(Tensor("w", 7 * 50, "float32", 7))
    assert placement.row == 7 and sum(item.length for item in placement.slices) == 350
    assert all(item.length % 7 == 0 and item.length <= 100 for item in placement.slices)
    long = partition.declare(Tensor("long", 3 * 120, "float32", 120))
    assert long.row == 0 and max(item.length for item in long.slices) <= 100
    with pytest.raises(InvalidSettings, match="in rows of 14 here"):
        partition.declare(Tensor("w", 7 * 50, "float32", 14))
    for row in (0, -1, 3, 700):
        with pytest.raises(InvalidSettings, match="equally long"):
            partition.declare(Tensor(f"r{row}", 350, "float32", row))


# Input from the network.


def test_rows_are_read_as_they_were_written() -> None:
    for dtype, code in (("float32", 0), ("float64", 1), ("float16", 2)):
        rows = some(5, dtype)
        header = Header(kind=Kind.EXCHANGE, length=SIZE, dtype=code, row=ROW, form=Form.ROWS, rows=len(rows))
        found = content(decode_header(encode_header(header), 0), as_payload(rows, code))
        assert isinstance(found, Rows) and found.values.dtype == dtype
        assert np.array_equal(found.dense(SIZE), rows.dense(SIZE))


def test_a_sum_of_fp16_rows_crosses_in_fp32_where_fp16_does_not_hold_it() -> None:
    for value, wide in ((1.5, False), (70000.0, True), (1 + 2**-12, True)):
        payload, is_wide = sum_payload(Rows(np.array([4]), np.full((1, ROW), value, np.float32)), 2)
        assert is_wide == wide
        header = Header(kind=Kind.EXCHANGE, length=SIZE, dtype=2, row=ROW, form=Form.ROWS, rows=1, wide=wide)
        found = content(header, payload)
        assert isinstance(found, Rows) and found.values.tolist() == [[value] * ROW]


@pytest.mark.parametrize(
    "fields",
    [
        {"row": 0}, {"row": 4}, {"rows": 11}, {"rows": 1, "form": Form.FULL}, {"kind": Kind.PUSH},
        {"row": 2**31},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_rows_are_refused_in_the_header(fields: dict[str, Any]) -> None:
    good = {"kind": Kind.EXCHANGE, "length": SIZE, "row": ROW, "form": Form.ROWS, "rows": 2}
    decode_header(encode_header(Header(**good)), 0)
    with pytest.raises(BadMessage):
        decode_header(encode_header(Header(**{**good, **fields})) if fields.get("row") != 2**31 else b"\x99", 0)


@pytest.mark.parametrize("numbers", [[3, 3], [4, 2], [0, 10], [2**32 - 1, 0]], ids=str)
def test_impossible_row_numbers_are_refused(numbers: list[int]) -> None:
    tail = np.array(numbers, np.uint32).tobytes()
    header = Header(kind=Kind.EXCHANGE, length=SIZE, row=ROW, form=Form.ROWS, rows=2)
    with pytest.raises(BadMessage):
        content(header, memoryview(bytes(2 * ROW * 4) + tail))
    with pytest.raises(BadMessage):
        row_numbers(Header(kind=Kind.PULL, length=SIZE, row=ROW, form=Form.ROWS, rows=2), memoryview(tail))


@pytest.mark.parametrize("size", [0, 1, 2 * (ROW * 4 + 4) - 1, 2 * (ROW * 4 + 4) + 1])
def test_a_payload_of_another_size_is_refused(size: int) -> None:
    header = Header(kind=Kind.EXCHANGE, length=SIZE, row=ROW, form=Form.ROWS, rows=2)
    with pytest.raises(BadMessage):
        content(header, memoryview(bytes(size)))


def test_members_that_disagree_about_rows_are_refused() -> None:
    job = tree()
    job.init(dense(0))
    job.pull((0, 0))
    with pytest.raises(BadMessage, match="in rows of"):
        job.servers[0].rounds.values.on_pull(
            job.servers[0].wires[0], Header(kind=Kind.PULL, length=SIZE, row=5), 0,  # type: ignore[arg-type]
        )  # fmt: skip


# Rounds on two levels.


class Reference:
    """The same in one process: sums, or SGD with momentum that changes only the rows of a round without arrays."""

    def __init__(self, value: Array, optimizer: bool, lazy: bool) -> None:
        self.value, self.momentum = value.reshape(COUNT, ROW).copy(), np.zeros((COUNT, ROW), np.float32)
        self._optimizer, self._lazy = optimizer, lazy

    def round(self, given: list[Any]) -> None:
        came = [item for item in given if item is not None]
        total = sum((_dense(item) for item in came), np.zeros((COUNT, ROW), np.float32))
        if not self._optimizer:
            self.value = total
        elif came:
            arrays = any(not isinstance(item, Rows) for item in came)
            rows = sorted({number for item in came if isinstance(item, Rows) for number in item.numbers.tolist()})
            hit = slice(None) if arrays or not self._lazy else rows
            self.momentum[hit] = 0.5 * self.momentum[hit] - 0.5 * (total[hit] + 0.25 * self.value[hit])
            self.value[hit] += self.momentum[hit]


def _dense(item: Any) -> Array:
    return (item.dense(SIZE) if isinstance(item, Rows) else item).reshape(COUNT, ROW)  # type: ignore[no-any-return]


@pytest.mark.parametrize("roots", [1, 2])
@pytest.mark.parametrize("mixed", [False, True], ids=["rows", "mixed"])
@pytest.mark.parametrize("rule", ["sums", "lazy", "standard"])
def test_two_levels_are_as_one_process(rule: str, mixed: bool, roots: int) -> None:
    """Every worker sees the same rows; local servers have the whole value, though only rows are sent between parties.
    """
    job = tree(roots=roots)
    if rule != "sums":
        job.use("sgd", **SGD, lazy_update=rule == "lazy")
    where = (0, roots - 1)
    wanted = Reference(dense(0), rule != "sums", rule == "lazy")
    job.init(dense(0), where)
    kinds = np.random.default_rng(roots)
    for number in range(1, 25):
        given: list[Any] = [some([number, rank]) for rank in range(4)]
        for rank in range(4):
            kind = kinds.integers(0, 8) if mixed else 0
            given[rank] = {6: dense([number, rank]), 7: None}.get(int(kind), given[rank])
        for who, item in zip(WHO, given, strict=True):
            job.push(who, number, item, where)
        wanted.round(given)
        for who, item in zip(WHO, given, strict=True):
            result = job.got(who, where)[-1]
            assert result.round == number
            if isinstance(item, Rows):
                assert isinstance(result.value, Rows) and not len(result.value), "it only knows that the round is over"
            else:
                np.testing.assert_allclose(result.value.reshape(COUNT, ROW), wanted.value, rtol=1e-5, atol=1e-5)
            asked = some([number, who]).numbers
            job.pull(who, where, rows=asked)
            assert np.array_equal(job.last(who, where).numbers, asked)
            np.testing.assert_allclose(job.last(who, where).values, wanted.value[asked], rtol=1e-5, atol=1e-5)
        for server in job.servers:
            assert value_at(server, where).tobytes() == value_at(job.roots[roots - 1], where).tobytes()


@pytest.mark.parametrize("rule", ["sums", "sgd", "adam", "adagrad", "nag"])
def test_between_parties_only_rows_travel(rule: str) -> None:
    job = tree()
    if rule != "sums":
        job.use(rule, learning_rate=0.1)
    job.init(np.zeros(SIZE, np.float32))
    for who in WHO:
        job.pull(who)
    for number in range(1, 6):
        job.crossed.clear()
        for who in WHO:
            job.push(who, number, Rows(np.array([number]), np.ones((1, ROW), np.float32)))
            job.pull(who, rows=np.array([0, number]))
        # Two parties, both directions; without an optimizer the previous row becomes zero again.
        assert len(job.crossed) == 4
        assert max(job.crossed) <= (ROW * 4 + 4) * (2 if rule == "sums" else 1)


def test_a_value_that_was_given_out_never_changes() -> None:
    job = tree((1, 1)).use("sgd", learning_rate=1.0)
    job.init(np.zeros(SIZE, np.float32))
    seen = []
    for number in range(1, 6):
        for party in (0, 1):
            job.push((party, 0), number, Rows(np.array([1]), np.full((1, ROW), -0.5, np.float32)))
        job.pull((0, 0))
        seen.append(job.last((0, 0)))
    assert [array[ROW] for array in seen] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("rule", ["", "sgd"])
def test_a_repeat_gets_what_its_round_has_changed_and_counts_once(rule: str) -> None:
    """Two workers, one of which received no result of its rounds, and a third that wants the whole value."""
    job = Tree([3], lambda workers, is_root: FsaServer(), size=SIZE, row=ROW)
    if rule:
        job.use(rule, learning_rate=1.0)
    job.init(dense(0))
    pushed = {(number, rank): some([number, rank]) for number in range(1, 6) for rank in (0, 1)}
    before = dense(0)
    for number in range(1, 6):
        for rank in (0, 1):
            job.push((0, rank), number, pushed[number, rank], reply=Reply(rank))
            job.push((0, rank), number, pushed[number, rank], reply=Reply(rank))
        job.push((0, 2), number, None)
        whole = job.last((0, 2))
        job.push((0, 0), number, pushed[number, 0], reply=Reply.FULL)
        assert job.last((0, 0)).tobytes() == whole.tobytes()
        job.push((0, 1), number, pushed[number, 1], reply=Reply.CHANGED)
        changed = job.last((0, 1))
        if isinstance(changed, Rows):
            after = before.copy()
            changed.write_to(after)
            changed = after
        assert changed.tobytes() == whole.tobytes()
        before = whole


def test_who_leaves_or_abstains_is_not_waited_for() -> None:
    job = tree().use("sgd", learning_rate=1.0)
    job.init(np.zeros(SIZE, np.float32))
    job.leave((0, 1))
    for who, rows in zip([WHO[0], WHO[2], WHO[3]], [some(1), some(2), None], strict=True):
        job.push(who, 1, rows, reply=Reply.NONE)
    wanted = -(some(1).dense(SIZE) + some(2).dense(SIZE))
    for who in (WHO[0], WHO[2], WHO[3]):
        job.push(who, 2, None, reply=Reply.NONE)
        job.pull(who)
        assert np.array_equal(job.last(who), wanted)
    assert job.roots[0].rounds.table.updates() == 1


@pytest.mark.parametrize("name", ["sgd", "dcasgd"])
def test_parties_that_train_alone_get_the_rows_that_the_root_has_now(name: str) -> None:
    job = tree((1, 1), asynchronous=True).use(name, learning_rate=1.0)
    job.init(np.zeros(SIZE, np.float32))
    for party in (0, 1):
        job.pull((party, 0))
    for number in (1, 2):
        for party in (0, 1):
            job.crossed.clear()
            job.push((party, 0), number, Rows(np.array([party]), np.full((1, ROW), -1.0, np.float32)))
            job.pull((party, 0), number=number, rows=np.array([0, 1, 2]))
            one = ROW * 4 + 4
            assert job.crossed == [one, 0, 3 * 4, 3 * one]
            made = [number, number if party else number - 1, 0]
            assert job.last((party, 0)).values[:, 0].tolist() == made
    job.push((0, 0), 3, np.full(SIZE, -1.0, np.float32))
    # Party 0 pulled row 1 after one update of it by party 1; dcasgd compensates for the other one.
    second = 3.0 if name == "sgd" else np.float32(3 - 0.04)
    assert job.last((0, 0)).reshape(COUNT, ROW)[:, 0].tolist() == [3.0, second] + [1.0] * (COUNT - 2)
    job.pull((1, 0))
    assert job.last((1, 0))[-1] == 1.0, "its local server has no value of its own any more"


@pytest.mark.parametrize("kind", ["mean", "hfa"])
def test_other_algorithms_get_dense_sums(kind: str) -> None:
    def part(workers: int, is_root: bool) -> Any:
        return MeanServer() if kind == "mean" else HfaServer(1, workers, False)

    both = []
    for by_rows in (True, False):
        job = Tree([2, 2], part, size=SIZE, row=ROW)
        job.init(dense(0))
        for number in (1, 2):
            for rank, who in enumerate(WHO):
                rows = some([number, rank])
                job.push(who, number, rows if by_rows else rows.dense(SIZE))
        job.pull((1, 1))
        both.append(job.last((1, 1)))
    assert both[0].any() and both[0].tobytes() == both[1].tobytes()
