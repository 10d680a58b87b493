"""Launch's messages and clean-up when processes, agents or launch itself are killed or stopped.

Plan, launch and agents are the real ones; the roles are the small programs of stand_in.py.
"""

import contextlib
import json
import os
import pty
import resource
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cluster import ROOT

from geomx_cli.core.root_cause import Failure, first_cause

pytestmark = pytest.mark.processes

STAND_IN = ROOT.joinpath("tests", "stand_in.py")
FOREVER = {"*": "forever"}
MARK = "LAUNCH_TEST"
# Stand-ins find the tests' Python by PATH.
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}


@dataclass
class Launch:
    """One `launch` in its own process, and all that it starts, found by a marker variable."""

    directory: Path
    story: dict[str, str]
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.temporary = Path(tempfile.mkdtemp(prefix="g", dir="/tmp"))
        environment = {**ENVIRONMENT, MARK: self.mark, "TMPDIR": str(self.temporary)}
        self.process = subprocess.Popen(
            [sys.executable, str(STAND_IN), "launch", str(self.directory), json.dumps(self.story)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment, start_new_session=True,
        )  # fmt: skip

    def pids(self) -> list[int]:
        """All processes with the marker."""
        entry, found = f"{MARK}={self.mark}".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if entry in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def wait_until_running(self) -> None:
        """Wait until every process that runs forever has reported so."""
        self.wait_for(lambda: len(list(self.directory.glob("events/*.jsonl"))) == 8, 60)

    def wait_for(self, condition: Callable[[], bool], limit: float) -> None:
        """Wait until `condition` is true."""
        end = time.monotonic() + limit
        while not condition():
            assert time.monotonic() < end, f"not within {limit} s; stderr: {self.stop()}"
            time.sleep(0.02)

    def state(self, host: str) -> dict[str, Any]:
        """The status written by the agent of `host`."""
        path = self.directory / "hosts" / host / "agent-state.json"
        return json.loads(path.read_bytes())  # type: ignore[no-any-return]

    def pid(self, name: str) -> int:
        """The pid of a process of the plan, or of the agent of a host ("agent A")."""
        if name.startswith("agent "):
            return int(self.state(name.split()[1])["agent"][0])
        for host in ("central", "A"):
            if name in self.state(host)["processes"]:
                return int(self.state(host)["processes"][name][0])
        raise KeyError(name)

    def finish(self) -> "Ended":
        """Wait for launch to end."""
        output, errors = self.process.communicate(timeout=90)
        return Ended(self, self.process.returncode, output, errors)

    def stop(self) -> str:
        """Kill everything, in whatever state; returns launch's output."""
        while pids := self.pids():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        with contextlib.suppress(OSError):  # a directory that is not empty stays, for assert_clean to find
            self.temporary.rmdir()
        return self.process.communicate()[1]


@dataclass
class Ended:
    """A launch that has ended."""

    launch: Launch
    status: int
    output: str
    errors: str

    @property
    def result(self) -> dict[str, Any]:
        """The object on stdout."""
        return json.loads(self.output)  # type: ignore[no-any-return]

    def assert_clean(self) -> None:
        """No process, key file or socket is left."""
        assert self.launch.pids() == [], self.errors
        assert not (self.launch.directory / "keys").exists()
        temporary = self.launch.temporary
        assert not temporary.exists() or list(temporary.iterdir()) == []


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[dict[str, str]], Launch]]:
    """Starts a launch; its remaining processes are killed at the end of the test."""
    started: list[Launch] = []

    def begin(story: dict[str, str]) -> Launch:
        started.append(Launch(tmp_path / f"job{len(started)}", story))
        return started[-1]

    yield begin
    for launch in started:
        launch.stop()


Start = Callable[[dict[str, str]], Launch]


def test_success_prints_one_object_and_leaves_only_logs(start: Start) -> None:
    ended = start({}).finish()
    assert ended.status == 0, ended.errors
    result = ended.result
    assert (result["status"], result["accuracy"], result["rounds"]) == ("done", 0.75, 3)
    # Three workers (one of them the master, which does not count for the rate) report these bytes each.
    assert result["bytes"] == {"lan": [300, 600], "wan": [21, 27], "encoded": [0, 0]}
    assert result["samples_per_s"] == pytest.approx(2 * (64 + 64 + 24) / 1.5)
    assert 0 < result["first_step_s"] < result["total_s"]
    logs = {path.name for path in Path(result["logs"]).iterdir()}
    assert {"A-worker-0.log", "central-global_server-0.log"} < logs
    ended.assert_clean()


