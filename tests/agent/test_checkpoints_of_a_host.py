"""Checkpoints of a host: its processes stop all at once, and a copy is whole or is none."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from geomx_cli.agent import processes
from geomx_cli.agent.checkpoints import Checkpoint, Checkpoints, whole
from geomx_cli.agent.child import Child
from geomx_cli.agent.host_spec import HostSpec, Task
from geomx_cli.core.conventions import JobClock
from geomx_cli.core.state_notes import StateNotes

pytestmark = pytest.mark.processes

COUNTS = """
import os, subprocess, sys, threading, time
folder = os.environ["GEOMX_STATE_DIR"]
def count(name):
    with open(f"{folder}/{name}", "wb", 0) as file:
        number = 0
        while True:
            number += 1
            os.pwrite(file.fileno(), number.to_bytes(8, "little"), 0)
threading.Thread(target=count, args=("thread",), daemon=True).start()
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, __file__, "child"])
count("main" if len(sys.argv) == 1 else "child")
"""
"""Writes numbers without a pause: in two threads and in a process of its own."""


@pytest.fixture
def children(tmp_path: Path) -> Iterator[list[Child]]:
    script = tmp_path / "counts.py"
    script.write_text(COUNTS)
    tasks = tuple(Task(f"A/{name}", (sys.executable, str(script)), {}) for name in ("worker:0", "server:0"))
    spec = HostSpec("job", "A", str(tmp_path), str(tmp_path), str(tmp_path / "s"), str(tmp_path), (), tasks)
    found = [Child(task, spec, JobClock(0.0)) for task in tasks]
    for child in found:
        child.state_dir = tmp_path / "state" / child.task.file_name
        child.start(dict(os.environ), str(tmp_path))
    yield found
    for child in found:
        child.life.sweep()
        while not child.life.check_end():
            time.sleep(0.01)
        child.close()


def numbers(children: list[Child]) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for child in children for path in sorted(child.state_dir.iterdir())}  # type: ignore[union-attr]


def ended(checkpoints: Checkpoints) -> str:
    while (problem := checkpoints.check(time.monotonic())) is None:
        time.sleep(0.01)
    return problem


def test_a_copy_is_of_the_moment_at_which_all_had_stopped(children: list[Child], tmp_path: Path) -> None:
    while len(numbers(children)) < 6 or not all(numbers(children).values()):
        time.sleep(0.02)
    directory = tmp_path / "hosts" / "A"
    checkpoints = Checkpoints(directory, children)
    assert checkpoints.freeze() == ""
    stopped = numbers(children)
    time.sleep(0.2)
    assert numbers(children) == stopped
    checkpoints.keep(17)
    assert ended(checkpoints) == ""
    (found,) = whole(directory)
    assert (found.number, found.incarnations) == (17, {"A/worker:0": 0, "A/server:0": 0})
    for child in children:
        copies = {path.name: path.read_bytes() for path in (found.path / child.task.file_name).iterdir()}
        assert copies == {path.name: stopped[str(path)] for path in child.state_dir.iterdir()}  # type: ignore[union-attr]
    while any(numbers(children)[name] == before for name, before in stopped.items()):  # all go on
        time.sleep(0.02)

    again = Child(children[0].task, HostSpec("job", "A", "", "", "", "", (), ()), JobClock(0.0))
    again.state_dir = tmp_path / "again"
    Checkpoint.read(found.path).restore(again)
    assert again.incarnation == 1 and (again.state_dir / "main").exists()


def test_those_that_are_not_whole_do_not_count(children: list[Child], tmp_path: Path) -> None:
    directory = tmp_path / "hosts" / "A"
    checkpoints = Checkpoints(directory, children)
    folder = directory / "checkpoints"
    for number in (1, 2, 3):
        assert checkpoints.freeze() == ""
        (folder / "9.part").mkdir(parents=True, exist_ok=True)  # of an agent that was killed
        checkpoints.keep(number)
        assert ended(checkpoints) == ""
    assert [each.number for each in whole(directory)] == [3, 2]
    (folder / "7").mkdir()
    (folder / "8").mkdir()
    (folder / "8" / "about.json").write_text('{"incarnations": 3}')
    assert [each.number for each in whole(directory)] == [3, 2]
    assert sorted(path.name for path in folder.iterdir()) == ["2", "3", "7", "8"]


def test_a_full_disk_leaves_the_last_whole_one(children: list[Child], tmp_path: Path) -> None:
    directory = tmp_path / "hosts" / "A"
    folder = directory / "checkpoints"
    folder.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], check=False).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        checkpoints = Checkpoints(directory, children)
        assert checkpoints.freeze() == ""
        checkpoints.keep(1)
        assert ended(checkpoints) == ""
        assert children[0].state_dir is not None
        (children[0].state_dir / "large").write_bytes(bytes(2 << 20))
        assert checkpoints.freeze() == ""
        checkpoints.keep(2)
        assert "No space left" in ended(checkpoints)
        assert not checkpoints.frozen and [path.name for path in folder.iterdir()] == ["1"]
    finally:
        subprocess.run(["umount", folder], check=True)


def test_what_stands_in_the_way_is_said(children: list[Child], tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "hosts" / "A", children)
    assert children[1].state_dir is not None
    StateNotes(children[1].state_dir).end()
    assert "A/server:0 keeps no state" in checkpoints.freeze()
    StateNotes(children[1].state_dir).go_on()
    identity = children[0].life.identity
    assert identity is not None
    os.kill(identity.pid, 9)
    while processes.state(identity) != "Z":
        time.sleep(0.01)
    assert "A/worker:0 has just died" in checkpoints.freeze()
    assert not checkpoints.frozen
