"""HFA against its own formula in numpy, bit for bit, and against plain means; by hand and in planned clusters."""

import itertools
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from averages import SCRIPT, SIZES, expected, found_in, own_steps
from cluster import RUNTIME, Cluster, clean_environment, free_ports
from tree import Tree

from geomx_cli.ps.arrays import Array
from geomx_cli.runtime.algorithms.hfa import HfaServer


def tree(parties: Sequence[int], k2: int = 1, *, by_samples: bool = False, **shape: object) -> Tree:
    return Tree(parties, lambda workers, _: HfaServer(k2, workers, by_samples), **shape)  # type: ignore[arg-type]


def full(number: float) -> Array:
    return np.full(8, number, np.float32)


def assert_same(found: Sequence[Array], wanted: Sequence[Array]) -> None:
    for number, (got, want) in enumerate(zip(found, wanted, strict=True)):
        assert got.dtype == want.dtype
        assert got.tobytes() == want.tobytes(), f"round {number}: off by {np.abs(got - want).max()}"


# Rules, in one process.


def test_the_milestone_stays_the_milestone() -> None:
    """GeoMX gives 15 here and then each party its own value, since its milestone shares memory with the value."""
    job = tree([1, 1])
    job.init(full(99), (5, 0))
    for party in (0, 1):
        job.pull((party, 0), (5, 0))
        assert (job.last((party, 0), (5, 0)) == 99).all(), "nobody goes on from a value of its own"
    for number, values, wanted in ((1, (10, 20), 15), (2, (20, 40), 30), (3, (0, 1), 0.5)):
        for party, value in enumerate(values):
            job.push((party, 0), number, full(value), (5, 0))
        assert all((job.last((party, 0), (5, 0)) == wanted).all() for party in (0, 1))


def test_every_second_mean_is_global_for_each_slice_by_itself() -> None:
    """There is no key 0, and a key that lags behind does not affect the others."""
    job = tree([1, 1], k2=2, roots=2)
    for where in ((3, 0), (7, 1)):
        job.init(full(99), where)
    for number, wanted in ((1, (10, 20)), (2, (15, 15)), (3, (10, 20)), (4, (15, 15))):
        for party, value in enumerate((10, 20)):
            job.push((party, 0), number, full(value), (3, 0))
        assert [float(job.last((party, 0), (3, 0))[0]) for party in (0, 1)] == list(wanted)
        if number == 3:
            job.push((0, 0), 1, full(1), (7, 1))
            assert (job.last((0, 0), (7, 1)) == 1).all(), "its first round is this party's own"
    job.push((1, 0), 1, full(2), (7, 1))
    for party in (0, 1):
        job.push((party, 0), 2, full(4 + 4 * party), (7, 1))
    assert [float(job.last((party, 0), (7, 1))[0]) for party in (0, 1)] == [6, 6]


def test_vector_of_the_reference() -> None:
    job = tree([2, 1])
    job.init(full(1))
    for rank, value in enumerate((1.2, 1.6)):
        job.push((0, rank), 1, full(value / 2))
    job.push((1, 0), 1, full(0.8))
    np.testing.assert_allclose(job.last((0, 1)), 1.1, rtol=1e-6)


def run_tree(job: Tree, parties: Sequence[Sequence[int]], rounds: Mapping[int, int], **given: object) -> None:
    """All rounds of workers that take their own steps; the order of parties changes."""
    dtype, counts = str(given.get("dtype", "float32")), given.get("counts")
    members = {rank: (party, own) for party, ranks in enumerate(parties) for own, rank in enumerate(ranks)}
    job.init(np.random.default_rng(1000).standard_normal(8).astype(dtype))
    for who in members.values():
        job.pull(who)
    for number in range(max(rounds.values())):
        order = sorted(members, key=lambda rank: hash((rank, number)))
        for rank in (rank for rank in order if rounds[rank] == number):
            job.leave(members[rank])
        for rank in (rank for rank in order if rounds[rank] > number):
            weight = counts[rank] if counts else 1.0  # type: ignore[index]
            own = own_steps(job.last(members[rank]), rank, number, 0)
            share = own * own.dtype.type(weight / len(parties[members[rank][0]]))
            job.push(members[rank], number + 1, share, weight=weight)


@pytest.mark.parametrize("k2", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("by_samples", [False, True])
def test_bit_for_bit(k2: int, dtype: str, by_samples: bool) -> None:
    parties, counts = [[0, 1, 2], [3, 4], [5]], None
    if by_samples:
        counts = {0: 1.0, 1: 0.5, 2: 1.0, 3: 2.0, 4: 0.25, 5: 1.0}
    rounds = dict.fromkeys(range(6), 7)
    job = tree([3, 2, 1], k2, by_samples=by_samples, dtype=dtype)
    run_tree(job, parties, rounds, dtype=dtype, counts=counts)
    wanted = expected(parties, rounds, k2, dtype=dtype, counts=counts)
    for rank, who in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]):
        assert_same([result.value for result in job.got(who)], wanted[rank])


@pytest.mark.parametrize(("k2", "by_samples"), [(1, False), (3, True)])
def test_uneven_numbers_of_batches(k2: int, by_samples: bool) -> None:
    """Parties of 10 and 13 rounds, and a worker that leaves in the middle of one: means are over those that stay."""
    parties, rounds = [[0, 1], [2, 3]], {0: 10, 1: 10, 2: 13, 3: 5}
    counts = {0: 1.0, 1: 3.0, 2: 2.0, 3: 4.0} if by_samples else None
    job = tree([2, 2], k2, by_samples=by_samples)
    run_tree(job, parties, rounds, counts=counts)
    wanted = expected(parties, rounds, k2, counts=counts)
    for rank, who in enumerate(itertools.product(range(2), range(2))):
        assert_same([result.value for result in job.got(who)], wanted[rank])
        assert len(job.got(who)) == rounds[rank] + 1


