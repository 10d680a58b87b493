"""The long step on a node of an allocation, which starts commands for short ones."""

import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from cluster import ROOT

from geomx_cli.agent.job_step import _address

pytestmark = pytest.mark.processes
PIPE = subprocess.PIPE
NODE = "n1"


def begin(verb: str, allocation: str, *words: str) -> "subprocess.Popen[bytes]":
    """Start a step on this node."""
    command = [sys.executable, "-P", "-m", "geomx_cli.agent", verb, allocation, *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SLURMD_NODENAME": NODE, "SLURM_PROCID": "0"}
    return subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment)


def run(*words: str, given: bytes = b"") -> tuple[int, bytes, bytes]:
    """Run a step to its end; returns its exit status, output and errors."""
    process = begin(*words)
    output, errors = process.communicate(given)
    return process.returncode, output, errors


def test_it_runs_commands_and_lasts_as_long_as_what_they_leave_behind(tmp_path: Path) -> None:
    one = uuid.uuid4().hex
    step, holding = begin("step", one, "1"), begin("in-step", one, "cat")
    words = ("sh", "-c", 'cat; echo "$SLURMD_NODENAME$SLURM_PROCID" >&2; exit 3')
    assert run("in-step", one, *words, given=b"hello") == (3, b"hello", b"n1\n")
    assert run("in-step", one, "/no/such/program") == (127, b"", b"/no/such/program: No such file or directory\n")
    assert run("in-step", one, "sh", "-c", "kill -9 $$") == (128 + 9, b"", b"")
    taken = f"the step {one} cannot listen on this node: Address already in use\n"
    assert run("step", one, "60") == (1, b"", taken.encode())
    detached = f"(setsid sh -c 'sleep 2; touch {tmp_path}/done' </dev/null >/dev/null 2>&1 &)"
    assert run("in-step", one, "sh", "-c", detached) == (0, b"", b"")
    assert step.poll() is None
    assert holding.communicate(b"bye")[0] == b"bye"
    step.communicate()
    assert step.returncode == 0 and (tmp_path / "done").exists()


def test_it_ends_after_the_others_when_the_allocation_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = f"geomx-{uuid.uuid4().hex}-{'long' * 8}"
    monkeypatch.setenv("SLURMD_NODENAME", NODE)
    monkeypatch.chdir(tmp_path)
    Path(one).mkdir(mode=0o755)  # a folder of the user, which is none of geomx
    step, holding = begin("step", one, "600"), begin("in-step", one, "cat")
    assert holding.stdin is not None and holding.stdout is not None
    holding.stdin.write(b"x")
    holding.stdin.flush()
    assert holding.stdout.read(1) == b"x", "it holds the step"
    assert run("in-step", one, "true")[0] == 0
    for request in (b"[]", b'{"command": 5, "directory": "/"}'):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(_address(one))
            socket.send_fds(stranger, [request], range(3))
            assert not stranger.recv(1), "it goes on"
    step.terminate()
    assert run("in-step", one, "sh", "-c", "exit 4")[0] == 4, "others need it for their end"
    assert holding.communicate(b"bye")[0] == b"bye"
    step.communicate()
    assert step.returncode == 0
