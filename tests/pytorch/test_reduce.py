"""`--reduce torch`: a party's workers add gradients by torch.distributed, and one exchanges with the servers."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster import ROOT, until
from reference import Dense
from test_local_steps import Nesterov, Replicas
from workers import SCRIPTS

from geomx_cli.core.errors import TimedOut
from geomx_cli.plan.ports import free_ports
from geomx_cli.runtime.frontends.torch.party.group import PartyGroup
from geomx_cli.runtime.settings import Settings

PARTIES = ((0, 1), (2, 3))


class Launched:
    """A job of 2 parties of 2 workers that runs a script of scripts/ on this machine."""

    def __init__(self, folder: Path, script: str, *arguments: str, options: tuple[str, ...] = ()) -> None:
        self.folder = folder
        own = {name: text for name, text in os.environ.items() if not name.startswith(("DMLC_", "GEOMX_"))}
        env = {**own, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, SCRIPTS))), "PYTHONWARNINGS": "ignore"}
        words = ["launch", "--local", "--json", "--reduce", "torch", "--job-dir", str(folder / "job"), *options]
        argv = [sys.executable, "-m", "geomx_cli", *words, "--", "python", str(SCRIPTS / script), *arguments]
        self.process = subprocess.Popen(
            argv, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def end(self, limit: float = 170.0) -> dict[str, Any]:
        """The result of the job."""
        said, self.errors = self.process.communicate(timeout=limit)
        found: dict[str, Any] = json.loads(said) if said else {}
        return found

    @property
    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("job/logs/*worker*.log")))

    def pid(self, process: str) -> int | None:
        """Of a worker's script, once it runs."""
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                variables = path.read_bytes().split(b"\0")
            except OSError:
                continue
            wanted = {f"GEOMX_PROCESS={process}", f"GEOMX_JOB_DIR={self.folder}/job"}
            if {text.encode() for text in wanted} <= set(variables):
                return int(path.parent.name)
        return None

    def saved(self, count: int = 4) -> list[dict[str, Any]]:
        """What the workers have saved, by global rank."""
        return [dict(np.load(self.folder / f"{rank}.npz")) for rank in range(count)]


def check(job: Launched, wanted: Any) -> list[dict[str, Any]]:
    """All workers have the same weights, equal to these."""
    assert job.end().get("status") == "done", (job.errors, job.logs)
    assert "was not the same here" not in job.logs
    found = job.saved()
    vectors = [np.concatenate([one["weight"].reshape(-1), one["bias"]]) for one in found]
    assert all(np.array_equal(vector, vectors[0]) for vector in vectors)
    np.testing.assert_allclose(vectors[0], wanted, rtol=1e-5, atol=1e-6)
    return found


@pytest.mark.processes
def test_fsa_gives_what_it_gives_with_servers_in_the_party(tmp_path: Path) -> None:
    """Workers may take different numbers of steps: the mean is that of those that still train."""
    counts = (9, 4, 7, 8)
    job = Launched(tmp_path, "steps.py", *map(str, counts))
    alone = Dense()
    for step in range(9):
        alone.step([rank for rank, steps in enumerate(counts) if step < steps], step)
    found = check(job, alone.vector)
    assert [len(one["gradients"]) for one in found] == list(counts)
    for rank in range(4):
        assert np.array_equal(found[rank]["gradients"][:4], found[0]["gradients"][:4])
    log = (tmp_path / "job" / "events" / "A-worker-1.jsonl").read_text()
    events = [json.loads(line) for line in log.splitlines()]
    assert [event.get("round", 0) for event in events if event["event"] == "telemetry"][-1] == 9
    assert (events[-1]["event"], events[-1]["contribution"]) == ("finished", "rounds")


@pytest.mark.processes
def test_what_scripts_do_in_their_loops(tmp_path: Path) -> None:
    """See scripts/features.py, which compares with training in one process."""
    job = Launched(tmp_path, "features.py", options=("--parties", "1", "--workers", "2"))
    assert job.end().get("status") == "done", (job.errors, job.logs)
    first, second = job.saved(2)
    assert not set(first.pop("part")) & set(second.pop("part")) and len(first.pop("drawn")) == len(second.pop("drawn"))
    assert len(first) == 6 and all(np.array_equal(first[name], second[name]) for name in first), first.keys()


