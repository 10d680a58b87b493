"""`--reduce torch`: a party's workers add gradients by torch.distributed, and one exchanges with the servers."""

import json
import os
import re
import signal
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from desk import Desk
from forked_launch import ForkedLaunch
from reference import Dense
from rehearsal import Rehearsal
from test_local_steps import Nesterov, Replicas
from workers import SCRIPTS, rehearsed, saved

from geomx_cli.contract.settings import Settings
from geomx_cli.core.errors import TimedOut
from geomx_cli.hosts.ports import free_ports
from geomx_cli.runtime.frontends.torch.party_group import PartyGroup

PARTIES = ((0, 1), (2, 3))


def check(job: Rehearsal, wanted: Any) -> list[dict[str, Any]]:
    """All workers have the same weights, equal to these."""
    job.finish()
    assert "was not the same here" not in job.logs
    found = [saved(job.directory.parent, rank) for rank in range(4)]
    vectors = [np.concatenate([one["weight"].reshape(-1), one["bias"]]) for one in found]
    assert all(np.array_equal(vector, vectors[0]) for vector in vectors)
    np.testing.assert_allclose(vectors[0], wanted, rtol=1e-5, atol=1e-6)
    return found


def test_fsa_gives_what_it_gives_with_servers_in_the_party(desk: Desk) -> None:
    """Workers may take different numbers of steps: the mean is that of those that still train."""
    counts = (9, 4, 7, 8)
    job = rehearsed(desk, "steps.py", *map(str, counts))
    alone = Dense()
    for step in range(9):
        alone.step([rank for rank, steps in enumerate(counts) if step < steps], step)
    found = check(job, alone.vector)
    assert [len(one["gradients"]) for one in found] == list(counts)
    for rank in range(4):
        assert np.array_equal(found[rank]["gradients"][:4], found[0]["gradients"][:4])
    log = (job.directory / "events" / "A-worker-1.jsonl").read_text()
    events = [json.loads(line) for line in log.splitlines()]
    assert [event.get("round", 0) for event in events if event["event"] == "telemetry"][-1] == 9
    assert (events[-1]["event"], events[-1]["contribution"]) == ("finished", "rounds")


def test_what_scripts_do_in_their_loops(desk: Desk) -> None:
    """See scripts/features.py, which compares with training in one process."""
    job = rehearsed(desk, "features.py", options=("--parties", "1", "--workers", "2"))
    job.finish()
    first, second = (saved(desk.folder, rank) for rank in range(2))
    assert not set(first.pop("part")) & set(second.pop("part")) and len(first.pop("drawn")) == len(second.pop("drawn"))
    assert len(first) == 6 and all(np.array_equal(first[name], second[name]) for name in first), first.keys()


@pytest.mark.parametrize(("parties", "workers"), [("1", "2"), ("2", "1")])
def test_several_models_in_one_pass(desk: Desk, parties: str, workers: str) -> None:
    """See scripts/several.py: gradients that arrive in another order in each worker, of a party or of two."""
    job = rehearsed(desk, "several.py", options=("--parties", parties, "--workers", workers))
    job.finish()
    first, second = (saved(desk.folder, rank) for rank in range(2))
    assert len(first) == 4 and all(np.array_equal(first[name], second[name]) for name in first), first.keys()


@pytest.mark.parametrize("algorithm", ["fsa", "hfa"])
def test_workers_with_the_same_batches_are_warned_of(desk: Desk, algorithm: str) -> None:
    """Those of all parties, once."""
    job = rehearsed(desk, "alone.py", "wrapped", options=("--algo", algorithm))
    job.finish()
    assert job.logs.count("workers 0, 1, 2, 3 train on the same batches") == 1, job.logs


def test_gloo_ends_before_the_interpreter(desk: Desk) -> None:
    """Its threads drop tensors; while Python shuts down, that aborts the process."""
    job = rehearsed(desk, "threads.py", options=("--parties", "1", "--workers", "2"))
    job.finish()
    assert job.logs.count("at exit: []") == 2, job.logs


