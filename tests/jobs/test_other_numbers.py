"""A bundled job goes on from another one's model with other numbers of parties, workers and epochs."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from desk import Desk
from forked_launch import ForkedLaunch
from idx import write_data
from jobs.test_checkpoints import rounds
from safetensors.numpy import load_file

pytestmark = pytest.mark.processes

SAMPLES = 24 * 240


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(write_data(tmp_path / "idx", SAMPLES, 64))


def run(desk: Desk, directory: Path, *words: str, status: int = 0) -> dict[str, Any]:
    """Run a job to its end, and return its result."""
    job = ForkedLaunch.run(desk, "--job-dir", str(directory), "--json", *words, imported="geomx")
    assert job.returncode == status, job.errors
    return dict(json.loads(job.output))


def stopped_after(count: int, desk: Desk, directory: Path, *words: str) -> None:
    """Begin a job, and stop it after so many rounds."""
    job = ForkedLaunch.begin(desk, "--job-dir", str(directory), "--wan", "30ms", *words, imported="geomx")
    job.wait_for(lambda: rounds(directory) >= count)
    job.process.terminate()
    assert job.finish() == 75, job.errors


def weights(directory: Path) -> dict[str, np.ndarray]:
    (path,) = directory.glob("outputs/*/model.safetensors")
    return load_file(path)


def test_weights_and_the_optimizer_s_state_go_on(desk: Desk, tmp_path: Path, data: str) -> None:
    """With a round for each epoch, all workers' mean gradient is the same however the data are divided. So the oracle
    is the job that ran on: without the roots' momentum the weights would differ by far more than by rounding.
    """
    words = ["--network", "linear", "--data-dir", data, "--batch-size", str(SAMPLES // 4), "--topology", "spread"]
    begun, later, calm = tmp_path / "begun", tmp_path / "later", tmp_path / "calm"
    run(desk, begun, *words, "--epochs", "3")
    run(desk, calm, *words, "--epochs", "5")
    numbers = ["--parties", "1", "--workers", "4", "--global-servers", "2", "--topology", "central", "--epochs", "5"]
    result = run(desk, later, "--resume", str(begun), *numbers)
    assert result["rounds"] == 5
    assert sum(one["samples"] for one in result["data"].values()) == 5 * SAMPLES
    for name, wanted in weights(calm).items():
        got, before = weights(later)[name], weights(begun)[name]
        assert np.abs(got - wanted).max() < 1e-4 * np.abs(wanted - before).max(), name


def test_in_the_middle_of_an_epoch_and_of_the_rest_of_one(desk: Desk, tmp_path: Path, data: str) -> None:
    """2 x 2, then 3 x 1, of which a worker is killed, then 1 x 4 by HFA's own optimizers."""
    words = ["--network", "linear", "--data-dir", data, "--batch-size", "8", "--epochs", "1", "--algo", "hfa"]
    words += ["--k1", "1", "--k2", "1", "--optimizer", "adam", "--lr", "0.001"]
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    stopped_after(20, desk, first, *words)
    job = ForkedLaunch.begin(
        desk, "--job-dir", str(second), "--resume", str(first), "--parties", "3", "--workers", "1", imported="geomx"
    )
    job.wait_for(lambda: rounds(second) >= 10)
    state = json.loads((second / "hosts" / "B" / "agent-state.json").read_text())
    os.kill(state["processes"]["B/worker:0"][0], signal.SIGKILL)
    job.wait_for(lambda: rounds(second) >= 30)
    job.process.terminate()
    assert job.finish() == 75, job.errors
    assert "B/worker:0 was killed by SIGKILL; started again" in job.errors
    result = run(desk, third, "--resume", str(second), "--parties", "1", "--workers", "4")
    assert sum(one["samples"] for one in result["data"].values()) == SAMPLES
    assert {one["epoch"] for one in result["data"].values()} == {1}
    for directory in (first, second):
        ends = json.loads((directory / "state.json").read_text())["result"]["data"].values()
        assert all(one["epoch"] == 0 < one["batches"] for one in ends), "it was stopped within the epoch"
    manifests = [json.loads(next(job.glob("outputs/*/manifest.json")).read_text()) for job in (first, second, third)]
    assert [one["seconds"] for one in manifests] == sorted(one["seconds"] for one in manifests)
    optimizers = [load_file(next(job.glob("outputs/*worker*/optimizer.safetensors"))) for job in (first, second, third)]
    steps = [int(one["step"][0]) for one in optimizers]
    assert steps[0] < steps[1] < steps[2], "the worker's optimizer counts on"


