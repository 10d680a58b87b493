"""`--reduce torch --shards`: models that fully_shard divides in each party, whose shards cross to the servers."""

import json
import os
import re
import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from desk import Desk
from forked_launch import ForkedLaunch
from rehearsal import Rehearsal
from test_local_steps import Nesterov
from test_reduce import PARTIES, settings
from whole import Alone, Deep
from workers import SCRIPTS, rehearsed, saved

from geomx_cli.core.errors import InvalidSettings, PeerLost, TrainingFailed
from geomx_cli.runtime.frontends.torch.model_state import check_layout
from geomx_cli.runtime.frontends.torch.party_group import PartyGroup
from geomx_cli.runtime.frontends.torch.shard_reduction import check_same_round

SHARDS = ("--shards", "2")


def check(job: Rehearsal, wanted: Any, ranks: tuple[int, ...] = (0, 2)) -> None:
    """The parties whose first workers have these ranks have the same weights, equal to these; all have one buffer."""
    job.finish()
    assert "was not the same here" not in job.logs
    found = [saved(job.directory.parent, rank) for rank in ranks]
    names = [name for name, _ in Deep().named_parameters()]
    vectors = [np.concatenate([one[name].reshape(-1) for name in names]) for one in found]
    assert all(np.array_equal(vector, vectors[0]) for vector in vectors)
    assert all(np.array_equal(one["shift"], Deep(seed=0).shift) for one in found)
    np.testing.assert_allclose(vectors[0], wanted, rtol=1e-4, atol=1e-6)


def test_fsa_continues_a_training_in_one_process(desk: Desk) -> None:
    """From a checkpoint, clipped by the norm over all shards, with gradients accumulated over two passes, and with a
    party that ends before the other, whose model it then gets.
    """
    alone = Alone(20)
    for step in range(20):
        alone.step((0, 1, 2, 3) if step < 17 else (0, 1), step, clip=0.5)
        if step == 9:
            torch.save(alone.checkpoint, desk.folder / "checkpoint.pt")
    check(rehearsed(desk, "sharded.py", "10,7", "resume", options=SHARDS), alone.vector)


def test_diloco_takes_a_party_for_one_worker(desk: Desk) -> None:
    """As with `--reduce torch` and undivided models; both parties have as many samples."""
    parties = [Alone(10), Alone(10)]
    now = parties[0].vector
    outer = Nesterov(now.size)
    for first, last in ((0, 4), (4, 8), (8, 10)):
        for party, ranks in zip(parties, PARTIES, strict=True):
            for step in range(first, last):
                party.step(ranks, step)
        now = outer.step(now, now - np.mean([party.vector for party in parties], axis=0))
        for party in parties:
            party.vector = now
    options = ("--algo", "diloco", "--inner-steps", "4", "--weight", "samples", *SHARDS)
    check(rehearsed(desk, "sharded.py", "10", options=options), now)


@pytest.mark.parametrize("algorithm", [("fsa",), ("hfa", "--k1", "3", "--k2", "2")], ids=lambda words: words[0])
def test_replicas_of_the_shards_follow_their_leaders(desk: Desk, algorithm: tuple[str, ...]) -> None:
    """HSDP: 2 copies of 2 shards, in one party."""
    alone = Alone(6)
    for step in range(6):
        alone.step((0, 1, 2, 3), step)
    options = ("--parties", "1", "--workers", "4", *SHARDS, "--algo", *algorithm)
    check(rehearsed(desk, "sharded.py", "6", "replicas", options=options), alone.vector, ranks=(0,))


def test_a_killed_worker_of_a_shard_fails_the_job_by_name(desk: Desk) -> None:
    words = ("--local", "--json", "--reduce", "torch", "--parties", "1", *SHARDS, "--timeout", "120s")
    script = str(SCRIPTS / "sharded.py")
    job = ForkedLaunch.begin(desk, *words, "--", "python", script, "20", "stop", imported="torch")
    job.wait_for(lambda: all((desk.folder / f"ready-{rank}").exists() for rank in range(2)), 120)
    os.kill(job.pid("A/worker:1"), signal.SIGKILL)
    assert job.finish() == 1
    assert json.loads(job.output)["status"] == "failed" and "it was killed by SIGKILL" in job.errors, job.errors
    assert "A/worker:1" in job.errors and "RuntimeError" not in job.errors, job.errors


def test_another_number_of_shards_than_the_job_s_is_refused(desk: Desk) -> None:
    job = rehearsed(desk, "sharded.py", "2", "mesh", options=("--parties", "1", *SHARDS))
    cause = job.failure()
    assert "parameter scale is divided into 1 shards, in a job with --shards 2" in cause.cause, (cause, job.logs)


def test_only_what_ends_a_group_is_laid_to_another_worker() -> None:
    group = PartyGroup(replace(settings(1), rendezvous=()))
    lost = group.lost(RuntimeError("[tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:55466"))
    assert isinstance(lost, PeerLost) and lost.message == "another worker of party A has ended"
    late = group.lost(RuntimeError("Timed out waiting 300000ms for recv operation to complete"))
    assert isinstance(late, PeerLost) and late.message.startswith("another worker of party A has ended, or is out of")
    assert group.lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None


def test_shards_of_different_rounds_are_an_error() -> None:
    other = 0
    party = cast(PartyGroup, SimpleNamespace(gather=lambda value, patient: [value, value + other]))
    check_same_round(party, 3, 4)
    other = 1
    with pytest.raises(TrainingFailed, match="different rounds: round 3 of 4 workers, round 3 of 5 workers"):
        check_same_round(party, 3, 4)


def divided(kinds: str, mesh: list[Any]) -> Any:
    """A parameter with these placements."""
    made = [type(kind, (), {"__repr__": lambda self: type(self).__name__})() for kind in kinds.split()]
    return SimpleNamespace(placements=made, device_mesh=SimpleNamespace(mesh=torch.tensor(mesh)))


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (torch.ones(3), "parameter w is not divided, in a job with --shards 2"),
        (divided("Shard", [0, 1, 2, 3]), "parameter w is divided into 4 shards, in a job with --shards 2"),
        (divided("Shard", [0, 1]), r"parameter w is placed as [Shard] on a mesh of shape (2,)"),
        (divided("Shard Shard", [[0, 1], [2, 3]]), r"parameter w is placed as [Shard, Shard] on a mesh"),
        (divided("Replicate _StridedShard", [[0, 1], [2, 3]]), r"parameter w is placed as [Replicate, _StridedShard]"),
        (divided("Replicate Shard", [[0, 2], [1, 3]]), r"parameter w is placed as [Replicate, Shard] on a mesh"),
    ],
)
def test_a_model_that_is_divided_otherwise_is_refused(parameter: Any, message: str) -> None:
    """In a party of 4 workers with 2 shards."""
    with pytest.raises(InvalidSettings, match=re.escape(message)):
        check_layout("w", parameter, 4, 2)
    check_layout("w", divided("Replicate Shard", [[0, 1], [2, 3]]), 4, 2)
