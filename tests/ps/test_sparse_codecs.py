"""topk, bsc and mpq: the parameters of their specs, in rounds against numpy; changes after sums and rows."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cluster import Cluster
from mxnet_scripts import hooked
from tree import Tree

from geomx_cli.contract.codecs import MAX_CODEC, complete_spec
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.aggregation.codec import codec_at, parse_codec
from geomx_cli.ps.net.payload import Rows
from geomx_cli.ps.net.wire import Reply
from geomx_cli.runtime.algorithms.fsa import FsaServer

Array = np.ndarray
SIZE = 400


def keep(array: Array, ratio: float) -> Array:
    """The elements of largest magnitude, the others 0."""
    chosen = sorted(range(len(array)), key=lambda place: -abs(array[place]))[: math.ceil(len(array) * ratio)]
    found = np.zeros_like(array)
    found[chosen] = array[chosen]
    return found


class Party:
    """A party's error feedback; with momentum correction as bsc's."""

    def __init__(self, momentum: float) -> None:
        self.residual, self.momentum = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
        self._factor = np.float32(momentum)

    def send(self, given: Array, ratio: float) -> Array:
        self.momentum = self.momentum * self._factor + given
        self.residual = self.residual + self.momentum
        sent = keep(self.residual, ratio)
        self.residual = self.residual - sent
        self.momentum = np.where(sent != 0, 0, self.momentum).astype(np.float32)
        return sent


def tree_of(spec: str, parties: int, **more: Any) -> Tree:
    return Tree([1] * parties, lambda _, __: FsaServer(), size=SIZE, compress=spec, **more)


def gradients(rounds: int, parties: int) -> Array:
    return np.random.default_rng(5).standard_normal((rounds, parties, SIZE)).astype(np.float32)


def run(tree: Tree, given: Sequence[Sequence[Array]]) -> list[list[Array]]:
    """Each party's results, by round."""
    for number, round_ in enumerate(given, 1):
        for party, own in enumerate(round_):
            tree.push((party, 0), number, own)
    parties = range(len(given[0]))
    return [[result.value for result in tree.got((party, 0)) if result.round] for party in parties]


@pytest.mark.parametrize(("name", "momentum"), [("topk", 0.0), ("bsc", 0.9), ("mpq", 0.9)])
def test_a_union_of_sums_is_the_whole_sum(name: str, momentum: float) -> None:
    given = gradients(6, 3)
    senders = [Party(momentum) for _ in range(3)]
    wanted = []
    for round_ in given:
        sent = [sender.send(own, 0.05) for sender, own in zip(senders, round_, strict=True)]
        wanted.append(sent[0] + sent[1] + sent[2])
    for results in run(tree_of(f"{name}:0.05,fp32,pull=union", 3), given):
        assert [one.tobytes() for one in results] == [one.tobytes() for one in wanted]


def test_a_union_of_weights_changes_what_was_contributed_and_keeps_the_rest_for_later() -> None:
    """With momentum the weights move everywhere; the result of a round has these changes where it has contributions."""
    given, start = gradients(12, 2), np.linspace(-1, 1, SIZE, dtype=np.float32)
    tree = tree_of("topk:0.05,fp32,pull=union", 2).use("sgd", learning_rate=0.5, momentum=0.9)
    tree.init(start)
    for party in (0, 1):
        tree.pull((party, 0))
    senders = [Party(0), Party(0)]
    weights, moved, known = start, np.zeros(SIZE, np.float32), start
    found = run(tree, given)
    for number, round_ in enumerate(given):
        sent = [sender.send(own, 0.05) for sender, own in zip(senders, round_, strict=True)]
        moved = np.float32(0.9) * moved - np.float32(0.5) * (sent[0] + sent[1])
        weights = weights + moved
        contributed = (sent[0] != 0) | (sent[1] != 0)
        known = np.where(contributed, known + (weights - known), known)
        for party in (0, 1):
            np.testing.assert_allclose(found[party][number], known, atol=1e-6)


