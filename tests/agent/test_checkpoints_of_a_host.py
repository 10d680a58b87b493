"""Checkpoints of a host: its processes stop all at once, and a copy is whole or is none."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import until

from geomx_cli.agent import checkpoint, processes
from geomx_cli.agent.checkpoint import Checkpoint, main, whole
from geomx_cli.agent.checkpoints import BUSY, Checkpoints
from geomx_cli.agent.child import Child
from geomx_cli.agent.freeze import Freeze
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


def unstarted(child: Child, folder: Path) -> Child:
    """The same process of another job."""
    again = Child(child.task, HostSpec("job", "A", "", "", "", "", (), ()), JobClock(0.0))
    again.state_dir = folder / "again"
    return again


def numbers(children: list[Child]) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for child in children for path in sorted(child.state_dir.iterdir())}  # type: ignore[union-attr]


class Requester:
    """Orders checkpoints as a control machine does, whose visitor number is 0; others have others."""

    def __init__(self, directory: Path, children: list[Child], silence: float = 240.0) -> None:
        self.answers: list[tuple[int, dict[str, Any]]] = []
        self.directory = directory
        self.checkpoints = Checkpoints(directory, children, lambda *answer: self.answers.append(answer), silence)

    def order(self, kind: str, number: int, visitor: int = 0) -> None:
        self.checkpoints.obey({"type": kind, "number": number, "visitor": visitor}, running=True)

    def freeze(self, number: int, visitor: int = 0) -> str:
        self.order("freeze", number, visitor)
        who, answer = self.answers.pop()
        assert (who, answer["type"], answer["number"]) == (visitor, "frozen", number)
        return str(answer["problem"])

    def ended(self, number: int, visitor: int = 0) -> str:
        """Await the answer to the order to keep."""
        while not self.answers:
            self.checkpoints.check()
            time.sleep(0.01)
        who, answer = self.answers.pop()
        assert (who, answer["type"], answer["number"]) == (visitor, "kept", number)
        return str(answer["problem"])

    def keep(self, number: int, visitor: int = 0) -> str:
        self.order("keep", number, visitor)
        return self.ended(number, visitor)


class SlowDisk:
    """Copies wait, as those to a disk that hangs, until `go_on`; of a file they have the first half then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._waits, self.begun = threading.Event(), threading.Event()
        self.copies = shutil.copyfile
        monkeypatch.setattr("geomx_cli.agent.checkpoint.shutil.copyfile", self._copy)

    def _copy(self, source: Path, target: Path) -> None:
        self.begun.set()
        assert self._waits.wait(60)
        self.copies(source, target)

    def go_on(self) -> None:
        self._waits.set()


def state(pid: int) -> str:
    found = processes.identify(pid)
    return processes.state(found) if found is not None else ""


def wait_for_all(children: list[Child]) -> None:
    while len(numbers(children)) < 3 * len(children) or not all(numbers(children).values()):
        time.sleep(0.02)


def wait_for_more(children: list[Child], before: dict[str, bytes]) -> None:
    while any(numbers(children)[name] == number for name, number in before.items()):
        time.sleep(0.02)


def test_a_copy_is_of_the_moment_at_which_all_had_stopped(children: list[Child], tmp_path: Path) -> None:
    wait_for_all(children)
    directory = tmp_path / "hosts" / "A"
    requester = Requester(directory, children)
    assert requester.freeze(17) == ""
    stopped = numbers(children)
    time.sleep(0.2)
    assert numbers(children) == stopped
    assert requester.keep(17) == ""
    (found,) = whole(directory)
    assert (found.number, found.part.incarnations) == (17, {"A/worker:0": 0, "A/server:0": 0})
    for child in children:
        copies = {path.name: path.read_bytes() for path in (found.path / child.task.file_name).iterdir()}
        assert copies == {path.name: stopped[str(path)] for path in child.state_dir.iterdir()}  # type: ignore[union-attr]
    wait_for_more(children, stopped)  # all go on

    again = unstarted(children[0], tmp_path)
    Checkpoint.read(found.path).restore(again)
    assert again.incarnation == 1 and (again.state_dir / "main").exists()


