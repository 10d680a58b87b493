"""A job that is asked to stop: all workers of a script stop after the same step, save and end with status 0."""

import json
import os
import signal
from collections.abc import Callable

import pytest
from cluster import until
from desk import Desk, Launch
from forked_launch import ForkedLaunch
from rehearsal import Rehearsal
from workers import SCRIPTS

pytestmark = pytest.mark.processes

SCRIPT = str(SCRIPTS / "preempted.py")
FSA, DILOCO = ("--algo", "fsa"), ("--algo", "diloco", "--inner-steps", "1000")
PARTIES = ("--parties", "2", "--workers")


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
    "SIGTERM to a worker": (lambda job: os.kill(job.pid("B/worker:0"), signal.SIGTERM), "SIGTERM to B/worker:0"),
    "SIGTERM to a server": (lambda job: os.kill(job.pid("B/server:0"), signal.SIGTERM), "SIGTERM to B/server:0"),
    "SIGUSR1 to launch": (lambda job: job.process.send_signal(signal.SIGUSR1), "SIGUSR1"),
    "Ctrl-C": (lambda job: job.process.send_signal(signal.SIGINT), "Ctrl-C"),
    "SIGTERM to an agent": (lambda job: os.kill(job.pid("agent B"), signal.SIGTERM), "SIGTERM to the agent on host B"),
    "SIGTERM to all": (to_all, ""),
    "geomx stop": (by_command, "geomx stop"),
}


def trained(desk: Desk, way: Callable[[Launch], object], workers: int, *words: str) -> Launch:
    """A job of two parties of so many workers, which was asked to stop while all train."""
    job = ForkedLaunch.begin(desk, "--json", "--grace", "60s", *PARTIES, str(workers), *words, imported="torch")
    job.wait_for(lambda: len(list(desk.folder.glob("trains-*"))) == 2 * workers or job.process.poll() is not None)
    assert job.process.poll() is None, job.end()
    way(job)
    return job


def assert_stopped(job: Launch, by: str) -> list[str]:
    """All workers have stopped, and launch tells that the job may be resumed; returns after how many steps, by rank."""
    assert job.finish() == 75, job.errors
    steps = [path.read_text() for path in sorted(job.desk.folder.glob("stopped-*"))]
    result = json.loads(job.output)
    assert (result["status"], result["exit_code"], result["problems"]) == ("stopped", 75, [])
    assert f"was stopped by {by}" in result["error"]["message"]
    assert job.desk.json("status")["state"] == "stopped"
    job.wait_for(lambda: not job.pids())
    assert not list(job.desk.temporary.rglob("*.sock*")), "the files that tell of it are gone too"
    return steps


def test_all_workers_stop_after_the_same_step_and_a_handler_of_the_script_stays(desk: Desk) -> None:
    ask, by = WAYS["SIGTERM to a worker"]
    steps = assert_stopped(trained(desk, ask, 2, *FSA, "--", "python", SCRIPT, "handles"), by)
    assert len(steps) == 4 and len(set(steps)) == 1
    assert [path.name for path in desk.folder.glob("handled-*")] == ["handled-2"], "where the signal came"


def test_all_workers_stop_in_the_middle_of_a_long_round(desk: Desk) -> None:
    ask, by = WAYS["SIGUSR1 to launch"]
    steps = assert_stopped(trained(desk, ask, 1, *DILOCO, "--", "python", SCRIPT), by)
    assert len(steps) == 2 and len(set(steps)) == 1 and int(steps[0]) < 1000


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["SIGTERM to a server", "SIGTERM to an agent", "SIGTERM to all", "geomx stop"])
def test_whatever_asks_the_job_to_stop(desk: Desk, way: str) -> None:
    ask, by = WAYS[way]
    steps = assert_stopped(trained(desk, ask, 1, *FSA, "--", "python", SCRIPT), by)
    assert len(steps) == 2 and len(set(steps)) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("words", ["--algo hfa --k1 3 --k2 4", "--algo mixed", "--reduce torch --shards 2", "ddp"])
def test_with_whatever_algorithm_and_members(desk: Desk, words: str) -> None:
    options = [] if words == "ddp" else words.split()
    given = ["ddp"] * (words == "ddp") + ["divides"] * ("--shards" in words)
    command = ("--local", "--job-dir", "job", *PARTIES, "2", *options, "--", "python", SCRIPT, *given)
    job = Rehearsal(desk, *command, imported="torch")
    until(lambda: len(list(desk.folder.glob("trains-*"))) == 4, state=lambda: job.logs)
    os.kill(job.processes["B/worker:0"].pid, signal.SIGTERM)
    job.finish()
    steps = [path.read_text() for path in sorted(desk.folder.glob("stopped-*"))]
    assert len(steps) == 4 and len(set(steps[:2])) == len(set(steps[2:])) == 1
    assert len(set(steps)) == 1 or "mixed" in words, "whose parties take steps of their own"
