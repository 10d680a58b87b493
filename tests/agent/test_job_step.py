"""The long step on a node of an allocation, which starts commands for short ones."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from cluster import ROOT

pytestmark = pytest.mark.processes
PIPE = subprocess.PIPE


def begin(verb: str, allocation: str, *words: str) -> "subprocess.Popen[bytes]":
    """Start a step on this node."""
    command = [sys.executable, "-P", "-m", "geomx_cli.agent", verb, allocation, *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SLURMD_NODENAME": "n1", "SLURM_PROCID": "0"}
    return subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment)


def test_it_runs_commands_and_lasts_as_long_as_what_they_leave_behind(tmp_path: Path) -> None:
    allocation = uuid.uuid4().hex
    step = begin("step", allocation, "1")
    holding = begin("in-step", allocation, "cat")
    answer = begin("in-step", allocation, "sh", "-c", 'cat; echo "$SLURMD_NODENAME$SLURM_PROCID" >&2; exit 3')
    assert (*answer.communicate(b"hello"), answer.returncode) == (b"hello", b"n1\n", 3)
    absent = begin("in-step", allocation, "/no/such/program")
    assert absent.communicate()[1:] == (b"/no/such/program: No such file or directory\n",) and absent.returncode == 127
    killed = begin("in-step", allocation, "sh", "-c", "kill -9 $$")
    assert killed.wait() == 128 + 9
    assert begin("step", allocation, "60").wait() == 0, "another one listens here"
    detached = f"(setsid sh -c 'sleep 2; touch {tmp_path}/done' </dev/null >/dev/null 2>&1 &)"
    assert begin("in-step", allocation, "sh", "-c", detached).wait() == 0
    assert step.poll() is None
    assert holding.communicate(b"bye")[0] == b"bye"
    assert step.wait() == 0
    assert (tmp_path / "done").exists()
