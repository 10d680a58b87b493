"""Schedulers that are killed and started again, and members that are, while jobs or stand-ins for them run."""

import errno
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster import ROOT, Cluster, free_ports, until
from rounds import PLANNED_ROUNDS, SCRIPT, assert_equal, expected, found_in

from geomx_cli.contract.config import NodeSettings, PlaneSettings
from geomx_cli.core.options import defaults
from geomx_cli.plan import Plan
from geomx_cli.ps.cluster.membership import Membership
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.scheduler import Scheduler
from geomx_cli.ps.net.sockets import Sockets
from geomx_cli.ps.state_file import StateFile

OPTIONS = {"parties": 2, "workers": 2}
GATES = ("declare", "barrier", "leave", "close")

HOOK = """
import os
import signal
from geomx_cli.ps.cluster.scheduler import Scheduler
save = Scheduler._save
def killed(scheduler):
    save(scheduler)
    states = {member.state for member in scheduler._members}
    if not scheduler.node.settings.incarnation and os.environ["DIE"] in states:
        os.kill(os.getpid(), signal.SIGKILL)
Scheduler._save = killed
"""
"""Kills a scheduler in its first life, when it has written that a member is in the state DIE and told nobody."""


class Job:
    """Two parties of two workers, with gates (scripts/rounds.py) that each have open folders of their own."""

    def __init__(self, cluster: Cluster, *, one_host: bool, late: str = "", die: str = "") -> None:
        self.cluster = cluster
        hook = cluster.directory / "hook"
        hook.mkdir()
        (hook / "sitecustomize.py").write_text(HOOK)
        cluster.environment = {
            "OUT": str(cluster.directory / "w{rank}.npz"), "SERVER_OPTIMIZER": "1", "ROUNDS": str(PLANNED_ROUNDS),
            "GEOMX_SUPERVISED": "1",
        }  # fmt: skip
        self.plan: Plan = cluster.planned(SCRIPT[1:], OPTIONS, one_host=one_host)
        self.processes = {process.file_name: process for process in self.plan.processes}
        self.schedulers = [name for name in self.processes if "scheduler" in name]
        self.workers = [name for name in self.processes if "worker" in name]
        self.trains = [name for name in self.workers if "central" not in name]
        for name in self.schedulers:
            folder = cluster.directory / f"{name}.state"
            folder.mkdir(0o700)
            cluster.each[name] = {"GEOMX_STATE_DIR": str(folder)}
            if die:
                cluster.each[name] |= {"PYTHONPATH": f"{hook}:{ROOT}", "DIE": die}
        for name in self.workers:
            (cluster.directory / f"{name}.gates").mkdir()
            cluster.each[name] = {"GATES": str(cluster.directory / f"{name}.gates")}
        go = cluster.directory / "go"
        wait = ["sh", "-c", f'while [ ! -e {go} ]; do sleep 0.05; done; exec "$@"', "sh"]
        cluster.launch_planned(
            self.plan, {name: [*wait, *self.processes[name].argv] for name in self.workers if name == late}
        )

    def open(self, *gates: str, of: str = "") -> None:
        for name in [of] if of else self.workers:
            for gate in gates:
                (self.cluster.directory / f"{name}.gates" / gate).touch()

    def wait_at(self, gate: str) -> None:
        output = self.cluster.output
        until(lambda: all(f"at {gate}\n" in output(name) for name in self.trains), 60, self.cluster.outputs)

    def restart(self, incarnation: int = 1) -> None:
        """Kill all schedulers that have not ended well, and start them again at once."""
        for name in self.schedulers:
            if self.cluster.processes[name].poll() is None:
                self.cluster.processes[name].send_signal(signal.SIGKILL)
                self.start_again(name, incarnation)

    def start_again(self, name: str, incarnation: int = 1) -> None:
        """Start a killed scheduler."""
        assert self.cluster.processes[name].wait(30) == -signal.SIGKILL
        process = self.processes[name]
        environment = {**process.env, "PYTHONPATH": str(ROOT), "GEOMX_INCARNATION": str(incarnation)}
        self.cluster.start(name, process.argv, environment)

    def finish(self) -> None:
        """The job ends well, soon and with the right weights."""
        began = time.monotonic()
        self.cluster.finish(60)
        found = found_in(self.cluster.directory)
        rounds = dict.fromkeys(range(4), PLANNED_ROUNDS)
        assert sorted(found) == [0, 1, 2, 3]
        assert_equal(found, expected([[0, 1], [2, 3]], rounds, optimizer=True))
        print(f"ended after {time.monotonic() - began:.1f} s", file=sys.stderr)

    def warnings(self) -> str:
        """The messages of all warnings."""
        events = [path.read_text().splitlines() for path in self.cluster.directory.glob("events/*.jsonl")]
        parsed = [json.loads(line) for lines in events for line in lines]
        return "\n".join(event["message"] for event in parsed if event["event"] == "warning")