def test_a_union_has_what_other_parties_of_an_asynchronous_job_contributed_meanwhile() -> None:
    spec = "topk:0.05,fp32,pull=union"
    tree = Tree([1, 1], lambda _, __: FsaServer(asynchronous=True), size=SIZE, compress=spec)
    tree.use("sgd", learning_rate=1.0).init(np.zeros(SIZE, np.float32))
    first, second = keep(gradients(1, 2)[0, 0], 0.05), keep(gradients(1, 2)[0, 1], 0.05)
    nothing = np.zeros(SIZE, np.float32)
    for party in (0, 1):
        tree.pull((party, 0))
        tree.push((party, 0), 1, nothing)
    tree.push((0, 0), 2, first)
    tree.push((0, 0), 3, first)
    tree.push((1, 0), 2, second)
    assert np.array_equal(tree.last((0, 0)), -2 * first)
    assert np.array_equal(tree.last((1, 0)), -2 * first - second)
    tree.push((0, 0), 4, nothing)
    assert np.array_equal(tree.last((0, 0)), -2 * first - second)


@pytest.mark.parametrize("pull", ["topk", "union"])
def test_only_a_union_grows_with_the_parties(pull: str) -> None:
    sizes = []
    for parties in (1, 2, 8):
        tree = tree_of(f"topk:0.05,pull={pull}", parties)
        given = np.zeros((1, parties, SIZE), np.float32)
        for party in range(parties):
            given[0, party, party * 20 : party * 20 + 20] = 1 + party
        results = run(tree, given)
        sizes.append(tree.crossed[-1])
        assert np.count_nonzero(results[0][0]) == 20 * (parties if pull == "union" else 1)
    if pull == "topk":
        assert max(sizes) - min(sizes) <= 1, "one gap more than a byte holds"
    else:
        assert sizes[2] > 7 * sizes[0]


def test_a_union_without_contributions_is_empty() -> None:
    tree = tree_of("bsc:0.05,pull=union", 1)
    tree.push((0, 0), 1, np.ones(SIZE, np.float32))
    tree.push((0, 0), 2, None)
    assert not tree.last((0, 0)).any()


@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("name", ["bsc", "mpq"])
def test_small_tensors_are_not_made_sparse(name: str, optimizer: bool) -> None:
    given = gradients(3, 2)
    for tensor, spec in ((1999, complete_spec(f"{name}:0.05", 2000)), (199_999, f"{name}:0.05,min=200000")):
        tree = tree_of(spec, 2, tensor=tensor)
        if optimizer:
            tree.use("sgd", learning_rate=1.0).init(np.zeros(SIZE, np.float32))
        results, wanted = run(tree, given), np.zeros(SIZE, np.float32)
        fp16 = (lambda array: array) if name == "bsc" else rounded
        for number, round_ in enumerate(given):
            total = fp16(round_[0]) + fp16(round_[1])
            wanted = wanted - total if optimizer else total
            assert [result[number].tobytes() for result in results] == [fp16(wanted).tobytes()] * 2
        assert tree.crossed.count(4 * SIZE if name == "bsc" else 2 * SIZE + 2) == 12


def rounded(array: Array) -> Array:
    mantissa, exponent = np.frexp(array)
    return np.ldexp(np.rint(mantissa * 2048) / 2048, exponent).astype(np.float32)


@pytest.mark.parametrize("spec", ["bsc:0.05", "mpq:0.05", "bsc:0.05,min=0", "topk:0.05"])
def test_large_tensors_are_made_sparse(spec: str) -> None:
    completed = complete_spec(spec, 2000)
    assert completed == (spec if "min" in spec else f"{spec},min=2000")
    tree = tree_of(completed, 1, tensor=2000)
    run(tree, gradients(2, 1))
    assert max(tree.crossed) < 4 + 3 * 20 + 5
    assert complete_spec("int8", 2000) == "int8"
    assert complete_spec("", 2000) == ""


