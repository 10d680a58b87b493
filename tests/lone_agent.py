"""A real agent without a launch: the test is its control machine."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cluster import ROOT

from geomx_cli.agent import processes, state_folder
from geomx_cli.agent.agent_state import AgentState
from geomx_cli.agent.host_spec import FileDigest, HostSpec, Task
from geomx_cli.hosts.local import LocalConnector

__all__ = ["MARK", "Agent"]

MARK = {"GEOMX_JOB": f"agent-test-{os.getpid()}", "GEOMX_HOST": "here"}


class Agent:
    """A real agent with tasks of ours, and the command that started it and relays; the test is the control machine."""

    program: Sequence[str] = ("-m", "geomx_cli.agent")
    lease, grace, restarts = 6.0, 2.0, 0

    def __init__(
        self, directory: Path, lease: float = 6, grace: float = 2, restarts: int = 0, **programs: str
    ) -> None:
        self.directory = directory
        self.lease, self.grace, self.restarts = lease, grace, restarts
        self.sockets = directory / "s"
        self.begin([self.task(name, program) for name, program in programs.items()])

    def task(self, name: str, program: str) -> Task:
        """A Python program, or the path of one, as a task with a key file."""
        key = str(self.directory / "keys" / f"{name}.key")
        LocalConnector().put(key, b"secret")
        argv = (program,) if program.startswith("/") else (sys.executable, "-c", program)
        role = {"DMLC_ROLE": "server"} if name == "server" else {}
        return Task(name, argv, {**MARK, **role, "GEOMX_PROCESS": name, "GEOMX_KEY_FILE": key})

    def begin(self, tasks: Sequence[Task], files: Mapping[str, FileDigest] = {}) -> None:
        """Write agent.json and start the agent."""
        host_spec = HostSpec(
            job=MARK["GEOMX_JOB"], host="here", job_dir=str(self.directory), sockets=str(self.sockets),
            socket=str(self.sockets / "agent.sock"), working_dir=str(self.directory), clear=("PORT",),
            tasks=tuple(tasks), lease=self.lease, grace=self.grace, files=files,
            restarts=self.restarts,
        )  # fmt: skip
        (self.directory / "agent.json").write_bytes(host_spec.encode())
        self.process = self.command("run")
        self.send(type="hello")

    def command(self, verb: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a relaying command."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "DMLC_ROLE": "stale", "PORT": "99", "KEPT": "1"}
        return subprocess.Popen(
            [sys.executable, *self.program, verb, str(self.directory), *arguments], bufsize=0, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def attach(self, seen: int = 0) -> None:
        """Connect to the agent through another command from now on."""
        close_command(self.process)
        self.process = self.command("attach")
        self.send(type="hello", seen=seen)

    @property
    def pid(self) -> int:
        """The agent's pid."""
        state = AgentState.read(self.directory)
        assert state is not None
        return state.agent.pid

    def runs(self) -> bool:
        """Whether the agent still runs."""
        state = AgentState.read(self.directory)
        return state is not None and processes.exists(state.agent)

    def send(self, **message: Any) -> None:
        """Send a message to the agent."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")

    def until(self, kind: str) -> list[dict[str, Any]]:
        """Receive messages up to the first of this kind."""
        said: list[dict[str, Any]] = []
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            said.append(json.loads(line))
            if said[-1]["type"] == kind:
                return said
        pytest.fail(f"no {kind} among {said}; {(self.directory / 'agent.log').read_text()}")

    def assert_clean(self) -> None:
        """The agent has ended and left nothing behind."""
        self.process.wait(240)
        end = time.monotonic() + 10
        # the command waits a second at most for the agent; a process that was just being forked ends by itself
        while (self.runs() or processes.marked(MARK)) and time.monotonic() < end:
            time.sleep(0.02)
        assert not self.runs()
        assert processes.marked(MARK) == []
        assert not self.sockets.exists()
        assert not (self.directory / "keys").exists()
        assert state_folder.found(self.directory) == []

    def close(self) -> None:
        """Kill everything."""
        close_command(self.process)
        processes.kill_all(lambda: processes.with_arguments("run", str(self.directory)), 5)
        processes.kill_all(lambda: processes.marked(MARK), 5)


def close_command(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        assert stream is not None
        stream.close()