def test_k1_and_k2_of_1_are_parameter_averaging() -> None:
    """Twelve rounds against the plain mean of all weights, in fp64, with equal weights of parties."""
    parties, rounds = [[0, 1, 2], [3]], dict.fromkeys(range(4), 12)
    job = tree([3, 1])
    run_tree(job, parties, rounds)
    weight = np.random.default_rng(1000).standard_normal(8).astype(np.float32).astype(np.float64)
    for number in range(12):
        own = [own_steps(weight.astype(np.float32), rank, number, 0).astype(np.float64) for rank in range(4)]
        weight = (np.mean(own[:3], axis=0) + own[3]) / 2
    assert np.abs(job.last((1, 0)) - weight).max() < 1e-6


def test_by_samples_every_sample_counts_alike() -> None:
    """Also if parties compute several means between milestones: each counts by all samples since the last one."""
    job = tree([2, 1], k2=2, by_samples=True)
    job.init(full(0))
    for number in (1, 2):
        for rank, (value, samples) in enumerate(((8.0, 1.0), (0.0, 3.0))):
            job.push((0, rank), number, full(value * samples / 2), weight=samples)
        job.push((1, 0), number, full(10 * 4.0), weight=4.0)
        if number == 1:
            assert (job.last((0, 0)) == 2).all()
    assert (job.last((1, 0)) == (2 * 8 + 10 * 8) / 16).all()


def test_in_a_flat_cluster_the_root_averages_weights() -> None:
    """Also over those that remain when a worker has left."""
    job = Tree([], lambda *_: HfaServer(1, 3, False, is_flat=True), central=3)
    job.init(full(5))
    for rank, value in enumerate((1, 2, 6)):
        job.push((-1, rank), 1, full(value / 3))
    np.testing.assert_allclose(job.last((-1, 0)), 3, rtol=1e-6)
    job.leave((-1, 1))
    for rank, value in ((0, 2), (2, 8)):
        job.push((-1, rank), 2, full(value / 3))
    np.testing.assert_allclose(job.last((-1, 2)), 5, rtol=1e-6)


# Clusters.


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {"OUT": str(folder / "w{rank}.npz"), "PUSH": "weights", "GEOMX_ALGO": "hfa", **more}


def test_a_cluster_by_hand(cluster: Cluster, tmp_path: Path) -> None:
    """Slices on three roots, milestones every second round, and parties whose workers have 3 and 5 rounds."""
    more = {"MXNET_KVSTORE_HFA_K2": "2", "ROUNDS": "3,5", "MXNET_KVSTORE_BIGARRAY_BOUND": "1024"}
    cluster.environment = environment(tmp_path, **more)
    cluster.launch(SCRIPT, roots=3)
    cluster.finish()
    parties, rounds = [[0, 1], [2, 3]], {0: 3, 1: 5, 2: 3, 3: 5}
    for index, size in enumerate(SIZES):
        wanted = expected(parties, rounds, 2, index=index, size=size)
        found = found_in(tmp_path, f"t{index}")
        assert sorted(found) == sorted(rounds)
        for rank, history in found.items():
            assert_same(history, wanted[rank])


@pytest.mark.parametrize("shape", [{"central_server": True}, {"topology": "spread"}], ids=["central", "spread"])
def test_central_workers_are_a_party_of_their_own(
    cluster: Cluster, tmp_path: Path, shape: dict[str, Any]
) -> None:
    cluster.environment = environment(tmp_path, MXNET_KVSTORE_HFA_K2="2", GEOMX_WEIGHT="samples", WEIGHTS="1,2,4")
    options = {"parties": 1, "workers": 1, "central_workers": 2}
    cluster.launch_planned(cluster.planned(SCRIPT[1:], options, changes=shape))
    cluster.finish()
    counts = {0: 1.0, 1: 2.0, 2: 4.0}
    wanted = expected([[0], [1, 2]], dict.fromkeys(range(3), 4), 2, size=SIZES[0], counts=counts)
    found = found_in(tmp_path)
    assert sorted(found) == [0, 1, 2]
    for rank, history in found.items():
        assert_same(history, wanted[rank])


@pytest.mark.processes
def test_central_workers_by_hand_are_refused() -> None:
    upper, lower = free_ports(2)
    env = {
        "DMLC_ROLE": "server", "DMLC_ROLE_GLOBAL": "global_server", "DMLC_ENABLE_CENTRAL_WORKER": "1",
        "DMLC_PS_GLOBAL_ROOT_URI": "127.0.0.1", "DMLC_PS_GLOBAL_ROOT_PORT": str(upper), "DMLC_NUM_GLOBAL_SERVER": "1",
        "DMLC_NUM_GLOBAL_WORKER": "2", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(lower),
        "DMLC_NUM_SERVER": "1", "DMLC_NUM_WORKER": "2", "GEOMX_ALGO": "hfa",
    }  # fmt: skip
    done = subprocess.run(
        RUNTIME, env=clean_environment() | env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 3
    assert "error: central workers need a local server of their own in HFA" in done.stderr
    assert "leave DMLC_ENABLE_CENTRAL_WORKER out" in done.stderr
