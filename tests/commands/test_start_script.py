"""`geomx launch --dry-run --shell`: the start script, run by a shell with a stand-in for Python."""

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import until
from desk import Desk

pytestmark = pytest.mark.processes

INVENTORY = """\
[defaults]
python = "{python}"
devices = ["cpu"]
[[host]]
name = "a1"
party = "A"
ssh = "192.0.2.1"
[[host]]
name = "b1"
party = "B"
ssh = "192.0.2.2"
"""
PYTHON = """\
#!/bin/sh
test -d "$GEOMX_OUTPUT_DIR" || [ "$DMLC_ROLE" != worker ] || exit 9
echo "$GEOMX_PROCESS"
{command}
"""


@pytest.fixture
def script(desk: Desk, tmp_path: Path) -> Callable[..., Path]:
    """Makes the script of two hosts whose Python runs a shell command instead."""

    def make(command: str) -> Path:
        python = tmp_path / "python"
        python.write_text(PYTHON.format(command=command))
        python.chmod(0o755)
        inventory = tmp_path / "hosts.toml"
        inventory.write_text(INVENTORY.format(python=python))
        text = desk.geomx("launch", "--hosts", str(inventory), "--dry-run", "--shell").stdout
        path = tmp_path / "start.sh"
        path.write_text(text.replace("/tmp/gx", str(tmp_path / "gx")))
        return path

    return make


def test_the_users_script_may_be_on_the_hosts_only(desk: Desk, tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.toml"
    inventory.write_text(INVENTORY.format(python="python3"))
    done = desk.geomx("launch", "--hosts", str(inventory), "--dry-run", "--shell", "--", "python", "absent.py")
    assert "absent.py" in done.stdout


def test_it_starts_the_processes_of_a_host_and_cleans_up(script: Callable[..., Path], tmp_path: Path) -> None:
    path = script("exit 0")
    assert not re.search("@[A-Z]+@", path.read_text()), "no placeholder is left"
    done = _run(path, "b1", tmp_path)
    assert done.returncode == 0, done.stderr
    first, last = done.stderr.splitlines()
    (logs,) = (tmp_path / "state" / "geomx" / "jobs").glob("*/logs")
    job = logs.parent.name
    assert first == f"job {job}: its 4 processes are starting on b1; logs: {logs}"
    assert last == f"job {job}: all its processes on this host have ended without errors"
    assert (logs / "B-worker-0.log").read_text() == "B/worker:0\n"
    assert (logs.parent / "outputs" / "B-worker-0").is_dir()
    assert not list(tmp_path.glob("gx*")), "the folder of sockets is removed"


def test_it_names_the_process_that_failed(script: Callable[..., Path], tmp_path: Path) -> None:
    done = _run(script('[ "$GEOMX_PROCESS" != B/worker:0 ] || exit 3'), "b1", tmp_path)
    (logs,) = (tmp_path / "state" / "geomx" / "jobs").glob("*/logs")
    assert done.returncode == 3
    assert done.stderr.splitlines()[1:] == [f"B-worker-0 ended with exit status 3: {logs}/B-worker-0.log"]
    assert not list(tmp_path.glob("gx*"))


def test_an_interrupt_ends_what_it_has_started(script: Callable[..., Path], tmp_path: Path) -> None:
    path = script("exec sleep 60")
    with subprocess.Popen(["sh", path, "b1"], env=_environment(tmp_path), stderr=subprocess.PIPE, text=True) as run:
        jobs = tmp_path / "state" / "geomx" / "jobs"
        until(lambda: any(log.read_text() for log in jobs.glob("*/logs/B-worker-0.log")))
        run.send_signal(signal.SIGTERM)
        _, errors = run.communicate(timeout=30)
    assert run.returncode == 130
    job = next(jobs.iterdir()).name
    assert errors.splitlines()[-1] == f"job {job}: interrupted; its processes on this host have ended"
    assert not list(tmp_path.glob("gx*"))


def test_an_interrupt_between_two_starts_ends_both(script: Callable[..., Path], tmp_path: Path) -> None:
    path = script('case $GEOMX_PROCESS in */scheduler:0) kill -TERM $PPID;; esac; exec sleep 60')
    done = _run(path, "b1", tmp_path)
    assert done.returncode == 130
    assert done.stderr.endswith("interrupted; its processes on this host have ended\n")
    assert not list(tmp_path.glob("gx*"))


def test_it_asks_for_a_host_of_the_plan(script: Callable[..., Path], tmp_path: Path) -> None:
    done = _run(script("exit 0"), "c1", tmp_path)
    assert done.returncode == 2 and "one of: a1 b1" in done.stderr


def _run(path: Path, host: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["sh", path, host], env=_environment(folder), capture_output=True, text=True, timeout=240, check=False
    )


def _environment(folder: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(folder), "XDG_STATE_HOME": str(folder / "state")}