def test_the_ratio_falls_geometrically_in_the_first_rounds() -> None:
    spec, size, counts = "topk:0.0001,warmup=4", 100_000, []
    array = gradients(1, 1)[0, 0].repeat(size // SIZE)
    for number in range(1, 8):
        codec = codec_at(parse_codec(spec), size, number)
        assert codec is not None
        payload = codec.encode(array)
        counts.append(int.from_bytes(payload[:4], "little"))
        assert np.count_nonzero(codec.decode(payload, size)) == counts[-1]
    np.testing.assert_allclose(counts, [100_000, 10_000, 1000, 100, 10, 10, 10], rtol=1e-2, atol=1)


def test_rounds_of_a_warm_up() -> None:
    given, ratios = gradients(6, 2), [1.0, 0.01 ** (1 / 3), 0.01 ** (2 / 3), 0.01, 0.01, 0.01]
    senders, down = [Party(0), Party(0)], np.zeros(SIZE, np.float32)
    found = run(tree_of("topk:0.01,fp32,warmup=3", 2), given)
    for number, (round_, ratio) in enumerate(zip(given, ratios, strict=True)):
        sent = [sender.send(own, ratio) for sender, own in zip(senders, round_, strict=True)]
        down = down + (sent[0] + sent[1])
        result = keep(down, ratio)
        down = down - result
        assert [one[number].tobytes() for one in found] == [result.tobytes()] * 2


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("topk:0.1,pull=all", "no pull=all"),
        ("topk:0.1,warmup=-1", "'-1' is no number"),
        ("bsc:0.1,min=many", "'many' is no number"),
        ("mpq:0.1,fp16,seed=1", "does not take 'seed=1'"),
        ("bsc:0.1,min=1,min=2", "does not take 'min=1,min=2'"),
        ("topk:0.1,fp16,int8", "does not take"),
        ("topk:0.1,pull=union,int8", "does not take"),
        ("topk:0.1+fp8", "no values of 'fp8'"),
        ("mpq", "mpq needs a ratio"),
        ("mpq:1.5", "'1.5' is no ratio"),
        ("bsc:nan", "'nan' is no ratio"),
    ],
)
def test_wrong_parameters(spec: str, said: str) -> None:
    with pytest.raises(InvalidSettings, match=said):
        parse_codec(spec)


def test_a_spec_that_the_bound_makes_too_long() -> None:
    spec = "bsc:0.01,pull=union,warmup=1".ljust(MAX_CODEC - 4, "0")
    assert parse_codec(spec) is not None
    with pytest.raises(InvalidSettings, match="codec of"):
        complete_spec(spec, 200_000)


def test_a_plus_replaces_a_comma() -> None:
    array = gradients(1, 1)[0, 0]
    payloads = {bytes(_encode(spec, array)) for spec in ("topk:0.1,int8", "topk:0.1+int8", "topk:0.1+int8+pull=topk")}
    assert len(payloads) == 1


def _encode(spec: str, array: Array) -> memoryview:
    codec = parse_codec(spec)
    assert codec is not None
    return codec.encode(array)


@pytest.mark.parametrize("spec", ["int8", "q4", "1bit:0", "topk:0.25,fp32", "sparseloco"])
def test_weights_after_rounds_of_sums(spec: str) -> None:
    """Sums are no reference for the changes of weights that follow once there is an optimizer."""
    size = 4096
    tree = Tree([1, 1], lambda _, __: FsaServer(), size=size, compress=spec)
    tree.init(np.full(size, 100, np.float32))
    for party in (0, 1):
        tree.pull((party, 0))
    for number in range(1, 6):
        if number == 3:
            tree.use("sgd", learning_rate=1.0)
        for party in (0, 1):
            tree.push((party, 0), number, np.ones(size, np.float32))
    (entry,) = tree.roots[0].rounds.table.entries.values()
    np.testing.assert_allclose(tree.last((0, 0)), entry.value, rtol=0, atol=3)