@pytest.mark.parametrize("one_host", [True, False])
def test_schedulers_that_are_killed_after_the_roster_are_not_missed(cluster: Cluster, one_host: bool) -> None:
    """Twice."""
    job = Job(cluster, one_host=one_host)
    job.wait_at("declare")
    job.restart()
    job.open("declare")
    job.wait_at("barrier")
    for name in job.schedulers:
        until(lambda name=name: "restarted, and has the roster of" in cluster.output(name))
    job.restart(2)
    job.open(*GATES)
    job.finish()
    for name in job.trains:
        assert cluster.output(name).count("at declare") == 1
    warnings = job.warnings()
    assert "is back" not in warnings and "refused" not in warnings, warnings


def test_schedulers_that_are_killed_before_the_roster_are_joined_anew(cluster: Cluster) -> None:
    job = Job(cluster, one_host=False, late="A-worker-1")
    events = cluster.directory / "events"
    until(lambda: any("waiting for 1 of" in path.read_text() for path in events.glob("*.jsonl")))
    job.restart()
    (cluster.directory / "go").touch()
    job.open(*GATES)
    job.finish()


def test_schedulers_that_are_killed_between_two_goodbyes_count_each_once(cluster: Cluster) -> None:
    job = Job(cluster, one_host=False)
    first, *others, last = job.trains
    job.open("declare", "barrier", "leave")
    job.wait_at("close")
    job.open("close", of=first)
    assert cluster.processes[first].wait(60) == 0
    job.restart()
    for name in others:
        job.open("close", of=name)
        assert cluster.processes[name].wait(60) == 0
    waiting = ("central-global_scheduler-0", "central-scheduler-0", "B-scheduler-0", last)
    assert all(cluster.processes[name].poll() is None for name in waiting)
    job.restart(2)
    job.open("close", of=last)
    job.finish()


@pytest.mark.parametrize("state", ["in", "left", "gone"])
def test_what_a_scheduler_has_written_and_told_nobody_counts(cluster: Cluster, state: str) -> None:
    """It is killed with the roster, or with a goodbye, before its answer."""
    job = Job(cluster, one_host=False, die=state)
    job.open(*GATES)
    killed = set[str]()
    until(lambda: _start_killed(job, killed) or killed == {*job.schedulers}, 60, cluster.outputs)
    job.finish()


def _start_killed(job: Job, killed: set[str]) -> None:
    for name in job.schedulers:
        if name not in killed and job.cluster.processes[name].poll() is not None:
            killed.add(name)
            job.start_again(name)