def test_those_that_are_not_whole_do_not_count(
    children: list[Child], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "hosts" / "A"
    requester = Requester(directory, children)
    folder = directory / "checkpoints"
    for number in (1, 2, 3):
        assert requester.freeze(number) == ""
        (folder / "9.part").mkdir(parents=True, exist_ok=True)  # of an agent that was killed
        assert requester.keep(number) == ""
    assert "the number 3" in requester.freeze(3)
    assert [each.number for each in whole(directory)] == [3, 2]
    fine = (folder / "3" / "about.json").read_text()
    damaged = {4: "[]", 5: fine.replace('0": 0', '0": Infinity'), 6: "[" * 100_000, 8: "", 9: "{}"}
    damaged[10] = fine.replace('"format": 2', '"format": 3')
    for number, text in damaged.items():
        (folder / str(number)).mkdir()
        (folder / str(number) / "about.json").write_text(text)
    (folder / "7").mkdir()
    assert [each.number for each in whole(directory)] == [3, 2]
    assert sorted(int(path.name) for path in folder.iterdir()) == [*range(2, 11)]
    capsys.readouterr()
    assert main(directory, ()) == 0
    found = json.loads(capsys.readouterr().out)
    assert [*found["whole"]] == ["3", "2"] and len(found["others"]) == 7
    assert "10 (its format is 3, of geomx '0.1.0', not 2)" in found["others"]


def test_a_full_disk_leaves_the_last_whole_one(children: list[Child], tmp_path: Path) -> None:
    directory = tmp_path / "hosts" / "A"
    folder = directory / "checkpoints"
    folder.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], check=False).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        requester = Requester(directory, children)
        assert requester.freeze(1) == requester.keep(1) == ""
        assert children[0].state_dir is not None
        (children[0].state_dir / "large").write_bytes(bytes(2 << 20))
        assert requester.freeze(2) == ""
        assert "No space left" in requester.keep(2)
        assert not requester.checkpoints.frozen and [path.name for path in folder.iterdir()] == ["1"]
    finally:
        subprocess.run(["umount", folder], check=True)


