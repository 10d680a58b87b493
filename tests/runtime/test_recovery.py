"""A bundled worker that is stopped at any moment, and goes on from what it has saved."""

import errno
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from cluster import ROOT, Cluster, until
from idx import write_data
from training_job import Killed, TrainingJob, results

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.state_file import Saved, StateFile
from geomx_cli.runtime.bundled.loop import Loop
from geomx_cli.runtime.training import worker_state
from geomx_cli.runtime.training.worker_algorithm import Contributed, State
from geomx_cli.runtime.training.worker_state import WorkerState


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "idx", 4 * 60, 32)


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Has workers killed by chance, before and after they save, with contributions on their way, and with results."""
    chances = {}

    def perhaps(loop: Loop) -> None:
        random, chance = chances.setdefault(loop._rank, (Random(f"{seed} {loop._rank}"), chance_))
        if random.random() < chance:
            raise Killed

    seed, chance_ = 0, 0.0

    def set_(number: int, chance: float) -> None:
        nonlocal seed, chance_
        seed, chance_ = number, chance
        chances.clear()

    for name in ("_save", "_synchronise"):
        usual = getattr(Loop, name)

        def wrapped(loop: Loop, usual: Any = usual) -> None:
            perhaps(loop)
            usual(loop)
            perhaps(loop)

        monkeypatch.setattr(Loop, name, wrapped)
    yield set_


WAYS: dict[str, dict[str, Any]] = {
    "fsa": {"algo": "fsa"},
    "fsa, fp16": {"algo": "fsa", "compress": "fp16", "compress_lan": "fp16", "optimizer": "adam"},
    "fsa, bsc": {"algo": "fsa", "compress": "bsc:0.05", "compress_lan": "bsc:0.1"},
    "fsa, p3": {"algo": "fsa", "p3": True},
    "fsa, on workers": {"algo": "fsa", "optimizer_on": "worker", "optimizer": "adam", "compress_lan": "2bit"},
    "hfa": {"algo": "hfa", "k1": 2, "k2": 2, "optimizer": "adam", "compress_lan": "fp16"},
    "diloco": {"algo": "diloco", "inner_steps": 3, "compress": "sparseloco", "compress_lan": "fp16"},
    "diloco, fragments": {"algo": "diloco", "inner_steps": 4, "fragments": 2, "overlap": 1, "compress": "fp16"},
    "flat": {"algo": "fsa", "flat": True, "compress": "bsc:0.05"},
}


QUICK = ("fsa, bsc", "fsa, on workers", "diloco, fragments")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in WAYS]
)
def test_killed_workers_end_with_the_bits_of_others(
    name: str, data: Path, tmp_path: Path, kills: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"data_dir": str(data), **WAYS[name]}
    straight = TrainingJob(tmp_path / "straight", recovers=False, **options)
    straight.run()
    monkeypatch.setattr(worker_state, "INTERVAL", 0.0 if "diloco" in name else 2.0)
    kills(1, 0.06)
    killed = TrainingJob(tmp_path / "killed", **options)
    killed.run()
    assert killed.kills >= 3
    assert len({event["parameters"] for event in straight.finished.values()}) == 1
    assert killed.ends() == straight.ends()


@pytest.mark.parametrize("name", ["esync", "mixed", "decoupled"])
def test_rounds_that_follow_time_end_after_kills(name: str, data: Path, tmp_path: Path, kills: Any) -> None:
    """How many steps a round has, or which party comes first, follows time: no two runs have the same bits."""
    options = {"algo": name, **{"esync": {"compress": "fp16"}, "decoupled": {"inner_steps": 3}}.get(name, {})}
    kills(2, 0.03)
    killed = TrainingJob(tmp_path / "killed", data_dir=str(data), **options)
    killed.run()
    assert killed.kills >= 2
    ends = killed.finished.values()
    assert len(ends) == 4 and len({event["parameters"] for event in ends}) == 1
    assert all(event["samples"] >= 120 and event["stopped"] == "epochs" for event in ends)


def test_a_full_state_directory_ends_recovery_only(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, left = StateFile.commit, 20

    def commit(file: StateFile, *record: Any) -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        usual(file, *record)

    straight = TrainingJob(tmp_path / "straight", recovers=False, data_dir=str(data), **WAYS["fsa, bsc"])
    straight.run()
    monkeypatch.setattr(StateFile, "commit", commit)
    full = TrainingJob(tmp_path / "full", data_dir=str(data), **WAYS["fsa, bsc"])
    full.run()
    assert full.ends() == straight.ends()
    assert len(full.warnings) == 4 and all("has no more room (No space left" in text for text in full.warnings)
    for folder in (tmp_path / "full").iterdir():
        assert sorted(path.name for path in folder.iterdir()) == ["ended", "events.jsonl"]


def test_a_record_of_another_version_is_refused(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "worker")
    file.commit("training", {"training": {}}, {})
    file.close()
    state = WorkerState(tmp_path, print)
    assert state.continues and not state.is_set_up
    with pytest.raises(InvalidSettings, match="cannot be read: KeyError"):
        state.restore(lambda *_: None)


def test_rounds_that_follow_time_are_repeated_with_as_many_steps(tmp_path: Path) -> None:
    state = WorkerState(tmp_path, print)
    assert state.contributed(4) is None
    state.contribute(4, Contributed(17, "step"))
    state.save(5, State(), Saved({}, {}))
    state.contribute(5, Contributed(3, "join"))
    state.contribute(6, Contributed(0, "drain"))
    state.close()
    again = WorkerState(tmp_path, print)
    assert [again.contributed(rounds) for rounds in range(4, 8)] == [None, (3, "join"), (0, "drain"), None]


def test_without_a_directory_nothing_is_kept() -> None:
    state = WorkerState(None, print)
    state.set_up()
    assert not state.continues and not state.is_due(1)


# Processes.


class Killing:
    """A bundled job of processes, started by hand, in which workers are killed and started again."""

    def __init__(self, cluster: Cluster, argv: Mapping[str, Sequence[str]] = {}, **options: Any) -> None:
        self._cluster = cluster
        planned = cluster.planned((), {
            "network": "linear", "batch_size": 8, "epochs": 40, "compress_min": 16, "eval_every": 5, **options
        })  # fmt: skip
        self._env = {one.file_name: dict(one.env) for one in planned.processes}
        self._argv = {one.file_name: one.argv for one in planned.processes}
        self.workers = [one.file_name for one in planned.processes if one.global_rank is not None]
        for name in self._env:
            folder = cluster.directory / "states" / name
            folder.mkdir(parents=True, mode=0o700)
            cluster.each[name] = {"GEOMX_STATE_DIR": str(folder)}
        self._lives = dict.fromkeys(self._env, 0)
        cluster.launch_planned(planned, argv)

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        """The events of a process in its event log, of one kind."""
        path = self._cluster.directory / "events" / f"{name}.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [event for event in events if event["event"] == kind]

    def kill(self, name: str, rounds: int) -> None:
        """Kill a process once its job has gone through so many rounds, and start it again."""
        until(lambda: len(self.events(self.workers[0], "round")) >= rounds, state=self._cluster.outputs)
        os.kill(self._cluster.processes[name].pid, signal.SIGKILL)
        self.restart(name)

    def restart(self, name: str) -> None:
        """Start a process again once it has been killed."""
        assert self._cluster.processes[name].wait(120) == -signal.SIGKILL
        self._lives[name] += 1
        self._cluster.each[name]["GEOMX_INCARNATION"] = str(self._lives[name])
        self._cluster.start(name, self._argv[name], {**self._env[name], "PYTHONPATH": str(ROOT)})

    def finish(self) -> list[dict[str, Any]]:
        """The last event of each worker."""
        self._cluster.finish()
        return [self.events(name, "finished")[-1] for name in self.workers]


@pytest.mark.processes
@pytest.mark.parametrize("name", ["fsa, bsc", "hfa"])
def test_killed_processes(name: str, cluster: Cluster, tmp_path: Path, data: Path) -> None:
    options = {"data_dir": str(data), "epochs": 16, **WAYS[name]}
    killing = Killing(cluster, **options)
    for index, worker in enumerate(killing.workers[:3]):
        killing.kill(worker, 10 + 15 * index)
    found = killing.finish()
    straight = Cluster(tmp_path / "straight")
    straight.directory.mkdir()
    try:
        assert results(found) == results(Killing(straight, **options).finish())
    finally:
        straight.stop()


DIES = """
import os, runpy, signal, sys
from geomx_cli.ps.client import Client
from geomx_cli.ps.control_client import ControlClient
from geomx_cli.ps.worker import Worker
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
def after(owner, name, delay=None):
    usual = getattr(owner, name)
    def method(self, *given):
        usual(self, *given)
        self.node.loop.call_later(delay, die) if delay is not None else die()
    setattr(owner, name, method)
match sys.argv[1]:
    case "before it leaves": Client.leave = die
    case "when it has left": after(Client, "leave")
    case "with its goodbye on the way": after(Worker, "_say_goodbye", 0.0)
    case "when all know": after(Client, "close")
sys.argv = ["geomx_cli.runtime"]
runpy.run_module("geomx_cli.runtime", run_name="__main__", alter_sys=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "when", ["before it leaves", "when it has left", "with its goodbye on the way", "when all know"]
)
def test_killed_at_the_end(when: str, cluster: Cluster, data: Path) -> None:
    victims = ["A-worker-0", "B-worker-1"]
    cluster.forks = False
    argv = dict.fromkeys(victims, (sys.executable, "-P", "-c", DIES, when))
    killing = Killing(cluster, argv, data_dir=str(data), algo="fsa", epochs=2)
    for name in victims:
        killing.restart(name)
    assert len({event["parameters"] for event in killing.finish()}) == 1