@pytest.mark.parametrize("steps", ["8", "4"])
def test_a_script_may_go_on_after_a_failed_pass(desk: Desk, steps: str) -> None:
    """In the fourth step. Both end with the model of the one that takes all steps, the last one too."""
    options = ("--parties", "1", "--workers", "2")
    job = rehearsed(desk, "context.py", "Training", steps, "fails", options=options)
    job.finish()
    assert "the loop has ended" in job.logs and "was not the same here" not in job.logs, job.logs
    first, second = (saved(desk.folder, rank) for rank in range(2))
    assert np.array_equal(first["weight"], first["last"]) and np.array_equal(second["weight"], first["last"])


def test_hfa_takes_a_party_for_one_worker(desk: Desk) -> None:
    options = ("--algo", "hfa", "--k1", "3", "--k2", "2")
    job = rehearsed(desk, "steps.py", "12", options=options)
    replicas = Replicas(2)
    milestone = replicas.models[0].vector
    for round_ in range(2):
        for number, ranks in enumerate(PARTIES):
            for step in range(6):
                replicas.models[number].step(list(ranks), 6 * round_ + step)
        milestone = replicas.mean(range(2))
        replicas.put(range(2), milestone)
    check(job, milestone)


def test_diloco_with_workers_that_end_early(desk: Desk) -> None:
    """Its leader ends first: the other worker's weights are exchanged."""
    options = ("--algo", "diloco", "--inner-steps", "4")
    counts = (6, 10, 10, 10)
    job = rehearsed(desk, "steps.py", *map(str, counts), options=options)
    replicas = Replicas(2)
    now = replicas.models[0].vector
    outer = Nesterov(now.size)
    for first, last in ((0, 4), (4, 8), (8, 10)):
        for number, ranks in enumerate(PARTIES):
            for step in range(first, last):
                replicas.models[number].step([rank for rank in ranks if step < counts[rank]], step)
        now = outer.step(now, now - replicas.mean(range(2)))
        replicas.put(range(2), now)
    check(job, now)


def test_a_killed_worker_that_is_no_member_fails_the_job_by_name(desk: Desk) -> None:
    words = ("--local", "--json", "--reduce", "torch", "--parties", "1")
    job = ForkedLaunch.begin(desk, *words, "--", "python", str(SCRIPTS / "breaks.py"), "killed", imported="torch")
    job.wait_for((desk.folder / "ready").exists)
    os.kill(job.pid("A/worker:1"), signal.SIGKILL)
    assert job.finish() == 1
    found = json.loads(job.output)["failure"]
    assert (found["process"], found["cause"]) == ("A/worker:1", "was killed by SIGKILL"), job.errors
    log = (job.directory / "logs" / "A-worker-0.log").read_text()
    said = re.findall(r"^PeerLost: (.*) \|", log, re.MULTILINE)
    known = ("another worker of party A has ended", "A/worker:1 has ended")  # the latter once its agent has told
    assert any(line.startswith(known) for line in said), log


def test_models_that_differ_within_a_party_are_refused(desk: Desk) -> None:
    job = rehearsed(desk, "breaks.py", "shape")
    workers = {name: status for name, status in job.statuses().items() if "worker" in name}
    assert all(workers.values()), (workers, job.logs)
    cause = job.failure()
    assert cause.process == "A/worker:1", cause
    assert "tensor weight is trained, float32 of shape (6, 12) here" in cause.cause, cause


def settings(size: int, limit: float = 1.0) -> Settings:
    """Of the first worker of a party of so many."""
    place = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    options = {"timeout": limit, "patience": 60.0}
    return Settings(job="j", party="A", rank=0, group_size=size, rendezvous=(place, place), options=options)


def test_a_worker_that_does_not_join_its_party_is_named() -> None:
    group = PartyGroup(settings(3))
    with pytest.raises(TimedOut, match=r"waited 1 s for A/worker:1 and A/worker:2 to call geomx_cli\.torch\.init"):
        group.form(None)


def test_a_party_of_one_worker_needs_no_port() -> None:
    group = PartyGroup(replace(settings(1, 20.0), rendezvous=()))
    group.form(None)
    tensor = torch.ones(3)
    group.wait(group.add(tensor))
    assert tensor.tolist() == [1, 1, 1] and group.gather(7) == [7] and group.share_bytes(b"abc") == b"abc"