class InThread:
    """A node whose loop runs in a thread, until it is killed or ends. error: why it has failed."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.dead = False
        self._thread = threading.Thread(target=node.loop.run, daemon=True)

    def start(self) -> None:
        self.node.liveness.start()
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def kill(self) -> None:
        if not self.dead:
            self.dead = True
            self.node.loop.submit(self.node.loop.stop)
            self._thread.join()
            self.node.transport._sockets.close(0)


class Plane:
    """A scheduler and members of one server and two workers, in threads.

    rosters: by process, as they are told.
    silence: the option, for those that start later.
    """

    silence = 20.0

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plane = PlaneSettings("127.0.0.1", free_ports(1)[0], servers=1, workers=2)
        self.rosters: dict[str, list[Membership]] = {}
        self.said = list[str]()
        self.nodes = list[InThread]()

    def _settings(self, process: str, incarnation: int, role: Any) -> NodeSettings:
        return NodeSettings(
            role, process=process, party="A", incarnation=incarnation, local=self._plane, supervised=True,
            state_dir=str(self._folder), options={**defaults(), "silence": self.silence},
        )  # fmt: skip

    def _events(self) -> Any:
        return SimpleNamespace(is_kept=False, write=lambda event: self.said.append(getattr(event, "message", "")))

    def scheduler(self, incarnation: int = 0) -> InThread:
        settings = self._settings("A/scheduler:0", incarnation, "scheduler")
        return self._run(Scheduler(settings, self._plane, self._events()).node)

    def member(self, process: str, incarnation: int = 0, rank: int | None = None, port: int = 1) -> InThread:
        role = "server" if "server" in process else "worker"
        node = Node(
            self._settings(process, incarnation, role), self._events(),
            on_tensor=lambda *_: None, on_request=lambda _: None,
        )  # fmt: skip
        told = self.rosters.setdefault(process, [])
        endpoints = [f"tcp://127.0.0.1:{port}"] if role == "server" else []
        node.join(self._plane, role, told.append, rank=rank, endpoints=endpoints)
        return self._run(node)

    def _run(self, node: Node) -> InThread:
        self.nodes.append(InThread(node))
        self.nodes[-1].start()
        return self.nodes[-1]


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    made = Plane(tmp_path)
    yield made
    for node in made.nodes:
        node.kill()


def complete(plane: Plane, rank: Callable[[int], int | None] = lambda rank: rank) -> dict[str, InThread]:
    """A scheduler, and all members, which know the roster."""
    found = {"scheduler": plane.scheduler(), "A/server:0": plane.member("A/server:0", rank=rank(0))}
    for number in range(2):
        found[f"A/worker:{number}"] = plane.member(f"A/worker:{number}", rank=rank(number))
    until(lambda: sum(map(len, plane.rosters.values())) == 3, 20)
    return found


@pytest.mark.parametrize("planned", [True, False])
def test_a_member_that_is_restarted_gets_the_same_roster(plane: Plane, planned: bool) -> None:
    """Planned ranks or not; and the others are told nothing."""
    nodes = complete(plane, lambda rank: rank if planned else None)
    for incarnation in (1, 2):
        nodes["A/worker:1"].kill()
        first = plane.rosters["A/worker:1"][0]
        nodes["A/worker:1"] = plane.member("A/worker:1", incarnation, 1 if planned else None)
        until(lambda count=incarnation + 1: len(plane.rosters["A/worker:1"]) == count, 20)
        again = plane.rosters["A/worker:1"][-1]
        assert (again.rank, again.members) == (first.rank, again.members) and again.rank in (0, 1)
        assert [each.announced() for each in again.members] == [each.announced() for each in first.members]
    assert len(plane.rosters["A/server:0"]) == len(plane.rosters["A/worker:0"]) == 1
    for name in ("A/worker:0", "A/worker:1", "A/server:0"):
        nodes[name].node.loop.submit(nodes[name].node.goodbye)
    until(lambda: all(each.ended for each in nodes.values()), 20)
    assert not any(each.node.error for each in nodes.values())


def test_a_member_whose_connection_has_the_descriptor_of_a_dead_one_joins(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hello of the dead life that is read after its end seems to come from the next one's connection."""
    monkeypatch.setattr(Sockets, "awaits_hello", lambda *_: False)
    nodes = complete(plane)
    nodes["A/server:0"].kill()
    plane.member("A/server:0", 1, 0)
    until(lambda: len(plane.rosters["A/server:0"]) == 2, 20)


