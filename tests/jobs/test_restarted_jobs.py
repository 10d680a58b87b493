"""A job whose servers are killed: what launch, status and the result tell, and that nothing is left."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import until
from desk import Desk, Launch

pytestmark = pytest.mark.processes
SERVER, SCHEDULER = "A/server:0", "central/global_scheduler:0"


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "desk")
    yield desk
    desk.close()


def kill(job: Launch, name: str) -> None:
    """Kill a process, and wait until its next life has begun."""
    before = job.pid(name)
    os.kill(before, signal.SIGKILL)
    job.wait_for(lambda: job.started(name) not in (0, before))


def test_killed_servers_do_not_end_the_job(desk: Desk) -> None:
    job = desk.launch("--json", story={"*": "wait"}).wait_until_running()
    for name in (SERVER, SERVER, SCHEDULER):
        kill(job, name)
    rows: dict[str, Any] = {}

    def told() -> bool:
        """Agents write restarts to their status within a second."""
        rows.update({row["name"]: row for row in desk.json("status")["processes"]})
        return [rows[name]["restarts"] for name in (SERVER, SCHEDULER, "A/worker:0")] == [2, 1, 0]

    until(told)
    assert rows[SERVER]["pid"] == job.pid(SERVER) and rows[SERVER]["status"] is None
    assert " restarts " in desk.geomx("status").stdout
    (job.directory / "go").touch()
    assert job.finish() == 0, job.errors
    assert json.loads(job.output)["restarts"] == {SERVER: 2, SCHEDULER: 1}
    for line in (
        f"{SERVER} was killed by SIGKILL; started again (1 of 3)",
        f"{SERVER} was killed by SIGKILL; started again (2 of 3)",
        f"{SCHEDULER} was killed by SIGKILL; started again (1 of 3)",
    ):
        assert job.errors.count(line) == 1, job.errors
    job.assert_clean()
    log = (job.directory / "logs" / "A-server-0.log").read_text()
    assert [line for line in log.splitlines() if line.startswith("-- ")] == [
        f"-- restarted by geomx: incarnation {number}, as it was killed by SIGKILL --" for number in (1, 2)
    ]


def test_restarted_server_is_not_the_cause_of_a_later_failure(desk: Desk) -> None:
    job = desk.launch("--json", story={"*": "wait", "A/worker:1": "fails"}).wait_until_running()
    kill(job, SERVER)
    (job.directory / "go").touch()
    assert job.finish() == 1, job.errors
    assert json.loads(job.output)["failure"]["process"] == "A/worker:1"
    job.assert_clean()


def test_death_after_the_last_restart_is_the_cause(desk: Desk) -> None:
    job = desk.launch("--json", "--restarts", "1", story={"*": "forever"}).wait_until_running()
    kill(job, SERVER)
    os.kill(job.pid(SERVER), signal.SIGKILL)
    assert job.finish() == 1, job.errors
    failure = json.loads(job.output)["failure"]
    assert (failure["process"], failure["cause"]) == (SERVER, "was killed by SIGKILL after 1 restart")
    job.assert_clean()


def test_stop_ends_a_job_with_restarted_servers(desk: Desk) -> None:
    job = desk.launch(story={"*": "family"}).wait_until_running()
    kill(job, SERVER)
    done = desk.geomx("stop")
    assert done.returncode == 0, done.stderr
    assert job.finish() == 130
    job.assert_clean()
