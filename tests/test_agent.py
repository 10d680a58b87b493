"""The agent and the local host: what a process is started with, what is reported, and that nothing is left.
"""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from geomx_cli.agent import processes
from geomx_cli.agent.assignment import AgentState, Assignment, Task
from geomx_cli.agent.processes import Identity
from geomx_cli.agent.reaper import reap
from geomx_cli.errors import TimedOut
from geomx_cli.hosts.local import LocalHost

ROOT = Path(__file__).parent.parent
MARK = {"GEOMX_JOB": f"agent-test-{os.getpid()}", "GEOMX_HOST": "here"}
SLEEP = "import signal; signal.pause()"
# A child of a child in a session of its own, whose parent ends at once: what a daemon does.
DAEMON = (
    "import subprocess, sys;"
    "subprocess.run([sys.executable, '-c', 'import subprocess;"
    ' subprocess.Popen(["sleep", "1000"], start_new_session=True)\'])'
)


class Agent:
    """A real agent with tasks of ours, and the control machine's end of its socket."""

    def __init__(self, directory: Path, **programs: str) -> None:
        self.directory = directory
        self.sockets = directory / "s"
        self.begin([self.task(name, program) for name, program in programs.items()])

    def task(self, name: str, program: str) -> Task:
        """A program in Python, or the path of one; with a key file."""
        key = str(self.directory / "keys" / f"{name}.key")
        LocalHost().put(key, b"secret")
        argv = (program,) if program.startswith("/") else (sys.executable, "-c", program)
        return Task(name, argv, {**MARK, "GEOMX_PROCESS": name, "GEOMX_KEY_FILE": key})

    def begin(self, tasks: Sequence[Task]) -> None:
        """Write agent.json, start the agent and connect."""
        assignment = Assignment(
            job=MARK["GEOMX_JOB"], host="here", job_dir=str(self.directory), sockets=str(self.sockets),
            socket=str(self.sockets / "agent.sock"), working_dir=str(self.directory), clear=("PORT",),
            tasks=tuple(tasks),
        )  # fmt: skip
        (self.directory / "agent.json").write_bytes(assignment.encode())
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "DMLC_ROLE": "stale", "PORT": "99", "KEPT": "1"}
        with (self.directory / "agent.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "geomx_cli.agent", str(self.directory)],
                stdin=subprocess.DEVNULL, stderr=log, env=environment, start_new_session=True,
            )  # fmt: skip
        self.stream = self._connect(assignment.socket)
        self.lines = self.stream.makefile("rb")

    def _connect(self, path: str) -> socket.socket:
        end = time.monotonic() + 10
        while True:
            stream = socket.socket(socket.AF_UNIX)
            try:
                stream.connect(path)
                return stream
            except OSError:
                stream.close()
                assert self.process.poll() is None, (self.directory / "agent.log").read_text()
                assert time.monotonic() < end
                time.sleep(0.01)

    def send(self, **message: Any) -> None:
        """Tell the agent something."""
        self.stream.sendall(json.dumps(message).encode() + b"\n")

    def until(self, kind: str) -> list[dict[str, Any]]:
        """What the agent says up to the first message of this kind."""
        said: list[dict[str, Any]] = []
        for line in self.lines:
            said.append(json.loads(line))
            if said[-1]["type"] == kind:
                return said
        pytest.fail(f"no {kind} among {said}; {(self.directory / 'agent.log').read_text()}")

    def assert_clean(self) -> None:
        """It has ended, and left nothing."""
        self.process.wait(10)
        assert processes.marked(MARK) == []
        assert not self.sockets.exists()
        assert not (self.directory / "keys").exists()

    def close(self) -> None:
        """End everything."""
        self.lines.close()
        self.stream.close()
        self.process.kill()
        self.process.wait()
        processes.end(lambda: processes.marked(MARK), 5)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Any]:
    """Starts an agent; it is ended with the test."""
    made: list[Agent] = []

    def start(**programs: str) -> Agent:
        made.append(Agent(tmp_path, **programs))
        return made[-1]

    yield start
    for agent in made:
        agent.close()


def test_process_gets_its_own_session_environment_and_log(agents: Any) -> None:
    program = (
        "import os, json, sys; print(json.dumps([os.getsid(0) == os.getpid(), sys.stdin.read(), os.getcwd(),"
        " dict(os.environ)])); print('to stderr', file=sys.stderr)"
    )
    agent = agents(one=program)
    agent.send(type="start")
    said = agent.until("done")
    assert [message["type"] for message in said] == ["hello", "started", "ended", "done"]
    first, second = (agent.directory / "logs" / "one.log").read_text().splitlines()
    leads, standard_input, directory, environment = json.loads(first)
    assert (leads, standard_input, directory, second) == (True, "", str(agent.directory), "to stderr")
    assert environment["GEOMX_PROCESS"] == "one" and environment["KEPT"] == "1"
    assert "DMLC_ROLE" not in environment and "PORT" not in environment
    agent.assert_clean()
    assert agent.process.returncode == 0


def test_failure_carries_cause_and_end_of_log(agents: Any) -> None:
    agent = agents(one="for i in range(40): print(i)\nraise KeyError('batch')", two=SLEEP)
    agent.send(type="start")
    said = agent.until("done")
    failure = next(message["failure"] for message in said if message["type"] == "failure")
    assert (failure["process"], failure["peer"]) == ("one", "")
    assert failure["cause"] == "exited with status 1: KeyError: 'batch'"
    assert len(failure["tail"]) == 15 and failure["tail"][-1] == "KeyError: 'batch'"
    assert {(m["process"], m["status"]) for m in said if m["type"] == "ended"} == {("one", 1), ("two", -15)}
    assert "one exited" in said[-1]["why"]
    agent.assert_clean()