def test_what_stands_in_the_way_is_said(children: list[Child], tmp_path: Path) -> None:
    requester = Requester(tmp_path / "hosts" / "A", children)
    assert children[1].state_dir is not None
    StateNotes(children[1].state_dir).end()
    assert "A/server:0 keeps no state" in requester.freeze(1)
    StateNotes(children[1].state_dir).go_on()
    identity = children[0].life.identity
    assert identity is not None
    os.kill(identity.pid, 9)
    while children[0].life.look() is None:  # its first thread may be a zombie before
        time.sleep(0.01)
    assert "A/worker:0 has just died" in requester.freeze(2)
    assert not requester.checkpoints.frozen
    assert children[0].life.status is None and children[0].life.check_end(), "the agent's loop sees its end later"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: file.unlink(), "main is missing"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "has 7 bytes instead of 8"),
        (lambda file: file.write_bytes(bytes(8)), "main is damaged: its digest is another"),
        (lambda file: file.write_text(""), "has 0 bytes instead of 8"),
    ],
)
def test_damaged_files_of_a_checkpoint_are_named_and_the_one_before_counts(
    damage: Callable[[Path], object], words: str, children: list[Child], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    wait_for_all(children)
    requester = Requester(tmp_path / "hosts" / "A", children)
    for number in (1, 2):
        assert requester.freeze(number) == requester.keep(number) == ""
    file = requester.directory / "checkpoints" / "2" / children[0].task.file_name / "main"
    damage(file)
    capsys.readouterr()
    assert main(requester.directory, ()) == 0
    found = json.loads(capsys.readouterr().out)
    assert [*found["whole"]] == ["1"]
    assert len(found["others"]) == 1 and words in found["others"][0]
    with pytest.raises(ValueError, match=words):  # it was damaged after it was chosen
        Checkpoint.read(file.parent.parent).restore(unstarted(children[0], tmp_path))


def test_a_copy_of_what_was_removed_takes_the_place_of_no_other(children: list[Child], tmp_path: Path) -> None:
    requester = Requester(tmp_path / "hosts" / "A", children)
    assert requester.freeze(1) == requester.keep(1) == ""
    assert requester.freeze(2) == ""
    assert children[1].state_dir is not None
    shutil.rmtree(children[1].state_dir)
    assert "No such file" in requester.keep(2)
    assert [each.number for each in whole(requester.directory)] == [1]


@pytest.mark.parametrize("how", ["thaw", "SIGCONT", "the end of a party", "a death", "none"])
def test_processes_that_go_on_during_the_copy_have_no_checkpoint(
    how: str, children: list[Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_all(children)
    disk, requester = SlowDisk(monkeypatch), Requester(tmp_path / "hosts" / "A", children)
    assert requester.freeze(1) == ""
    requester.order("keep", 1)
    assert disk.begun.wait(60)
    life = children[1].life
    assert life.identity is not None
    match how:
        case "thaw":
            requester.order("thaw", 1)
        case "SIGCONT":
            os.kill(life.identity.pid, signal.SIGCONT)
        case "the end of a party":
            life.signal_group(signal.SIGCONT)  # as after SIGTERM
        case "a death":
            os.kill(life.identity.pid, signal.SIGKILL)
            while processes.state(life.identity) != "Z":
                time.sleep(0.01)
    disk.go_on()
    assert (requester.ended(1) == "") == (how == "none")
    assert bool(whole(requester.directory)) == (how == "none")
    assert not requester.checkpoints.frozen


def test_the_end_is_not_told_while_the_processes_are_suspended(
    children: list[Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_all(children)
    disk, requester = SlowDisk(monkeypatch), Requester(tmp_path / "hosts" / "A", children)
    assert requester.freeze(1) == ""
    requester.order("keep", 1)
    goes_on, sends = threading.Event(), processes.send_signal

    def late(*arguments: Any) -> None:
        assert goes_on.wait(60)
        sends(*arguments)

    monkeypatch.setattr(processes, "send_signal", late)
    thread = threading.Thread(target=requester.checkpoints.void, args=("it was given up",))
    thread.start()
    for _ in range(10):
        requester.checkpoints.check()
        time.sleep(0.01)
    assert requester.checkpoints.frozen and not requester.answers
    goes_on.set()
    thread.join()
    disk.go_on()
    assert requester.ended(1) == "it was given up" and not requester.checkpoints.frozen


def test_processes_go_on_while_the_disk_hangs(
    children: list[Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_all(children)
    disk, requester = SlowDisk(monkeypatch), Requester(tmp_path / "hosts" / "A", children, silence=2.0)
    assert requester.freeze(1) == ""
    stopped = numbers(children)
    requester.order("keep", 1)
    wait_for_more(children, stopped)  # though nobody calls `check`: the agent's loop may hang too
    assert requester.ended(1) == "its state could not be copied within 1.0 s"
    assert "has not ended yet" in requester.freeze(2)
    disk.go_on()
    while "has not ended yet" in requester.freeze(3):
        requester.checkpoints.check()
    requester.order("thaw", 3)
    assert not whole(requester.directory)
    assert requester.freeze(4) == requester.keep(4) == ""


def test_a_copy_that_begins_when_the_job_is_done_leaves_nothing(
    children: list[Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_all(children)
    requester = Requester(tmp_path / "hosts" / "A", children)
    assert requester.freeze(1) == requester.keep(1) == ""
    may_begin, folder = threading.Event(), checkpoint.folder_of(requester.directory)

    def waits(directory: Path) -> Path:
        if threading.current_thread().name == "checkpoint":
            assert may_begin.wait(60)
        return directory / folder.name

    monkeypatch.setattr(checkpoint, "folder_of", waits)
    assert requester.freeze(2) == ""
    requester.order("keep", 2)
    threading.Timer(0.3, may_begin.set).start()
    requester.checkpoints.remove()
    while any(thread.name == "checkpoint" for thread in threading.enumerate()):
        time.sleep(0.01)
    assert not list(requester.directory.iterdir())


def test_a_process_that_starts_another_one_can_be_suspended(tmp_path: Path) -> None:
    """It is in vfork until the other's exec: there it does not stop, and a suspended one does not come to exec."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    opens = f"file_actions=[(os.POSIX_SPAWN_OPEN, 0, {str(pipe)!r}, os.O_RDONLY, 0)]"  # waits for us, before exec
    program = f"import os, time; os.posix_spawn('/bin/sleep', ['sleep', '60'], os.environ, {opens}); time.sleep(60)"
    starter = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    try:
        until(lambda: state(starter.pid) == "D", 60, lambda: "")
        threading.Timer(0.05, lambda: os.open(pipe, os.O_RDWR)).start()
        freeze = Freeze([starter.pid])
        assert freeze.begin(60.0, "") == ""
        assert freeze.end()
    finally:
        os.killpg(starter.pid, signal.SIGKILL)
        starter.wait()


def test_only_who_has_suspended_processes_orders_the_rest(children: list[Child], tmp_path: Path) -> None:
    requester = Requester(tmp_path / "hosts" / "A", children, silence=2.0)
    assert "not suspended for checkpoint 1" in requester.keep(1)
    assert requester.freeze(2) == ""
    assert requester.freeze(3, visitor=4) == BUSY
    assert "not suspended" in requester.keep(1) and "not suspended" in requester.keep(2, visitor=4)
    for number, visitor in ((1, 0), (2, 4)):
        requester.order("thaw", number, visitor)
    assert requester.checkpoints.frozen
    while requester.checkpoints.frozen:  # no order comes
        time.sleep(0.01)
    assert requester.keep(2) == "no order to copy came within 1.0 s"
    assert requester.freeze(3, visitor=4) == requester.keep(3, visitor=4) == ""
