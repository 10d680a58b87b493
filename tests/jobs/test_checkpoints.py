"""A job that was stopped goes on from its checkpoint, in another job, and ends with the bits of one that was not."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from desk import Desk
from forked_launch import ForkedLaunch
from idx import write_data

from geomx_cli.agent import agent_lock, processes

pytestmark = pytest.mark.processes

WORDS = ("--network", "linear", "--batch-size", "4", "--epochs", "2")


def parameters(directory: Path) -> set[str]:
    """The digests of the final weights."""
    lines = [line for path in directory.glob("events/*worker*.jsonl") for line in path.read_text().splitlines()]
    return {event["parameters"] for event in map(json.loads, lines) if event["event"] == "finished"}


def rounds(directory: Path) -> int:
    return sum(path.read_text().count('"event": "round"') for path in directory.glob("events/A-worker-0.jsonl"))


def test_a_stopped_job_goes_on_with_the_same_bits(desk: Desk, tmp_path: Path) -> None:
    options = "--algo fsa --compress bsc:0.05"  # whose residuals are in the servers
    words = [*WORDS, *options.split(), "--workers", "1", "--data-dir", str(write_data(tmp_path / "idx", 2 * 140, 64))]
    first, second = tmp_path / "first", tmp_path / "second"
    calm = ForkedLaunch.run(desk, "--job-dir", str(tmp_path / "calm"), *words, imported="geomx")
    assert calm.returncode == 0, calm.errors

    words += ["--wan", "40ms"]  # so that it is stopped in time
    stopped = ForkedLaunch.begin(desk, *words, "--checkpoint-every", "1s", "--job-dir", str(first), imported="geomx")
    stopped.wait_for(lambda: rounds(first) >= 10)
    stopped.process.terminate()
    assert stopped.finish() == 75
    assert re.search(r"geomx launch --resume \S+ goes on from its checkpoint", stopped.errors)
    for host in ("A", "central"):  # what somebody else has left, or a host that was switched off while it wrote
        folder = first / "hosts" / host / "checkpoints"
        newest = max(folder.iterdir(), key=lambda path: int(path.name))
        (folder / f"{int(newest.name) + 1}.part").mkdir()
        (folder / str(int(newest.name) + 2)).mkdir()
        (folder / "notes.txt").write_text("mine")

    resumed = ForkedLaunch.run(desk, "--resume", str(first), "--job-dir", str(second), imported="geomx")
    assert resumed.returncode == 0, resumed.errors
    assert "notes.txt" in resumed.errors and ".part" in resumed.errors and "skipped" in resumed.errors
    assert parameters(second) == parameters(tmp_path / "calm") != set()
    assert 0 < rounds(second) < rounds(tmp_path / "calm")
    assert not list(second.glob("hosts/*/checkpoints"))


def test_what_does_not_fit_is_refused(desk: Desk, tmp_path: Path) -> None:
    words = [*WORDS, "--data-dir", str(write_data(tmp_path / "idx", 4 * 16, 64)), "--job-dir", str(tmp_path / "done")]
    assert ForkedLaunch.run(desk, *words, imported="geomx").returncode == 0

    def refused(*more: str) -> Any:
        done = desk.geomx("launch", "--resume", str(tmp_path / "done"), *more)
        assert not list((tmp_path / "next").glob("*"))
        return done.returncode, done.stderr

    status, errors = refused("--job-dir", str(tmp_path / "next"))
    assert status == 3 and "has no whole checkpoint" in errors
    lock = agent_lock.lock(tmp_path / "done" / "hosts" / "A")  # as of an agent that goes on while launch was killed
    assert lock is not None
    agent_lock.name_holders(lock, [processes.identify(os.getpid())])
    status, errors = refused("--job-dir", str(tmp_path / "next"))
    os.close(lock)
    assert status == 3 and "still runs on host A" in errors and "geomx attach" in errors
    status, errors = refused("--algo", "diloco")
    assert status == 2 and "--algo with --resume" in errors
    status, errors = refused("--", "python", "other.py")
    assert status == 2 and "has run the bundled training" in errors