@pytest.mark.processes
@pytest.mark.parametrize(("parties", "workers"), [("1", "2"), ("2", "1")])
def test_several_models_in_one_pass(tmp_path: Path, parties: str, workers: str) -> None:
    """See scripts/several.py: gradients that arrive in another order in each worker, of a party or of two."""
    job = Launched(tmp_path, "several.py", options=("--parties", parties, "--workers", workers))
    assert job.end().get("status") == "done", (job.errors, job.logs)
    first, second = job.saved(2)
    assert len(first) == 3 and all(np.array_equal(first[name], second[name]) for name in first), first.keys()


@pytest.mark.processes
@pytest.mark.parametrize("algorithm", ["fsa", "hfa"])
def test_workers_with_the_same_batches_are_warned_of(tmp_path: Path, algorithm: str) -> None:
    """Those of all parties, once."""
    job = Launched(tmp_path, "alone.py", "wrapped", options=("--algo", algorithm))
    assert job.end().get("status") == "done", (job.errors, job.logs)
    assert job.logs.count("workers 0, 1, 2, 3 train on the same batches") == 1, job.logs


@pytest.mark.processes
def test_gloo_ends_before_the_interpreter(tmp_path: Path) -> None:
    """Its threads drop tensors; while Python shuts down, that aborts the process."""
    job = Launched(tmp_path, "threads.py", options=("--parties", "1", "--workers", "2"))
    assert job.end().get("status") == "done", (job.errors, job.logs)
    assert job.logs.count("at exit: []") == 2, job.logs


@pytest.mark.processes
@pytest.mark.parametrize("steps", ["8", "4"])
def test_a_script_may_go_on_after_a_failed_pass(tmp_path: Path, steps: str) -> None:
    """In the fourth step. Both end with the model of the one that takes all steps, the last one too."""
    options = ("--parties", "1", "--workers", "2")
    job = Launched(tmp_path, "context.py", "Training", steps, "fails", options=options)
    assert job.end().get("status") == "done", (job.errors, job.logs)
    assert "the loop has ended" in job.logs and "was not the same here" not in job.logs, job.logs
    with np.load(tmp_path / "0.npz") as first, np.load(tmp_path / "1.npz") as second:
        assert np.array_equal(first["weight"], first["last"]) and np.array_equal(second["weight"], first["last"])


@pytest.mark.processes
def test_hfa_takes_a_party_for_one_worker(tmp_path: Path) -> None:
    options = ("--algo", "hfa", "--k1", "3", "--k2", "2")
    job = Launched(tmp_path, "steps.py", "12", options=options)
    replicas = Replicas(2)
    milestone = replicas.models[0].vector
    for round_ in range(2):
        for number, ranks in enumerate(PARTIES):
            for step in range(6):
                replicas.models[number].step(list(ranks), 6 * round_ + step)
        milestone = replicas.mean(range(2))
        replicas.put(range(2), milestone)
    check(job, milestone)


@pytest.mark.processes
def test_diloco_with_workers_that_end_early(tmp_path: Path) -> None:
    """Its leader ends first: the other worker's weights are exchanged."""
    options = ("--algo", "diloco", "--inner-steps", "4")
    counts = (6, 10, 10, 10)
    job = Launched(tmp_path, "steps.py", *map(str, counts), options=options)
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


@pytest.mark.processes
def test_a_killed_worker_that_is_no_member_fails_the_job_by_name(tmp_path: Path) -> None:
    job = Launched(tmp_path, "breaks.py", "killed")
    until((tmp_path / "ready").exists, state=lambda: job.logs)
    victim = job.pid("A/worker:1")
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    result = job.end()
    assert result["status"] == "failed" and job.process.returncode == 1, (job.errors, job.logs)
    found = result["failure"]
    assert (found["process"], found["cause"]) == ("A/worker:1", "was killed by SIGKILL"), job.errors
    said = re.findall(r"^PeerLost: (.*) \|", job.logs, re.MULTILINE)
    assert any(line.startswith("another worker of party A has ended") for line in said), job.logs


@pytest.mark.processes
def test_models_that_differ_within_a_party_are_refused(tmp_path: Path) -> None:
    job = Launched(tmp_path, "breaks.py", "shape")
    assert job.end()["status"] == "failed", (job.errors, job.logs)
    assert "A/worker:1" in job.errors and "tensor weight is trained, float32 of shape (6, 12) here" in job.errors


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