def test_program_that_is_not_there_is_reported(agents: Any) -> None:
    agent = agents(one="/no/such/python", two=SLEEP)
    agent.send(type="start")
    said = agent.until("done")
    failure = next(message["failure"] for message in said if message["type"] == "failure")
    assert failure["cause"] == "could not be started: No such file or directory: /no/such/python"
    agent.assert_clean()


def test_events_are_forwarded_of_rounds_the_first_and_the_newest(agents: Any) -> None:
    program = (
        "import json, os, time; os.mkdir('events'); file = open('events/one.jsonl', 'w')\n"
        "then = time.time() - 5\n"
        "for n in range(50): print(json.dumps({'time': then, 'event': 'round', 'n': n}), file=file)\n"
        "print(json.dumps({'time': time.time(), 'event': 'evaluation', 'accuracy': 0.5}), file=file)"
    )
    agent = agents(one=program)
    agent.send(type="start")
    events = [message for message in agent.until("done") if message["type"] == "event"]
    rounds = [message["event"]["n"] for message in events if message["event"]["event"] == "round"]
    assert (rounds[0], rounds[-1]) == (0, 49) and len(rounds) < 50
    assert 5 <= events[0]["age"] < 30
    assert [m["event"]["accuracy"] for m in events if m["event"]["event"] == "evaluation"] == [0.5]


def test_what_a_finished_process_leaves_behind_is_ended(agents: Any) -> None:
    agent = agents(one=DAEMON)
    agent.send(type="start")
    assert agent.until("done")[-1]["left"] == []
    agent.assert_clean()


@pytest.mark.parametrize("farewell", [b"", b"this is no JSON\n", b"[1]\n"])
def test_control_machine_that_leaves_or_talks_nonsense_ends_the_job(agents: Any, farewell: bytes) -> None:
    agent = agents(one=SLEEP, two=DAEMON + ";" + SLEEP)
    agent.send(type="start")
    agent.until("started")
    if farewell:
        agent.stream.sendall(farewell)
    else:
        agent.stream.shutdown(socket.SHUT_RDWR)
    agent.assert_clean()


def test_socket_is_private(agents: Any) -> None:
    agent = agents(one=SLEEP)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (agent.sockets, agent.sockets / "agent.sock")]
    assert modes == [0o700, 0o600]


def test_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o755)
    sockets = str(tmp_path / "s")
    assignment = Assignment("job", "here", str(tmp_path), sockets, f"{sockets}/a", "", (), ())
    (tmp_path / "agent.json").write_bytes(assignment.encode())
    host = LocalHost()
    done = host.run([host.python, "-m", "geomx_cli.agent", str(tmp_path)], limit=20)
    assert done.status == 1
    assert b"only you can enter" in done.errors


def test_reaping_after_the_agent_was_killed(agents: Any) -> None:
    agent = agents(one=DAEMON + ";" + SLEEP, two=SLEEP)
    agent.send(type="start")
    agent.until("started")
    end = time.monotonic() + 10
    while not any("sleep" in _command(who) for who in processes.marked(MARK)):
        assert time.monotonic() < end
        time.sleep(0.02)
    agent.process.kill()
    agent.process.wait()
    assert reap(agent.directory) == []
    agent.assert_clean()


def test_reaping_an_agent_that_has_written_nothing(agents: Any) -> None:
    agent = agents(one=SLEEP)
    agent.until("hello")
    (agent.directory / "agent-state.json").unlink()
    os.kill(agent.process.pid, signal.SIGSTOP)
    assert reap(agent.directory) == []
    agent.assert_clean()


def test_reaping_spares_a_process_that_has_the_pid_of_one_of_ours(agents: Any) -> None:
    agent = agents(one=SLEEP)
    bystander = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    known = AgentState.read(agent.directory)
    assert known is not None
    who = processes.identify(bystander.pid)
    assert who is not None and processes.state(who) in "SRD"
    stale = Identity(who.pid, who.started - 1)
    AgentState(known.agent, {"one": stale}, known.boot).write(agent.directory)
    try:
        assert reap(agent.directory) == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    agent.assert_clean()


def test_local_host_puts_files_at_once_and_with_their_mode(tmp_path: Path) -> None:
    host, path = LocalHost(), tmp_path / "deep" / "er" / "file"
    host.put(str(path), b"one", 0o640)
    host.put(str(path), b"two")
    assert host.get(str(path)) == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]
    with pytest.raises(FileNotFoundError):
        host.get(str(tmp_path / "none"))


def test_local_host_runs_commands_with_a_limit() -> None:
    host = LocalHost()
    program = "import sys; print(sys.stdin.read()); sys.exit(3)"
    done = host.run([sys.executable, "-c", program], data=b"in", limit=20)
    assert (done.status, done.output, done.errors) == (3, b"in\n", b"")
    program = "import os; os.kill(os.getpid(), 9)"
    assert host.run([sys.executable, "-c", program], limit=20).status == -signal.SIGKILL
    with pytest.raises(TimedOut):
        host.run(["sleep", "1000"], limit=0.1)


def test_local_host_names_an_agent_that_ends_before_it_listens(tmp_path: Path) -> None:
    host = LocalHost()
    pid = host.start([sys.executable, "-c", "print('no')"], log=str(tmp_path / "log"))
    with pytest.raises(ConnectionError):
        host.connect(str(tmp_path / "socket"), pid, 20)
    assert host.get(str(tmp_path / "log")) == b"no\n"


def _command(who: Identity) -> str:
    try:
        return Path(f"/proc/{who.pid}/cmdline").read_text()
    except OSError:
        return ""