def test_a_second_job_in_the_same_directory_is_refused(start: Start) -> None:
    first = start({})
    assert first.finish().status == 0
    second = Launch(first.directory, {})
    ended = second.finish()
    second.stop()
    assert ended.status == 3
    assert "has a job already" in ended.errors


def test_terminal_sees_a_table(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "160"}
    command = [sys.executable, str(STAND_IN), "launch", str(tmp_path / "job"), "{}"]
    out = subprocess.DEVNULL
    done = subprocess.run(command, stdout=out, stderr=theirs, env=environment, timeout=90, check=False)
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError), os.fdopen(ours, "rb", buffering=0) as terminal:
        while part := terminal.read(1 << 16):
            text += part
    assert done.returncode == 0, text
    last = text.decode().rsplit("WAN up/down", maxsplit=1)[-1]
    row = next(line for line in last.splitlines() if line.startswith("A/worker:1"))
    assert row.split()[1:3] == ["finished", "3"]
    assert row.split()[-2:] == ["100B/200B", "7B/9B"]
    assert "finished 100%, round 3" in last


def test_script_that_raises_shows_the_exception_and_the_log(start: Start) -> None:
    ended = start({**FOREVER, "A/worker:1": "raise"}).finish()
    assert ended.status == 1
    failure = ended.result["failure"]
    assert failure["process"] == "A/worker:1"
    assert failure["cause"] == "exited with status 1: ValueError: the data set is not there"
    assert failure["tail"][0] == "A/worker:1 begins" and len(failure["tail"]) <= 15
    assert "Traceback" in ended.errors and "A-worker-1.log" in ended.errors
    ended.assert_clean()


def test_silent_process_that_others_blame_is_the_cause(start: Start) -> None:
    story = {**FOREVER, "A/worker:0": "blame A/server:0", "A/server:0": "blame central/global_server:0"}
    ended = start(story).finish()
    assert ended.status == 1
    assert ended.result["failure"]["process"] == "central/global_server:0"
    assert ended.result["failure"]["host"] == "central"
    assert "was declared lost by A/server:0" in ended.errors
    ended.assert_clean()


def test_killed_agent_is_named_and_its_processes_are_ended(start: Start) -> None:
    launch = start({**FOREVER, "A/worker:0": "family"})
    launch.wait_until_running()
    os.kill(launch.pid("agent A"), signal.SIGKILL)
    ended = launch.finish()
    assert ended.status == 1
    assert "the agent on host A died" in ended.errors
    ended.assert_clean()


def test_terminated_agent_ends_the_job(start: Start) -> None:
    launch = start(FOREVER)
    launch.wait_until_running()
    os.kill(launch.pid("agent A"), signal.SIGTERM)
    ended = launch.finish()
    assert ended.status == 1
    assert "the agent on host A ended its processes: received a signal to stop" in ended.errors
    ended.assert_clean()


def test_interrupt_stops_everything(start: Start) -> None:
    launch = start({**FOREVER, "A/worker:0": "deaf"})
    launch.wait_until_running()
    launch.process.send_signal(signal.SIGINT)
    ended = launch.finish()
    assert ended.status == 130
    assert ended.result["status"] == "interrupted"
    ended.assert_clean()


def test_interrupt_when_nothing_can_be_written_any_more(start: Start) -> None:
    launch = start(FOREVER)
    launch.wait_until_running()
    resource.prlimit(launch.process.pid, resource.RLIMIT_FSIZE, (0, 0))  # has the effect of a full disk on launch
    launch.process.send_signal(signal.SIGINT)
    ended = launch.finish()
    assert ended.status == 130, ended.errors
    assert ended.result["status"] == "interrupted"
    assert "warning" in ended.errors and "state.json cannot be written" in ended.errors
    ended.assert_clean()


def test_second_interrupt_kills_at_once(start: Start) -> None:
    launch = start({"*": "deaf"})
    launch.wait_until_running()
    launch.process.send_signal(signal.SIGINT)
    logs = [launch.directory / "hosts" / host / "agent.log" for host in ("central", "A")]
    launch.wait_for(lambda: all("asked to stop" in log.read_text() for log in logs), 60)
    launch.process.send_signal(signal.SIGINT)
    ended = launch.finish()
    assert ended.status == 130
    ended.assert_clean()


