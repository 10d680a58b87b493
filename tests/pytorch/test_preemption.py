"""A job that is asked to stop: all workers of a script stop after the same step, save and end with status 0."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from desk import Desk, Launch
from workers import SCRIPTS

pytestmark = pytest.mark.processes

SCRIPT = str(SCRIPTS / "preempted.py")
FSA, DILOCO = ("--algo", "fsa"), ("--algo", "diloco", "--h", "1000")
PARTIES = ("--json", "--grace", "60s", "--parties", "2", "--workers", "2")


def to_agent(job: Launch) -> None:
    """SIGTERM to the agent."""
    (spec,) = job.desk.state_files("agent.json", job.id)
    os.kill(job.pid(f"agent {json.loads(spec.read_bytes())['host']}"), signal.SIGTERM)


def to_all(job: Launch) -> None:
    """SIGTERM to every process of the job, as at the end of a batch job or a machine."""
    for pid in job.pids():
        os.kill(pid, signal.SIGTERM)


def by_command(job: Launch) -> None:
    """`geomx stop`."""
    done = job.desk.geomx("stop")
    assert done.returncode == 0, done.stderr


Way = tuple[Callable[[Launch], object], str]
WAYS: dict[str, Way] = {
    "SIGTERM to a worker": (lambda job: os.kill(job.pid("B/worker:1"), signal.SIGTERM), "SIGTERM to B/worker:1"),
    "SIGTERM to a server": (lambda job: os.kill(job.pid("B/server:0"), signal.SIGTERM), "SIGTERM to B/server:0"),
    "SIGUSR1 to launch": (lambda job: job.process.send_signal(signal.SIGUSR1), "SIGUSR1"),
    "Ctrl-C": (lambda job: job.process.send_signal(signal.SIGINT), "Ctrl-C"),
    "SIGTERM to an agent": (to_agent, "SIGTERM to the agent on host "),
    "SIGTERM to all": (to_all, ""),
    "geomx stop": (by_command, "geomx stop"),
}


def trained(desk: Desk, way: Callable[[Launch], object], *words: str) -> Launch:
    """A job of four workers that was asked to stop while all train."""
    job = desk.train(*PARTIES, *words)
    job.wait_for(lambda: len(list(desk.folder.glob("trains-*"))) == 4 or job.process.poll() is not None)
    assert job.process.poll() is None, job.end()
    way(job)
    return job


def assert_stopped(job: Launch, by: str) -> None:
    """All workers have stopped after the same step, and launch tells that the job may be resumed."""
    assert job.finish() == 75, job.errors
    steps = {path.name: path.read_text() for path in job.desk.folder.glob("stopped-*")}
    assert len(steps) == 4 and len(set(steps.values())) == 1, steps
    result = json.loads(job.output)
    assert (result["status"], result["exit_code"], result["problems"]) == ("stopped", 75, [])
    assert f"was stopped by {by}" in result["error"]["message"]
    assert job.desk.json("status")["state"] == "stopped"
    job.wait_for(lambda: not job.pids())
    assert not list(job.desk.temporary.rglob("*.sock*")), "the files that tell of it are gone too"


@pytest.mark.parametrize(
    ("way", "algorithm"), [("SIGTERM to a worker", FSA), ("SIGUSR1 to launch", DILOCO)],
    ids=lambda part: part if isinstance(part, str) else part[1],
)  # fmt: skip
def test_all_workers_stop_after_the_same_step(desk: Desk, way: str, algorithm: tuple[str, ...]) -> None:
    ask, by = WAYS[way]
    assert_stopped(trained(desk, ask, *algorithm, "--", "python", SCRIPT), by)


@pytest.mark.thorough
@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("SIGTERM to a worker", "SIGUSR1 to launch")])
def test_whatever_asks_the_job_to_stop(desk: Desk, way: str) -> None:
    ask, by = WAYS[way]
    assert_stopped(trained(desk, ask, *FSA, "--", "python", SCRIPT), by)
