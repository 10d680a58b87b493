"""Jobs whose schedulers are killed and started again, with a folder that outlives them or without need of it."""

import json
import signal
import sys
import time

import pytest
from cluster import ROOT, Cluster, until
from rounds import PLANNED_ROUNDS, SCRIPT, assert_equal, expected, found_in

from geomx_cli.plan import Plan

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
    assert "A/scheduler:0 was restarted (incarnation 1)" in warnings, warnings
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