def test_killed_launch_leaves_nothing(start: Start) -> None:
    launch = start({**FOREVER, "A/worker:0": "family", "A/server:0": "deaf"})
    launch.wait_until_running()
    launch.process.kill()
    launch.wait_for(lambda: not launch.pids(), 60)
    Ended(launch, launch.process.wait(), "", "").assert_clean()


def test_stopped_launch_ends_the_job(start: Start) -> None:
    launch = start({**FOREVER, "A/worker:0": "family"})
    launch.wait_until_running()
    launch.process.send_signal(signal.SIGSTOP)
    launch.wait_for(lambda: launch.pids() == [launch.process.pid], 60)
    launch.process.send_signal(signal.SIGCONT)
    ended = launch.finish()
    assert ended.status == 1 and "the control machine has been silent" in ended.errors, ended.errors
    ended.assert_clean()


def test_stopped_agent_is_named(start: Start) -> None:
    launch = start({**FOREVER, "A/worker:0": "family"})
    launch.wait_until_running()
    os.kill(launch.pid("agent A"), signal.SIGSTOP)
    ended = launch.finish()
    assert ended.status == 1 and "the agent on host A hangs" in ended.errors, ended.errors
    ended.assert_clean()


HOSTS = {"A/worker:0": "A", "A/server:0": "A", "B/worker:0": "B"}


CUT = Failure("", "A", "cannot be reached", 9, fault="host")


def _failure(process: str, when: float, peer: str = "", why: str = "") -> Failure:
    return Failure(process, HOSTS.get(process, "A"), f"exited with status 1{why}", when, peer=peer)


def _missed(process: str, peer: str) -> Failure:
    return _failure(process, 1, peer, f": {peer} has been silent for 6 s")


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([_failure("A/worker:0", 2), _failure("A/server:0", 1)], "A/server:0"),
        ([_failure("A/worker:0", 1, "A/server:0"), _failure("A/server:0", 2)], "A/server:0"),
        ([_failure("A/worker:0", 1, "A/server:0"), _failure("B/worker:0", 2)], "B/worker:0"),
        ([_failure("A/worker:0", 1, "A/server:0")], "A/server:0"),
        ([_failure("A/worker:0", 1, "A/server:0"), _failure("A/server:0", 2, "B/worker:0")], "B/worker:0"),
        ([_failure("A/worker:0", 1, "A/server:0"), _failure("A/server:0", 2, "A/worker:0")], "A/worker:0"),
        ([_failure("A/worker:0", 1, "somebody")], "A/worker:0"),
        ([_failure("", 3), _failure("A/worker:0", 1, "A/server:0")], ""),
        ([CUT, _failure("B/worker:0", 1, "A/server:0")], ""),
        ([CUT, _failure("A/worker:0", 1, "B/worker:0")], "B/worker:0"),
        ([CUT, _failure("B/worker:0", 10)], "B/worker:0"),
        ([CUT], ""),
    ],
)
def test_first_cause(failures: list[Failure], expected: str) -> None:
    found = first_cause(failures, HOSTS)
    assert found is not None
    assert found.process == expected


def test_what_a_process_could_only_tell_another_one_is_its_own_account() -> None:
    words = ": the script raised OSError: [Errno 28] No space left on device; the disk of /jobs is full"
    found = first_cause([_failure("A/server:0", 1, "B/worker:0", words)], HOSTS)
    assert found is not None
    assert (found.process, found.cause) == ("B/worker:0", f"reported to A/server:0{words}")


@pytest.mark.parametrize(
    ("failures", "fault"),
    [
        ([_missed("B/worker:0", "A/server:0")], "link"),
        ([_missed("B/worker:0", "A/server:0"), _missed("A/server:0", "B/worker:0")], "link"),
        ([_missed("B/worker:0", "A/server:0"), _missed("A/worker:0", "A/server:0")], ""),
        ([_missed("A/worker:0", "A/server:0")], ""),
        ([_failure("B/worker:0", 1, "A/server:0")], ""),
        ([CUT, _missed("B/worker:0", "A/server:0")], "host"),
    ],
)
def test_the_link_is_blamed_where_only_another_host_misses_a_process(failures: list[Failure], fault: str) -> None:
    found = first_cause(failures, HOSTS)
    assert found is not None and found.fault == fault
    if fault == "link":
        assert "the link between hosts" in found.cause and "geomx doctor" in found.hint