def test_a_detached_job_that_nobody_followed_goes_on_and_is_removed(desk: Desk, tmp_path: Path, data: str) -> None:
    """What is needed comes from its agents' status."""
    words = ["--network", "linear", "--data-dir", data, "--batch-size", "8", "--epochs", "2", "--algo", "mixed"]
    first, second = tmp_path / "first", tmp_path / "second"
    job = ForkedLaunch.run(
        desk, "--detach", "--job-dir", str(first), "--wan", "20ms", *words, "--optimizer", "adam", imported="geomx"
    )
    assert job.returncode == 0, job.errors
    job.wait_for(lambda: rounds(first) >= 5)
    stopped = desk.geomx("stop", str(first))
    assert stopped.returncode == 0, stopped.stderr
    numbers = ["--workers", "1", "--topology", "flat"]
    result = run(desk, second, "--resume", str(first), *numbers)
    assert sum(one["samples"] for one in result["data"].values()) == 2 * SAMPLES
    removed = desk.geomx("jobs", "prune", result["job"], "--yes")
    assert removed.returncode == 0, removed.stderr
    assert not second.exists()


def test_a_running_job_is_scaled_in_one_step(desk: Desk, tmp_path: Path, data: str) -> None:
    """Numbers that cannot be leave it running. The sum of both jobs has each sample once."""
    words = ["--network", "linear", "--data-dir", data, "--batch-size", "8", "--epochs", "2"]
    first, second = tmp_path / "first", tmp_path / "second"
    job = ForkedLaunch.begin(desk, "--job-dir", str(first), "--wan", "20ms", *words, imported="geomx")
    job.wait_for(lambda: rounds(first) >= 5)
    for status, arguments, why in ((3, ["--workers", "0"], "out of range"), (2, ["--parties", "2"], "these numbers")):
        refused = desk.geomx("scale", str(first), *arguments)
        assert refused.returncode == status and why in refused.stderr, refused.stderr
    assert job.returncode is None
    scaled = desk.geomx("scale", str(first), "--parties", "3", "--workers", "1", "--job-dir", str(second))
    assert scaled.returncode == 0, scaled.stderr
    assert job.finish() == 75, job.errors
    assert "has stopped, after" in scaled.stderr and "finished" in scaled.stderr
    result = json.loads((second / "state.json").read_text())["result"]
    assert sum(one["samples"] for one in result["data"].values()) == 2 * SAMPLES
    assert set(result["data"]) == {f"{party}/worker:0" for party in "ABC"}
    ended = desk.geomx("scale", str(first), "--parties", "2")
    assert ended.returncode == 2 and "has ended" in ended.stderr and "geomx launch --resume" in ended.stderr


def test_what_cannot_go_on_is_refused(desk: Desk, tmp_path: Path, data: str) -> None:
    words = ["--network", "linear", "--data-dir", data, "--batch-size", "60", "--epochs", "1", "--workers", "1"]
    done, crashed = tmp_path / "done", tmp_path / "crashed"
    run(desk, done, *words)
    long = [*words, "--wan", "200ms", "--epochs", "50"]
    job = ForkedLaunch.begin(desk, "--job-dir", str(crashed), *long, imported="geomx")
    job.wait_for(lambda: rounds(crashed) >= 1)
    job.end()

    def refused(before: Path, *more: str) -> tuple[int, str]:
        done = desk.geomx("launch", "--resume", str(before), "--workers", "2", *more)
        return done.returncode, done.stderr

    status, errors = refused(crashed)
    assert status == 3 and "has not saved its model" in errors and "--resume without numbers" in errors
    status, errors = refused(done, "--epochs", "2", "--checkpoint-to", str(tmp_path / "store"))
    assert status == 2 and "--checkpoint-to in a job with other numbers" in errors
    status, errors = refused(done)
    assert status == 3 and "has trained all its 1 epoch" in errors and "--epochs 2" in errors
    (model,) = done.glob("outputs/*/model.safetensors")
    model.write_bytes(model.read_bytes()[:-1] + b"?")
    status, errors = refused(done, "--epochs", "2")
    assert status == 5 and "has saved is damaged: model.safetensors" in errors