@pytest.mark.parametrize("spec", ["topk:0.5,fp32", "topk:0.5,fp32,pull=union", "bsc:0.5,fp32,pull=union"])
@pytest.mark.parametrize("lazy", [True, False])
def test_rows_change_what_members_pull(spec: str, lazy: bool) -> None:
    tree = Tree([1, 1], lambda _, __: FsaServer(), size=8, row=2, compress=spec)
    tree.use("sgd", learning_rate=1.0, lazy_update=lazy)
    tree.init(np.full(8, 100, np.float32))
    for party in (0, 1):
        tree.pull((party, 0))
    for number in (1, 2, 3):
        for party in (0, 1):
            tree.push((party, 0), number, Rows(np.array([1, 3]), np.ones((2, 2), np.float32)))
        for party in (0, 1):
            tree.pull((party, 0), rows=np.array([0, 1, 3]))
    (entry,) = tree.roots[0].rounds.table.entries.values()
    assert entry.value[2] < 96
    np.testing.assert_allclose(tree.last((0, 0)).values.ravel(), entry.value[[0, 1, 2, 3, 6, 7]])


@pytest.mark.parametrize("lan", ["", "int8"])
@pytest.mark.parametrize("spec", ["int8", "topk:0.25,fp32", "topk:0.25,fp32,pull=union"])
def test_all_have_the_same_after_a_round_in_which_all_abstain(spec: str, lan: str) -> None:
    """The weights stay, and what the codec has left of them too, for central workers as for the parties'."""
    tree = Tree([1, 1], lambda _, __: FsaServer(), size=SIZE, compress=spec, compress_lan=lan, central=1)
    tree.use("sgd", learning_rate=1.0)
    tree.init(np.full(SIZE, 100, np.float32))
    workers = [(0, 0), (1, 0), (-1, 0)]
    for who in workers:
        tree.pull(who)
    for number, round_ in enumerate(gradients(5, len(workers)), 1):
        for who, gradient in zip(workers, round_, strict=True):
            tree.push(who, number, None if number in (2, 4) else gradient)
        first, *others = (tree.last(who) for who in workers)
        assert all(np.array_equal(first, other) for other in others), f"round {number}"
    (entry,) = tree.roots[0].rounds.table.entries.values()
    assert entry.version == 3