def test_a_member_that_is_restarted_before_the_roster_joins_once(plane: Plane) -> None:
    scheduler = plane.scheduler()
    first = plane.member("A/server:0", rank=0, port=1)
    second = plane.member("A/worker:0", rank=0)
    until(lambda: "waiting for 1 of 2 workers" in plane.said, 20)
    first.kill()
    second.kill()
    plane.member("A/server:0", 1, rank=0, port=2)
    plane.member("A/worker:0", 1, rank=0)
    until(lambda: plane.said.count("waiting for 1 of 2 workers") >= 3, 20)
    plane.member("A/worker:1", rank=1)
    until(lambda: [len(plane.rosters[name]) for name in sorted(plane.rosters)] == [1, 1, 1], 20)
    assert plane.rosters["A/worker:1"][0].servers()[0].endpoints == ("tcp://127.0.0.1:2",), "of the second life"
    assert scheduler.node.error is None


@pytest.mark.parametrize(("rank", "port"), [(1, 1), (0, 2)], ids=["rank", "endpoint"])
def test_a_member_that_is_restarted_as_another_is_refused(plane: Plane, rank: int, port: int) -> None:
    nodes = complete(plane)
    nodes["A/server:0"].kill()
    again = plane.member("A/server:0", 1, rank, port)
    until(lambda: again.node.error, 20)
    assert f"A/server:0 was restarted as server {rank} on tcp://127.0.0.1:{port}" in str(again.node.error)


@pytest.mark.parametrize("keeps", [True, False], ids=["with its file", "without"])
def test_a_scheduler_that_is_restarted_has_the_same_roster(plane: Plane, keeps: bool) -> None:
    """From its file, or from the ranks that all members ask for again. Nobody is told a roster twice."""
    nodes = complete(plane, lambda _: None)
    ranks = {name: told[0].rank for name, told in plane.rosters.items()}
    nodes["scheduler"].kill()
    if not keeps:
        (plane._folder / "scheduler").unlink()
    nodes["scheduler"] = plane.scheduler(1)
    text = "restarted, and has the roster of 3 members" if keeps else "all members have joined: "
    until(lambda: sum(said.startswith(text) for said in plane.said) == 2 - keeps, 20)
    for name in ("A/worker:1", "A/worker:0", "A/server:0"):
        nodes[name].node.loop.submit(nodes[name].node.goodbye)
    until(lambda: all(each.ended for each in nodes.values()), 30)
    assert not any(each.node.error for each in nodes.values())
    assert all(len(told) == 1 and told[0].rank == ranks[name] for name, told in plane.rosters.items())


@pytest.mark.parametrize("call", ["__init__", "commit"])
def test_a_scheduler_without_room_keeps_nothing_and_says_so_once(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """So its agent does not start it again, as one that has forgotten who has left."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(StateFile, call, full)
    nodes = complete(plane)
    for name in ("A/worker:1", "A/worker:0", "A/server:0"):
        nodes[name].node.loop.submit(nodes[name].node.goodbye)
    until(lambda: all(each.ended for each in nodes.values()), 20)
    assert not any(each.node.error for each in nodes.values())
    (warning,) = [said for said in plane.said if "No space left" in said]
    assert warning.startswith(str(plane._folder)) and "--restarts 0" in warning
    assert [path.name for path in plane._folder.iterdir()] == ["ended"]


def test_a_scheduler_that_is_restarted_misses_who_does_not_come_back(plane: Plane) -> None:
    nodes = complete(plane)
    for name in ("scheduler", "A/worker:1"):
        nodes[name].kill()
    plane.silence = 4.0
    again = plane.scheduler(1)
    until(lambda: again.node.error, 40)
    assert "A/worker:1 has been silent for 4 s, since A/scheduler:0 was restarted" in str(again.node.error)


def test_another_rank_than_before_is_an_error() -> None:
    failed = list[Exception]()
    membership: Any = SimpleNamespace(rank=1, link=SimpleNamespace(name="s"), _node=SimpleNamespace(fail=failed.append))
    Membership._joined_again(membership, {"rank": 1})
    assert failed == []
    Membership._joined_again(membership, {"rank": 0})
    assert "s was restarted, and gives this process rank 0 instead of 1" in str(failed[0])
