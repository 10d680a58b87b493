"""--compress-lan: rounds of trees and of real clusters, with and without a codec between parties, against numpy."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import ROOT, Cluster
from in_flight import ROUNDS, check_rounds
from in_flight import SIZES as SIZES_IN_FLIGHT
from plans import planned
from rounding import rounded
from rounds import SCRIPT, SIZES, assert_equal, found_in, gradient, initial, run
from test_codecs import DECAY, QUANTISERS
from tree import Tree

from geomx_cli.contract.settings import Settings
from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import Value
from geomx_cli.ps.aggregation.codec import parse_codec
from geomx_cli.ps.net.payload import Rows
from geomx_cli.runtime.algorithms import hfa
from geomx_cli.runtime.algorithms.diloco import MeanServer
from geomx_cli.runtime.algorithms.esync import EsyncServer
from geomx_cli.runtime.algorithms.fsa import FsaServer

Array = np.ndarray
Quantise = Callable[[Array], Array]
LAN = ("fp16", "bf16", *(spec for spec in QUANTISERS if "keep" not in spec))
"""Not the one that leaves thousands of equal elements: which of them a second codec chooses is decided by roundings."""
WAN = ("", "fp16", "topk:0.05,fp32")
PAIRS = [(lan, wan, (row + column) % 2 == 0) for row, lan in enumerate(LAN) for column, wan in enumerate(WAN)]
"""Each codec inside a party with each beyond, and each of both with and without an optimizer."""
F32 = np.float32


def quantiser(spec: str) -> Quantise:
    """What the codec leaves of an array, computed in another way."""
    return QUANTISERS.get(spec) or (lambda array: rounded(array, {"fp16": 11, "bf16": 8}[spec]) if spec else array)


def own(spec: str) -> Quantise:
    """What the codec itself leaves: for tests of a million roundings, of which some are ties in numpy alone."""
    codec = parse_codec(spec)
    return lambda array: array if codec is None else codec.decode(codec.encode(array), len(array))


class Up:
    """The sending end of contributions."""

    def __init__(self, spec: str, size: int, quantise: Quantise | None = None, *, momentum: bool = True) -> None:
        self._quantise = quantise or quantiser(spec)
        self._keeps = spec not in ("", "fp16", "bf16")
        self._decay = DECAY.get(spec, F32(1))
        self._factor = F32(0.9) if momentum and spec.startswith(("bsc", "mpq")) else None
        self.residual, self.momentum = np.zeros(size, F32), np.zeros(size, F32)

    def send(self, given: Array) -> Array:
        if not self._keeps:
            return self._quantise(given)
        if self._factor is not None:
            given = self.momentum = self.momentum * self._factor + given
        self.residual = self.residual * self._decay + given
        sent = self._quantise(self.residual)
        self.residual = self.residual - sent
        if self._factor is not None:
            self.momentum = np.where(sent != 0, 0, self.momentum).astype(F32)
        return sent


class Down:
    """Results; `start`: the reference of the first one, None if they are sums."""

    def __init__(self, spec: str, start: Array | None, size: int, quantise: Quantise | None = None) -> None:
        self._quantise = quantise or quantiser(spec)
        self._spec = spec
        self._known, self._residual = start, np.zeros(size, F32)

    def send(self, value: Array) -> Array:
        if self._spec.startswith("2bit") or not self._spec:
            return value
        if self._spec in ("fp16", "bf16"):
            return self._quantise(value)
        if self._known is not None:
            self._known = self._known + self._quantise(value - self._known)
            return self._known
        self._residual = self._residual + value
        sent = self._quantise(self._residual)
        self._residual = self._residual - sent
        return sent


def gradients(*shape: int) -> Array:
    return np.random.default_rng(3).standard_normal(shape).astype(F32)


def in_order(arrays: Sequence[Array]) -> Array:
    return sum(arrays[1:], arrays[0])


PARTIES = [2, 1]
WORKERS = [(0, 0), (0, 1), (1, 0), (-1, 0)]


def started(part: Callable[..., Any], start: Array | None, **more: Any) -> Tree:
    """A tree of PARTIES in which all workers have pulled the initial value, if there is one."""
    tree = Tree(PARTIES, part, **more)
    if start is not None:
        tree.init(start)
        for who in WORKERS if more.get("central") else WORKERS[:-1]:
            tree.pull(who)
    return tree


def results(tree: Tree, who: tuple[int, int]) -> list[Array]:
    return [result.value for result in tree.got(who) if result.round]


def close(found: Array, wanted: Array) -> None:
    wrong = np.abs(found - wanted) > 1e-4
    assert not wrong.any(), f"{wrong.sum()} of {len(wrong)}"


@pytest.mark.parametrize(("lan", "wan", "optimizer"), PAIRS)
def test_fsa_encodes_in_each_plane(lan: str, wan: str, optimizer: bool) -> None:
    """All workers, central ones too, have the same; where workers correct momentum, parties do not."""
    size, rounds = 4200, 5
    given, start = gradients(rounds, 4, size), gradients(1, size)[0]
    first = start if optimizer else None
    tree = Tree(PARTIES, lambda _, __: FsaServer(), size=size, compress=wan, compress_lan=lan, central=1)
    if optimizer:
        tree.use("sgd", learning_rate=1.0).init(start)
        for who in WORKERS:
            tree.pull(who)
    workers, parties = [Up(lan, size) for _ in WORKERS], [Up(wan, size) for _ in PARTIES]
    above, below = Down(wan, first, size), Down(lan, first, size)
    weights = start
    for number, pushed in enumerate(given, 1):
        for who, array in zip(WORKERS, pushed, strict=True):
            tree.push(who, number, array)
        sent = [worker.send(array) for worker, array in zip(workers, pushed, strict=True)]
        total = in_order([parties[0].send(sent[0] + sent[1]), parties[1].send(sent[2]), sent[3]])
        weights = weights - total if optimizer else total
        wanted = below.send(above.send(weights))
        for who in WORKERS:
            close(results(tree, who)[-1], wanted)
            assert results(tree, who)[-1].tobytes() == results(tree, (0, 0))[-1].tobytes()
        assert len(results(tree, (1, 0))) == number


@pytest.mark.parametrize(("lan", "wan"), [("bsc:0.02,fp16", "bsc:0.3+int8"), ("mpq:0.02", "topk:0.05,fp32")])
def test_momentum_is_corrected_once(lan: str, wan: str) -> None:
    size = 2000
    given, start = gradients(8, 2, size), np.zeros(size, F32)
    tree = Tree([2], lambda _, __: FsaServer(), size=size, compress=wan, compress_lan=lan)
    tree.use("sgd", learning_rate=1.0).init(start)
    for rank in (0, 1):
        tree.pull((0, rank))
    workers, party = [Up(lan, size), Up(lan, size)], Up(wan, size, momentum=False)
    above, below, weights = Down(wan, start, size), Down(lan, start, size), start
    for number, pushed in enumerate(given, 1):
        for rank in (0, 1):
            tree.push((0, rank), number, pushed[rank])
        sent = party.send(workers[0].send(pushed[0]) + workers[1].send(pushed[1]))
        weights = weights - sent
        close(tree.last((0, 1)), below.send(above.send(weights)))


@pytest.mark.parametrize(
    ("lan", "wan"),
    [
        ("fp16", "int8"), ("int8", "fp16"), ("q4", ""), ("topk:0.05,fp32", "int8"), ("sparseloco", "fp16"),
        ("2bit:0.75", ""),
    ],
)  # fmt: skip
def test_parties_that_train_asynchronously_have_their_own_references(lan: str, wan: str) -> None:
    size = 4500
    given, start = gradients(6, 3, size), gradients(1, size)[0]
    tree = started(lambda _, __: FsaServer(asynchronous=True), start, size=size, compress=wan, compress_lan=lan)
    tree.use("sgd", learning_rate=0.5)
    workers, parties = [Up(lan, size) for _ in range(3)], [Up(wan, size), Up(wan, size)]
    above: list[Down | None] = [Down(wan, start, size), None]
    below = [Down(lan, start, size), Down(lan, start, size)]
    weights = start
    for number, pushed in enumerate(given, 1):
        for party, ranks in enumerate(([0, 1], [2])):
            for rank in ranks:
                tree.push((party, rank - ranks[0]), number, pushed[rank])
            total = in_order([workers[rank].send(pushed[rank]) for rank in ranks])
            weights = weights - F32(0.5) * parties[party].send(total)
            down = above[party]
            if down is None:  # a party's first result is exact where it is not the first of all
                above[party] = Down(wan, weights, size)
                value = quantiser(wan)(weights) if wan == "fp16" else weights
            else:
                value = down.send(weights)
            wanted = below[party].send(value)
            for rank in ranks:
                close(results(tree, (party, rank - ranks[0]))[-1], wanted)
    tree.pull((0, 0), number=6)
    newest = quantiser("fp16")(weights) if wan == "fp16" else weights
    close(tree.last((0, 0)), quantiser("fp16")(newest) if lan == "fp16" else newest)


@pytest.mark.parametrize(
    ("algorithm", "lan", "wan"),
    [
        ("diloco", "fp16", "q4"), ("esync", "int8", ""), ("diloco", "q4", ""), ("esync", "topk:0.05,fp32", "q4"),
        ("diloco", "sparseloco", "q4"), ("esync", "2bit:0.75", ""), ("diloco", "bsc:0.02,fp16", "q4"),
    ],
)  # fmt: skip
def test_differences_of_weights(algorithm: str, lan: str, wan: str) -> None:
    part = MeanServer if algorithm == "diloco" else partial(EsyncServer, "global", None, 1)
    size = 4500
    given, start = gradients(6, 3, size), gradients(1, size)[0]
    tree = started(lambda _, __: part(), start, size=size, compress=wan, compress_lan=lan)
    tree.use("sgd", learning_rate=0.5)
    workers = [Up(lan, size, own(lan), momentum=False) for _ in range(3)]
    parties, above = [Up(wan, size, own(wan)), Up(wan, size, own(wan))], Down(wan, start, size, own(wan))
    below, weights = Down(lan, start, size, own(lan)), start
    for number, pushed in enumerate(given, 1):
        for who, array in zip(WORKERS, pushed, strict=False):
            tree.push(who, number, array)
        sent = [worker.send(array) for worker, array in zip(workers, pushed, strict=True)]
        total = parties[0].send(sent[0] + sent[1]) + parties[1].send(sent[2])
        weights = weights - F32(0.5) * (total / F32(3))
        wanted = below.send(above.send(weights))
        for who in WORKERS[:-1]:
            close(results(tree, who)[-1], wanted)


@pytest.mark.parametrize("lan", ["fp16", "int8"])
@pytest.mark.parametrize("wan", ["", "fp16", "topk:0.05,fp32"])
def test_hfa_encodes_weights_in_the_party_and_differences_beyond(lan: str, wan: str) -> None:
    """After a global round parties differ by what their codecs lost."""
    size = 1000
    given, start = gradients(8, 3, size), gradients(1, size)[0]
    tree = started(
        lambda workers, _: hfa.HfaServer(2, workers, by_samples=False), start, size=size, compress=wan, compress_lan=lan
    )  # fmt: skip
    workers, parties = [Up(lan, size) for _ in range(3)], [Up(wan, size), Up(wan, size)]
    above, below = Down(wan, start, size), [Down(lan, start, size), Down(lan, start, size)]
    world = milestone = start
    for number, pushed in enumerate(given, 1):
        means = []
        for party, ranks in enumerate(([0, 1], [2])):
            share = pushed / F32(len(ranks))
            for rank in ranks:
                tree.push((party, rank - ranks[0]), number, share[rank])
            means.append(in_order([workers[rank].send(share[rank]) for rank in ranks]))
        if number % 2 == 0:
            step = in_order([party.send(mean - milestone) for party, mean in zip(parties, means, strict=True)])
            world = world + step / F32(2)
            milestone = above.send(world)
            means = [milestone, milestone]
        for party, ranks in enumerate(([0, 1], [2])):
            wanted = below[party].send(means[party])
            for rank in ranks:
                close(results(tree, (party, rank - ranks[0]))[-1], wanted)


def test_rows_are_not_encoded_and_end_the_reference() -> None:
    start, one = np.linspace(1, 2, 8, dtype=F32) / F32(3), np.ones(8, F32)
    tree = Tree([1], lambda _, __: FsaServer(), row=2, compress_lan="int8").use("sgd", learning_rate=1.0)
    tree.init(start)
    tree.pull((0, 0))
    tree.push((0, 0), 1, one)
    tree.push((0, 0), 2, Rows(np.array([1, 3]), np.ones((2, 2), F32)))
    tree.push((0, 0), 3, one)
    rows = np.array([0, 0, 1, 1, 0, 0, 1, 1], F32)
    np.testing.assert_allclose(tree.last((0, 0)), start - 2 * one - rows, rtol=1e-6)


def simulate(
    lan: str, wan: str, parties: Sequence[Sequence[int]], size: int, index: int, rounds: int, *, optimizer: bool,
    central: Sequence[int] = (), quantise: Callable[[str], Quantise] = quantiser,
) -> list[Array]:  # fmt: skip
    """All results of a tensor of one slice that jobs of scripts/rounds.py and in_flight.py exchange."""
    start, momentum = initial(size, index), np.zeros(size, F32)
    ranks = [*(rank for party in parties for rank in party), *central]
    workers = {rank: Up(lan, size, quantise(lan)) for rank in ranks}
    senders = [Up(wan, size, quantise(wan)) for _ in parties]
    first = start if optimizer else None
    above, below = Down(wan, first, size, quantise(wan)), Down(lan, first, size, quantise(lan))
    weight, found = start, []
    for number in range(rounds):
        sent = {rank: workers[rank].send(gradient(rank, number, size, index)) for rank in ranks}
        sums = [sender.send(in_order([sent[r] for r in party])) for sender, party in zip(senders, parties, strict=True)]
        total = in_order([*sums, *(sent[rank] for rank in central)])
        momentum = F32(0.9) * momentum - F32(0.1) * (F32(0.25) * total)
        weight = weight + momentum if optimizer else total
        found.append(below.send(above.send(weight)))
    return found


@pytest.mark.parametrize(
    ("lan", "wan", "optimizer", "central"),
    [
        ("bf16", "fp16", False, (4, 5)),
        ("topk:0.05,fp32", "", True, (4, 5)),
        ("int8", "q4", True, ()),
        ("bsc:0.05,fp32,min=0", "", False, ()),
    ],
)
def test_rounds_of_a_cluster(
    cluster: Cluster, tmp_path: Path, lan: str, wan: str, optimizer: bool, central: tuple[int, ...]
) -> None:
    env = {
        "GEOMX_COMPRESS_LAN": lan, "GEOMX_COMPRESS": wan, "SHUFFLE": "1", "MXNET_KVSTORE_BIGARRAY_BOUND": "100000",
        "MXNET_KVSTORE_SIZE_LOWER_BOUND": "0", "SERVER_OPTIMIZER": "1" if optimizer else "",
    }  # fmt: skip
    shape = {"central_workers": len(central)} if central else {}
    found = run(cluster, tmp_path, env, **shape)
    assert len(found) == 4 + len(central)
    wanted = [
        simulate(lan, wan, [[0, 1], [2, 3]], size, index, 5, optimizer=optimizer, central=central, quantise=own)[-1]
        for index, size in enumerate(SIZES)
    ]
    assert_equal(found, wanted)


@pytest.mark.parametrize(("lan", "wan", "optimizer"), [("int8", "", True), ("topk:0.05,fp32", "int8", False)])
def test_every_round_is_right_though_links_of_workers_are_cut(
    cluster: Cluster, tmp_path: Path, lan: str, wan: str, optimizer: bool
) -> None:
    wanted = {}
    for index, size in enumerate(SIZES_IN_FLIGHT):
        found = simulate(lan, wan, [[0, 1], [2, 3]], size, index, ROUNDS, optimizer=optimizer, quantise=own)
        wanted |= {f"{number}-{index}": array for number, array in enumerate(found)}
    env = {"GEOMX_COMPRESS_LAN": lan, "GEOMX_COMPRESS": wan, "MXNET_KVSTORE_BIGARRAY_BOUND": "4096"}
    env["MXNET_KVSTORE_SIZE_LOWER_BOUND"] = "0"
    check_rounds(cluster, tmp_path, 1, "both" if wan else "below", optimizer, 0, wanted=wanted, **env)


def test_differences_have_no_momentum_in_a_flat_cluster_either(cluster: Cluster, tmp_path: Path) -> None:
    cluster.environment = {
        "OUT": str(tmp_path / "w{rank}.npz"), "SERVER_OPTIMIZER": "1", "MXNET_KVSTORE_BIGARRAY_BOUND": "100000",
        "GEOMX_ALGO": "diloco", "GEOMX_COMPRESS": "bsc:0.05,fp32,min=0",
    }  # fmt: skip
    cluster.launch_flat(SCRIPT)
    cluster.finish()
    wanted = []
    for index, size in enumerate(SIZES):
        weight, momentum, quantise = initial(size, index), np.zeros(size, F32), own("topk:0.05,fp32")
        workers = [Up("topk:0.05,fp32", size, quantise) for _ in range(4)]
        down = Down("topk:0.05,fp32", weight, size, quantise)
        for number in range(5):
            sent = [worker.send(gradient(rank, number, size, index)) for rank, worker in enumerate(workers)]
            momentum = F32(0.9) * momentum - F32(0.1) * (F32(0.25) * (in_order(sent) / F32(4)))
            weight = weight + momentum
            result = down.send(weight)
        wanted.append(result)
    assert_equal(found_in(tmp_path), wanted)


def test_a_worker_that_merges_contributions_decodes_them(cluster: Cluster, tmp_path: Path) -> None:
    """The sum that it sends is exact; what it receives is encoded."""
    wanted = {}
    for index, size in enumerate(SIZES_IN_FLIGHT):
        found = simulate("int8", "", [[0, 1], [2, 3]], size, index, ROUNDS, optimizer=True, quantise=own)
        wanted |= {f"{number}-{index}": array for number, array in enumerate(found)}
    folders = os.pathsep.join([str(ROOT), str(ROOT / "tests/plugins")])
    env = {"GEOMX_DELIVERY": "relay", "PYTHONPATH": folders, "GEOMX_COMPRESS_LAN": "int8"}
    env["MXNET_KVSTORE_BIGARRAY_BOUND"] = "4096"
    check_rounds(cluster, tmp_path, 1, "beside", optimizer=True, row=0, wanted=wanted, **env)


# What is refused.


@pytest.mark.parametrize(
    ("options", "topology", "said"),
    [
        ({"compress_lan": "fp16"}, "flat", "flat has no local servers"),
        ({"compress_lan": "fp17"}, "central", "fp17"),
        ({"compress_lan": "topk:0.1,pull=union"}, "central", "does not know which elements other parties"),
        ({"compress_lan": "topk:0.1", "algo": "hfa"}, "central", "leaves too little"),
        ({"compress_lan": "q4", "algo": "hfa"}, "spread", "leaves too little"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(
    options: dict[str, Value], topology: str, said: str
) -> None:
    with pytest.raises(InvalidSettings, match=said):
        planned(topology=topology, **options)


@pytest.mark.parametrize("lan", ["fp16", "bf16", "int8"])
def test_weights_of_hfa_may_be_sent_with_these(lan: str) -> None:
    planned(compress_lan=lan, algo="hfa", compress="topk:0.01")


def test_processes_started_by_hand_are_refused_too(cluster: Cluster) -> None:
    plane = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "1", "DMLC_NUM_SERVER": "1", "DMLC_NUM_WORKER": "1"}
    env = {**plane, "GEOMX_COMPRESS_LAN": "topk:0.1", "DMLC_ROLE": "server"}
    with pytest.raises(InvalidSettings, match="leaves too little"):
        hfa.server(Settings.from_environment(plugins.table(), env))
    cluster.environment = {"GEOMX_COMPRESS_LAN": "fp16"}
    cluster.launch_flat(SCRIPT)
    assert all(cluster.wait().values())
    assert "there is nothing for --compress-lan" in cluster.outputs()
