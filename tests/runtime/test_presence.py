"""What an agent has a scheduler told of processes that cannot do so themselves."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench import KeptLink
from cluster import clean_environment, free_ports

from geomx_cli.contract.config import PlaneSettings
from geomx_cli.contract.settings import Settings
from geomx_cli.core import plugins
from geomx_cli.core.conventions import module_command
from geomx_cli.core.errors import GeomxError, PeerLost
from geomx_cli.core.event_log import EventLog
from geomx_cli.core.options import defaults
from geomx_cli.ps.cluster.bodies import MAX_AWAITED
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.cluster.scheduler import Scheduler
from geomx_cli.ps.net.lanes import LinkHealth
from geomx_cli.ps.net.wire import BadMessage

pytestmark = pytest.mark.processes


class Plane:
    """A scheduler that waits for a server and workers, and what agents run in the name of A/worker:0."""

    def __init__(self, folder: Path, silence: float = 3.0, workers: int = 2) -> None:
        (port,) = free_ports(1)
        plane = PlaneSettings("127.0.0.1", port, 1, workers)
        self.common: dict[str, Any] = {
            "local": plane, "job": "j", "job_dir": str(folder), "party": "A", "supervised": True,
            "options": {**defaults(), "silence": silence, "timeout": 1.0},
        }  # fmt: skip
        self.ended, self.started = list[GeomxError](), list[subprocess.Popen[bytes]]()
        self.bind = (f"tcp://127.0.0.1:{port}",)
        self.start()

    def start(self, incarnation: int = 0) -> None:
        """Start the scheduler."""
        process, plane = "A/scheduler:0", self.common["local"]
        own = Settings(
            role="scheduler", process=process, bind=self.bind, incarnation=incarnation, **self.common
        )  # fmt: skip
        self.scheduler = Scheduler(own, plane, EventLog(None))
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.scheduler.run()
        except GeomxError as error:
            self.ended.append(error)

    def speak(self, *arguments: str) -> subprocess.Popen[bytes]:
        worker = Settings(role="worker", process="A/worker:0", rank=0, host="b", **self.common)
        command = module_command(sys.executable, "geomx_cli.runtime.presence", *arguments)
        env = {**clean_environment(), **worker.to_environment(plugins.table())}
        self.started.append(subprocess.Popen(command, env=env, stdin=subprocess.PIPE))
        return self.started[-1]

    def stay(self, *processes: str) -> subprocess.Popen[bytes]:
        process = self.speak("stay", *processes)
        self.wait_for(process, *processes)
        return process

    def wait_for(self, process: subprocess.Popen[bytes], *processes: str) -> None:
        """Wait until the scheduler knows that these are awaited."""
        while not any(host.awaited == set(processes) for host in self.scheduler._hosts.values()):
            assert self.thread.is_alive() and process.poll() is None
            time.sleep(0.02)

    def error(self) -> GeomxError:
        self.thread.join(240)
        (error,) = self.ended
        return error

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()
        self.scheduler.node.loop.submit(self.scheduler.node.loop.stop)
        self.thread.join(240)


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    made = Plane(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("verb", ["fail", "absent"])
def test_a_worker_that_died_before_it_joined_ends_the_wait_for_it(plane: Plane, verb: str) -> None:
    assert plane.speak(verb, "was killed by SIGKILL", "see dmesg").wait(240) == 0
    error = plane.error()
    assert isinstance(error, PeerLost)
    assert (error.message, error.hint, error.peer) == ("A/worker:0 was killed by SIGKILL", "see dmesg", "A/worker:0")


def test_a_host_that_is_lost_before_its_processes_joined_is_named(plane: Plane) -> None:
    plane.stay("A/worker:0", "A/worker:1", "A/server:0").kill()
    error = plane.error()
    assert isinstance(error, PeerLost) and error.peer == "A/worker:0"
    assert error.message == "host b of A/worker:0 has been silent for 3 s, and 3 processes there had not joined"


@pytest.mark.timeout(60)
def test_a_scheduler_that_was_restarted_is_told_again(tmp_path: Path) -> None:
    plane, awaited = Plane(tmp_path, silence=60.0), ("A/worker:0", "A/worker:1")
    try:
        process = plane.stay(*awaited)
        plane.scheduler.node.loop.submit(plane.scheduler.node.loop.stop)
        plane.thread.join()
        plane.start(1)
        plane.wait_for(process, *awaited)
    finally:
        plane.close()


@pytest.mark.timeout(60)
def test_all_processes_of_a_host_that_has_many_are_awaited(tmp_path: Path) -> None:
    plane = Plane(tmp_path, silence=60.0, workers=MAX_AWAITED + 2)
    try:
        plane.stay(*(f"A/worker:{number}" for number in range(MAX_AWAITED + 2))).communicate(timeout=240)
        assert plane.started[-1].returncode == 0 and not plane.scheduler._hosts
    finally:
        plane.close()


def test_an_agent_is_watched_until_all_have_joined_and_missed_while_one_of_its_host_has_not(tmp_path: Path) -> None:
    plane = Plane(tmp_path, silence=60.0)
    plane.close()
    scheduler, agent = plane.scheduler, _link("A/worker:0")

    def ask(link: Any, topic: str, **body: Any) -> None:
        scheduler._on_request(Request(link, topic, body, lambda *_: None))

    def join(number: int) -> None:
        ask(
            _link(f"A/worker:{number}"), "join", role="worker", process=f"A/worker:{number}", party="A", host="b",
            servers=1, workers=2, rank=number,
        )  # fmt: skip

    ask(agent, "awaited", host="b", processes=["A/worker:0"])
    ask(agent, "awaited", host="b", processes=["A/worker:1"])
    with pytest.raises(BadMessage, match="A/worker:0 awaits 6 processes, more than the plane has"):
        ask(agent, "awaited", host="b", processes=[f"A/worker:{number}" for number in range(6)])
    join(0)
    assert scheduler._hosts[agent].awaited == {"A/worker:1"}
    join(1)
    assert scheduler._hosts[agent].awaited == set() and agent in scheduler.node.liveness._links
    assert scheduler._lose(agent, PeerLost("silent", "")) is None and agent not in scheduler._hosts


def _link(name: str) -> Any:
    link = KeptLink()
    link.name, link.health = name, LinkHealth()  # type: ignore[attr-defined]
    return link


def test_one_that_ends_since_all_have_joined_is_not_missed_but_a_host_never_heard_of_is(tmp_path: Path) -> None:
    plane = Plane(tmp_path, silence=8.0)
    try:
        assert plane.stay("A/worker:0").communicate(timeout=240) and plane.started[-1].returncode == 0
        error = plane.error()
    finally:
        plane.close()
    missing = "1 of 1 server and 2 of 2 workers"
    assert error.message == f"waited 9 s for {missing}, and not all of their hosts have been heard of"
    assert error.hint == "a host has been lost, which is none of those whose processes have joined"