@pytest.mark.parametrize("optimizer", [True, False], ids=["weights", "sums"])
@pytest.mark.parametrize("lan", ["", "q4"])
@pytest.mark.parametrize("spec", ["fp16", "q4", "topk:0.25,fp32", "topk:0.25,pull=union", "bsc:0.25", "sparseloco"])
def test_a_pull_after_a_round_is_its_result(spec: str, lan: str, optimizer: bool) -> None:
    """As the codecs left it, of all elements and of rows, for the parties' and for central workers."""
    tree = Tree([1, 1], lambda _, __: FsaServer(), size=SIZE, row=2, compress=spec, compress_lan=lan, central=1)
    if optimizer:
        tree.use("sgd", learning_rate=1.0)
    tree.init(np.full(SIZE, 1, np.float32))
    workers, numbers = [(0, 0), (1, 0), (-1, 0)], np.arange(0, SIZE // 2, 3)
    for who in workers:
        tree.pull(who)
    for number, round_ in enumerate(gradients(3, len(workers)), 1):
        for who, gradient in zip(workers, round_, strict=True):
            tree.push(who, number, gradient)
        results = [tree.last(who) for who in workers]
        for who, result in zip(workers, results, strict=True):
            assert np.array_equal(result, results[0])
            tree.pull(who)
            assert np.array_equal(tree.last(who), result), f"{who} in round {number}"
            tree.pull(who, rows=numbers)
            assert np.array_equal(tree.last(who).values, result.reshape(-1, 2)[numbers])


@pytest.mark.parametrize("spec", ["", "topk:0.25,fp32,min=0", "bsc:0.25,fp32,min=0", "sparseloco"])
def test_a_sum_of_rows_after_a_sum_of_which_a_codec_sent_other_elements(spec: str) -> None:
    tree = Tree([1, 1], lambda _, __: FsaServer(), size=8, compress=spec, tensor=8)
    tree.init(np.zeros(8, np.float32))
    large, small = [8, 7, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0.1, 0.1, 0, 0]
    for number, given in enumerate(((large, large[2:] + large[:2]), (small, small)), 1):
        for party, own in enumerate(given):
            tree.push((party, 0), number, np.array(own, np.float32))
    for party in (0, 1):
        tree.push((party, 0), 3, Rows(np.array([7]), np.ones((1, 1), np.float32)))
    for party in (0, 1):
        tree.pull((party, 0))
        assert tree.last((party, 0)).tolist() == [0, 0, 0, 0, 0, 0, 0, 2]


@pytest.mark.parametrize("wan", ["", "int8"])
@pytest.mark.parametrize("lan", ["int8", "topk:0.25,fp32,min=0", "bsc:0.25,fp32,min=0", "sparseloco"])
def test_a_sum_of_rows_clears_what_a_codec_sent_inside_a_party(lan: str, wan: str) -> None:
    """Of members that ask for the changed rows, and have the last sum as the codec left it."""
    tree = Tree([1, 2], lambda _, __: FsaServer(), size=8, compress=wan, compress_lan=lan, tensor=8)
    tree.init(np.zeros(8, np.float32))
    workers = [(0, 0), (1, 0), (1, 1)]
    large, small = [8, 7, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0.1, 0.1, 0, 0]
    for number, given in enumerate(((large, large[2:] + large[:2], large), (small, small, small)), 1):
        for who, own in zip(workers, given, strict=True):
            tree.push(who, number, np.array(own, np.float32))
    known = {who: tree.last(who).copy() for who in workers}
    for who in workers:
        tree.push(who, 3, Rows(np.array([7]), np.ones((1, 1), np.float32)), reply=Reply.CHANGED)
    for who in workers:
        tree.last(who).write_to(known[who])
        assert known[who].tolist() == [0, 0, 0, 0, 0, 0, 0, 3]


@pytest.mark.parametrize("lan", ["fp16", "int8", "topk:0.25,fp32,min=0"])
def test_parties_of_which_one_contributes_rows_have_the_same_sums(lan: str) -> None:
    tree = Tree([1, 1], lambda _, __: FsaServer(), size=SIZE, row=2, tensor=SIZE, compress_lan=lan)
    tree.init(np.zeros(SIZE, np.float32))
    for number, (dense, sparse) in enumerate(gradients(6, 2), 1):
        rows = Rows.of(sparse, 2, np.arange(1, 40, 2))
        tree.push((0, 0), number, dense)
        tree.push((1, 0), number, rows if number % 3 else sparse)
        for party in (0, 1) if number % 3 else ():
            tree.pull((party, 0))
        assert np.array_equal(tree.last((0, 0)), tree.last((1, 0))), f"round {number}"


@pytest.mark.parametrize("kind", ["bsc", "mpq"])
def test_a_script_asks_as_for_geomx(cluster: Cluster, kind: str) -> None:
    """With tensors on both sides of the bound, cut into slices that are below it."""
    argv, env = hooked("compressed_sparse.py", kind, "3000")
    bounds = {"MXNET_KVSTORE_SIZE_LOWER_BOUND": "3000", "MXNET_KVSTORE_BIGARRAY_BOUND": "1500"}
    cluster.launch(argv, env={**env, **bounds})
    cluster.finish()
