"""DiLoCo, plain and streaming, against its formulas in numpy; with an outer step of 1 it is HFA."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from cluster import ROOT, Cluster
from tree import Tree

from geomx_cli.ps.arrays import Array
from geomx_cli.runtime.algorithms.diloco import MeanServer
from geomx_cli.runtime.algorithms.hfa import HfaServer

SCRIPTS = ROOT / "tests/scripts"
RATE, MOMENTUM = 0.7, 0.9
INNER_RATE = 0.1


def goal(rank: int, number: int, index: int, size: int) -> Array:
    return np.random.default_rng([rank, number, index]).standard_normal(size)


def inner_steps(weight: Array, rank: int, number: int, index: int = 0) -> Array:
    """Two steps, as in scripts/averages.py, in the precision of `weight`."""
    towards = goal(rank, number, index, weight.size).astype(np.float32).astype(weight.dtype)
    for _ in range(2):
        weight = weight - weight.dtype.type(0.25) * (weight - towards)
    return weight


def plain(
    rounds: Mapping[int, int], start: Array, counts: Mapping[int, float], rate: float = RATE, mu: float = MOMENTUM
) -> list[Array]:
    """The paper's algorithm in fp64: the global weights after each round; `rounds` and `counts` by worker."""
    weight, velocity, history = start.astype(np.float64), np.zeros(start.size), []
    for number in range(max(rounds.values())):
        workers = [rank for rank in rounds if number < rounds[rank]]
        differences = [counts[rank] * (weight - inner_steps(weight, rank, number)) for rank in workers]
        mean = sum(differences, np.zeros(start.size)) / sum(counts[rank] for rank in workers)
        velocity = mu * velocity + mean
        weight = weight - rate * (mean + mu * velocity)
        history.append(weight)
    return history


def tree(name: str = "nag", rate: float = RATE, momentum: float = MOMENTUM) -> Tree:
    return Tree([2, 2], lambda *_: MeanServer()).use(name, learning_rate=rate, momentum=momentum)


def run_tree(job: Tree, rounds: Mapping[int, int], counts: Mapping[int, float]) -> None:
    members = {rank: divmod(rank, 2) for rank in rounds}
    job.init(np.random.default_rng(1000).standard_normal(8).astype(np.float32))
    for who in members.values():
        job.pull(who)
    for number in range(max(rounds.values())):
        for rank in (rank for rank in rounds if rounds[rank] == number):
            job.leave(members[rank])
        for rank in (rank for rank in reversed(rounds) if rounds[rank] > number):
            before = job.last(members[rank])
            difference = (before - inner_steps(before, rank, number)) * np.float32(counts[rank])
            job.push(members[rank], number + 1, difference, weight=counts[rank])


@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (1, 3, 0.5, 2)], ids=["workers", "samples"])
@pytest.mark.parametrize("rounds", [(8, 8, 8, 8), (8, 3, 5, 5)], ids=["all", "some leave"])
def test_formula(counts: Sequence[float], rounds: Sequence[int]) -> None:
    job, each, weights = tree(), dict(enumerate(rounds)), dict(enumerate(map(float, counts)))
    run_tree(job, each, weights)
    wanted = plain(each, job.got((0, 0))[0].value, weights)
    for rank, count in each.items():
        found = [result.value for result in job.got(divmod(rank, 2))[1:]]
        assert len(found) == count
        for got, want in zip(found, wanted, strict=False):
            np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["nag", "sgd"], ids=["diloco", "esync"])
def test_an_outer_step_of_1_is_hfa(optimizer: str) -> None:
    """So is ESync if all workers take the same number of steps."""
    rounds, ones = dict.fromkeys(range(4), 8), dict.fromkeys(range(4), 1.0)
    job = tree(optimizer, rate=1.0, momentum=0.0)
    run_tree(job, rounds, ones)
    other = Tree([2, 2], lambda workers, _: HfaServer(1, workers, False))
    other.init(np.random.default_rng(1000).standard_normal(8).astype(np.float32))
    workers = [divmod(rank, 2) for rank in rounds]
    for who in workers:
        other.pull(who)
    for number in range(8):
        for rank, who in enumerate(workers):
            other.push(who, number + 1, inner_steps(other.last(who), rank, number) / np.float32(2))
    np.testing.assert_allclose(job.last((1, 1)), other.last((1, 1)), atol=1e-5)


def test_hfa_with_an_outer_optimizer_is_diloco() -> None:
    job = Tree([1, 1], lambda workers, _: HfaServer(1, workers, False))
    job.use("nag", learning_rate=RATE, momentum=MOMENTUM)
    start = np.random.default_rng(1000).standard_normal(8).astype(np.float32)
    job.init(start)
    weight = start
    for number in range(6):
        for party in (0, 1):
            job.push((party, 0), number + 1, inner_steps(weight, party, number))
        weight = job.last((0, 0))
    wanted = plain({0: 6, 1: 6}, start, {0: 1.0, 1: 1.0})
    np.testing.assert_allclose(weight, wanted[-1], atol=1e-5)


