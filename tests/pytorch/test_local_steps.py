"""Algorithms that exchange weights after several steps of the script's own optimizer, compared with numpy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from reference import RATE, Dense
from workers import Workers

pytestmark = pytest.mark.processes


class Replicas:
    """One numpy model for each worker, which takes its own steps."""

    def __init__(self, count: int) -> None:
        self.models = [Dense() for _ in range(count)]
        self.taken = [0] * count

    def step(self, rank: int) -> None:
        self.models[rank].step([rank], self.taken[rank])
        self.taken[rank] += 1

    def mean(self, ranks: Sequence[int]) -> Any:
        return np.mean([self.models[rank].vector for rank in ranks], axis=0)

    def put(self, ranks: Sequence[int], vector: Any) -> None:
        for rank in ranks:
            self.models[rank].vector = vector.copy()


class Nesterov:
    """The outer optimizer of DiLoCo."""

    def __init__(self, size: int, rate: float = 0.7, momentum: float = 0.9) -> None:
        self.velocity, self.rate, self.momentum = np.zeros(size), rate, momentum

    def step(self, weights: Any, gradient: Any, part: Any = slice(None)) -> Any:
        self.velocity[part] = self.momentum * self.velocity[part] + gradient
        return weights - self.rate * (gradient + self.momentum * self.velocity[part])


def check(workers: Workers, count: int, wanted: Any) -> None:
    """All workers have the same weights, equal to these."""
    workers.finish()
    found = [workers.saved(rank) for rank in range(count)]
    vectors = [np.concatenate([one["weight"].reshape(-1), one["bias"]]) for one in found]
    for rank, vector in enumerate(vectors):
        np.testing.assert_array_equal(vector, vectors[0], f"worker {rank} has other weights than worker 0")
    np.testing.assert_allclose(vectors[0], wanted, rtol=1e-4, atol=1e-6)


def test_hfa(workers: Workers) -> None:
    """Party means after each 3 steps, global ones after 6; the last 2 steps are one more mean."""
    env = {"GEOMX_ALGO": "hfa", "MXNET_KVSTORE_HFA_K1": "3", "MXNET_KVSTORE_HFA_K2": "2"}
    workers.start("steps.py", "20", parties=(2, 1), env=env)
    parties = ((0, 1), (2,))
    replicas = Replicas(3)
    milestone = replicas.models[0].vector
    for round_, steps in enumerate((3, 3, 3, 3, 3, 3, 2, 0), 1):
        for rank in range(3):
            for _ in range(steps):
                replicas.step(rank)
        for party in parties:
            replicas.put(party, replicas.mean(party))
        if round_ % 2 == 0:
            differences = [replicas.mean(party) - milestone for party in parties]
            milestone = milestone + np.mean(differences, axis=0)
            replicas.put(range(3), milestone)
    check(workers, 3, milestone)
    assert list(workers.saved(0)["rounds"]) == [3, 6, 9, 12, 15, 18]


def test_a_step_that_a_scaler_skips_counts(workers: Workers) -> None:
    """In one worker alone: its rounds end with the others', though its optimizer has taken fewer steps. So collectives
    between the steps meet; with DistributedDataParallel, whose gradients are this worker's own.
    """
    env = {"GEOMX_ALGO": "hfa", "MXNET_KVSTORE_HFA_K1": "3", "MXNET_KVSTORE_HFA_K2": "1"}
    workers.start("scaled.py", parties=(1, 1), env=env)
    replicas = Replicas(2)
    for step in range(6):
        for rank in range(2):
            if (rank, step) != (1, 1):
                replicas.models[rank].step([rank], step)
        if step % 3 == 2:
            replicas.put(range(2), replicas.mean(range(2)))
    check(workers, 2, replicas.models[0].vector)
    assert list(workers.saved(0)["all_together"]) == [False, False, True] * 2


def test_sparse_gradients(workers: Workers) -> None:
    """They stay in their worker, whose weights count as those of a dense layer."""
    env = {"GEOMX_ALGO": "hfa", "MXNET_KVSTORE_HFA_K1": "2", "MXNET_KVSTORE_HFA_K2": "1"}
    workers.start("embedding.py", parties=(1, 1), env=env)
    workers.finish()
    wanted = np.zeros((6, 3))
    wanted[[0, 1]], wanted[5] = -0.2, -0.4
    for rank in range(2):
        np.testing.assert_allclose(workers.saved(rank)["weight"], wanted, rtol=0, atol=1e-6)


def test_diloco(workers: Workers) -> None:
    """Outer steps after each 5 inner ones; a worker with less data abstains from the last ones."""
    workers.start("steps.py", "20", "8", count=2, env={"GEOMX_ALGO": "diloco", "GEOMX_INNER_STEPS": "5"})
    replicas = Replicas(2)
    now = replicas.models[0].vector
    outer = Nesterov(now.size)
    for steps in ((5, 5), (5, 3), (5, 0), (5, 0)):
        for rank in range(2):
            for _ in range(steps[rank]):
                replicas.step(rank)
        contributors = [rank for rank in range(2) if steps[rank]]
        now = outer.step(now, now - replicas.mean(contributors))
        replicas.put(range(2), now)
    check(workers, 2, now)


def test_statistics_of_workers_that_take_no_step(workers: Workers) -> None:
    """See scripts/resumed.py."""
    env = {"GEOMX_ALGO": "hfa", "MXNET_KVSTORE_HFA_K1": "2", "MXNET_KVSTORE_HFA_K2": "1"}
    workers.start("resumed.py", parties=(1, 1), env=env)
    workers.finish()


@pytest.mark.parametrize("algorithm", ["hfa", "diloco"])
def test_who_brings_nan_is_said(workers: Workers, algorithm: str) -> None:
    """Once, in that worker, though all have it after the round."""
    rounds = {"MXNET_KVSTORE_HFA_K1": "2", "MXNET_KVSTORE_HFA_K2": "1", "GEOMX_INNER_STEPS": "2"}
    workers.start("damaged.py", parties=(1, 1), env={"GEOMX_ALGO": algorithm, **rounds})
    workers.finish()
    said = "warning: weight has elements that are not finite here in round 3, so the means"
    assert [workers.cluster.output(name).count(said) for name in ("Aw0", "Bw0")] == [0, 1], workers.cluster.outputs()
    assert "not finite" not in workers.cluster.output("Aw0")
    assert np.isnan(workers.saved(0)["weight"]).all()


@pytest.mark.parametrize("overlap", ["0", "1"])
def test_diloco_with_bfloat16_weights(workers: Workers, overlap: str) -> None:
    """What bfloat16 rounds is no step: after the only one, the weights are where its momentum takes them."""
    rounds = 30
    options = {"GEOMX_ALGO": "diloco", "GEOMX_INNER_STEPS": "2", "GEOMX_OVERLAP": overlap, "GEOMX_MIX": "0"}
    workers.start("half.py", str(2 * rounds), count=2, env=options)
    workers.finish()
    first, second = (workers.saved(rank) for rank in range(2))
    assert np.array_equal(first["weight"], second["weight"])
    wanted, outer = first["start"].astype(np.float64), Nesterov(first["start"].size)
    outer.velocity = outer.velocity.reshape(wanted.shape)
    step = first["start"] - first["stepped"]
    for round_ in range(rounds):
        wanted = outer.step(wanted, step if round_ == 0 else np.zeros_like(step))
    np.testing.assert_allclose(first["weight"], wanted, rtol=2**-8, atol=1e-6)


def test_diloco_in_fragments_that_overlap_with_steps(workers: Workers) -> None:
    """Weight and bias are exchanged in turn, each after 4 steps; the result is applied one step later, which stays."""
    options = {"GEOMX_INNER_STEPS": "4", "GEOMX_FRAGMENTS": "2", "GEOMX_OVERLAP": "1", "GEOMX_MIX": "0.5"}
    options["GEOMX_WEIGHT"] = "samples"  # equally many
    workers.start("steps.py", "20", count=2, env={"GEOMX_ALGO": "diloco", **options})
    replicas = Replicas(2)
    origin = replicas.models[0].vector
    outer = Nesterov(origin.size)
    size = replicas.models[0].weight.size
    parts = (slice(0, size), slice(size, None))
    turn, pending, pushed = 0, None, [model.vector for model in replicas.models]
    for step in range(1, 21):
        for rank in range(2):
            replicas.step(rank)
        if pending is not None:
            origin, turn = receive(replicas, origin, pending, parts[turn], 0.5, pushed), 1 - turn
            pending = None
        if step % 2 == 0:
            part = parts[turn]
            gradient = np.mean([origin[part] - model.vector[part] for model in replicas.models], axis=0)
            pending, pushed = outer.step(origin[part], gradient, part), [model.vector for model in replicas.models]
    assert pending is not None
    origin, turn = receive(replicas, origin, pending, parts[turn], 0.5, pushed), 1 - turn
    part, pushed = parts[turn], [model.vector for model in replicas.models]  # the weight has steps left to exchange
    gradient = np.mean([origin[part] - model.vector[part] for model in replicas.models], axis=0)
    origin = receive(replicas, origin, outer.step(origin[part], gradient, part), part, 0.0, pushed)
    check(workers, 2, origin)


def receive(replicas: Replicas, origin: Any, new: Any, part: slice, mix: float, pushed: Any) -> Any:
    """The new global weights, with which the workers continue."""
    origin = origin.copy()
    origin[part] = new
    for model, before in zip(replicas.models, pushed, strict=True):
        vector = model.vector
        vector[part] = new + mix * (before[part] - new) + (vector[part] - before[part])
        model.vector = vector
    return origin


def test_esync(workers: Workers) -> None:
    """The state server ends the rounds; each takes the steps that the workers had time for."""
    env = {"GEOMX_ALGO": "esync", "GEOMX_MIN_LOCAL_STEPS": "3", "GEOMX_GLOBAL_LR": "1"}
    workers.start("steps.py", "20", count=2, env=env)
    workers.finish()
    ends = [[*workers.saved(rank)["rounds"], 20] for rank in range(2)]
    assert all(3 <= end <= 20 for rank in range(2) for end in ends[rank])
    replicas = Replicas(2)
    now = replicas.models[0].vector
    for round_ in range(max(len(each) for each in ends)):
        contributors = []
        for rank in range(2):
            until = ends[rank][round_] if round_ < len(ends[rank]) else 20
            contributors += [rank] if until > replicas.taken[rank] else []
            while replicas.taken[rank] < until:
                replicas.step(rank)
        if contributors:
            now = replicas.mean(contributors)
            replicas.put(range(2), now)
    check(workers, 2, now)


def test_esync_while_workers_wait_in_collectives(workers: Workers) -> None:
    """A worker that waits takes part in the rounds of the others; each step counts once, and all end with one model."""
    workers.start("paced.py", count=2, env={"GEOMX_ALGO": "esync", "GEOMX_GLOBAL_LR": "1"})
    workers.finish()
    found = [workers.saved(rank) for rank in range(2)]
    now = found[0]["start"]
    rounds, contributed = (np.stack([one[key] for one in found], axis=1) for key in ("rounds", "contributed"))
    for differences, who in zip(rounds, contributed, strict=True):
        now = now - differences.sum(axis=0) / max(1, who.sum())
    for one in found:
        np.testing.assert_allclose(one["rounds"].sum(axis=0), one["taken"], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(np.concatenate([one["weight"].ravel(), one["bias"]]), now, rtol=1e-4, atol=1e-6)


def test_local(workers: Workers) -> None:
    """A single worker trains as without geomx."""
    workers.start("steps.py", "20", count=1, env={"GEOMX_ALGO": "local"})
    alone = Dense()
    for step in range(20):
        alone.step([0], step, RATE)
    check(workers, 1, alone.vector)


def test_a_single_worker_needs_no_finish(workers: Workers) -> None:
    workers.start("critic.py", count=1, env={"GEOMX_ALGO": "local"})
    workers.finish()
    assert "warning" not in workers.cluster.output("w0")