def test_a_cluster_by_hand(cluster: Cluster, tmp_path: Path) -> None:
    """Two parties, one of which ends before the other, on two roots."""
    cluster.environment = {
        "OUT": str(tmp_path / "w{rank}.npz"), "GEOMX_ALGO": "diloco", "PUSH": "differences", "SIZES": "3000",
        "OPTIMIZER": json.dumps(["nag", {"learning_rate": RATE, "momentum": MOMENTUM}]), "WEIGHTS": "1,3",
        "MXNET_KVSTORE_BIGARRAY_BOUND": "1024",
    }  # fmt: skip
    cluster.each = {"Aw0": {"ROUNDS": "6"}, "Bw0": {"ROUNDS": "4"}}
    cluster.launch([sys.executable, str(SCRIPTS / "averages.py")], parties=(1, 1), roots=2)
    cluster.finish()
    start = np.random.default_rng(1000).standard_normal(3000).astype(np.float32)
    wanted = plain({0: 6, 1: 4}, start, {0: 1.0, 1: 3.0})
    for rank, count in ((0, 6), (1, 4)):
        found = np.load(tmp_path / f"w{rank}.npz")["t0"]
        assert found.shape == (count + 1, 3000)
        np.testing.assert_allclose(found[1:], wanted[:count], atol=1e-5)


def streaming(steps: Sequence[int], inner: int, fragments: int, overlap: int, mix: float) -> tuple[list[Array], Array]:
    """Each worker's weights after each of its steps, and the final global ones; all in fp64.

    Workers with equal numbers of steps proceed side by side.
    """
    sizes, mix = (6, 3, 4), mix if overlap else 0.0
    tensors = [[index for index in range(3) if index % fragments == turn] for turn in range(fragments)]
    world = [np.ones(size) for size in sizes]
    velocity = [np.zeros(size) for size in sizes]
    origin, own, pushed = ([[item.copy() for item in world] for _ in steps] for _ in range(3))
    under_way: list[tuple[int, int]] = []
    history: list[list[Array]] = [[] for _ in steps]
    turn, since = 0, [0] * fragments

    def exchange(fragment: int) -> None:
        since[fragment] = 0
        for index in tensors[fragment]:
            for rank in range(len(steps)):
                pushed[rank][index] = own[rank][index].copy()
            mean = np.mean([origin[rank][index] - own[rank][index] for rank in range(len(steps))], axis=0)
            velocity[index] = MOMENTUM * velocity[index] + mean
            world[index] = world[index] - RATE * (mean + MOMENTUM * velocity[index])

    def take(fragment: int) -> None:
        for index in tensors[fragment]:
            for rank in range(len(steps)):
                origin[rank][index] = world[index].copy()
                steps_since = own[rank][index] - pushed[rank][index]
                own[rank][index] = mix * pushed[rank][index] + (1 - mix) * world[index] + steps_since

    for number in range(steps[0]):
        for rank in range(len(steps)):
            for index, size in enumerate(sizes):
                own[rank][index] -= INNER_RATE * (own[rank][index] - goal(rank, number, index, size))
        since = [count + 1 for count in since]
        under_way = [(fragment, left - 1) for fragment, left in under_way]
        if (number + 1) % (inner // fragments) == 0:
            exchange(turn)
            under_way.append((turn, overlap))
            turn = (turn + 1) % fragments
        for fragment, _ in [item for item in under_way if item[1] == 0]:
            take(fragment)
        under_way = [item for item in under_way if item[1] > 0]
        for rank, past in enumerate(history):
            past.append(np.concatenate(own[rank]))
    for fragment, _ in under_way:
        take(fragment)
    while any(since):
        exchange(turn)
        take(turn)
        turn = (turn + 1) % fragments
    return [np.array(past) for past in history], np.concatenate(world)


def test_streaming(cluster: Cluster, tmp_path: Path) -> None:
    """The bundled worker part with MXNet's arrays, in a flat cluster of two; an exchange is pending at the end."""
    inner, fragments, overlap, mix, steps = 4, 2, 1, 0.25, 12
    cluster.environment = {
        "OUT": str(tmp_path / "w{rank}.npz"), "STEPS": f"{steps},{steps}", "GEOMX_ALGO": "diloco",
        "GEOMX_LR": str(INNER_RATE), "GEOMX_MOMENTUM": "0", "GEOMX_OUTER_LR": str(RATE),
        "GEOMX_OUTER_MOMENTUM": str(MOMENTUM), "GEOMX_INNER_STEPS": str(inner), "GEOMX_FRAGMENTS": str(fragments),
        "GEOMX_OVERLAP": str(overlap), "GEOMX_MIX": str(mix),
    }  # fmt: skip
    ranks = {f"w{rank}": {"GEOMX_RANK": str(rank)} for rank in range(2)}
    script = [sys.executable, str(SCRIPTS / "inner_steps.py")]
    cluster.launch_flat(script, workers=2, worker_env=ranks)
    cluster.finish()
    history, final = streaming([steps, steps], inner, fragments, overlap, mix)
    finals = []
    for rank in range(2):
        found = np.load(tmp_path / f"w{rank}.npz")
        np.testing.assert_allclose(found["history"], history[rank], atol=2e-6)
        np.testing.assert_allclose(found["final"], final, atol=2e-6)
        finals.append(found["final"].tobytes())
    assert finals[0] == finals[1], "both end with one model"
