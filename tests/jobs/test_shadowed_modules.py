"""Files in a job's working directory that are named like modules of Python or others are never executed."""

import os
from pathlib import Path

import pytest
from cluster import RUNTIME, Cluster
from desk import Desk
from idx import write_data

pytestmark = pytest.mark.processes
MODULES = (
    "selectors", "random", "queue", "heapq", "struct", "json", "socket", "numpy", "zmq", "msgspec", "click", "rich",
    "psutil", "mxnet", "sitecustomize",
)  # fmt: skip


def plant(folder: Path) -> Path:
    """Create such files; returns the file in which they record their execution."""
    said = folder / "said.txt"
    for name in MODULES:
        (folder / f"{name}.py").write_text(f"open({str(said)!r}, 'a').write(__name__ + ' ')\n")
    return said


def test_nothing_of_a_launched_job_runs_them(desk: Desk, tmp_path: Path) -> None:
    said, data = plant(desk.folder), write_data(tmp_path / "data")
    words = ["--local", "--parties", "1", "--network", "linear", "--data-dir", str(data), "--batch-size", "32"]
    desk.forks = False
    assert desk.geomx("doctor", "--local", "--quick").returncode == 0
    done = desk.geomx("launch", *words, "--epochs", "2")
    assert done.returncode == 0, done.stderr
    forever = desk.geomx("launch", *words, "--epochs", "100000", "--detach")
    assert forever.returncode == 0, forever.stderr
    for command in (["status"], ["logs", "-n", "1"], ["logs", "collect", "--to", "out"], ["stop"]):
        done = desk.geomx(*command)
        assert done.returncode == 0, (command, done.stderr)
    assert not said.exists(), said.read_text()


def test_nothing_that_is_started_by_hand_runs_them(cluster: Cluster, tmp_path: Path) -> None:
    said, data = plant(cluster.directory), write_data(tmp_path / "data")
    cluster.forks = False
    env = {"GEOMX_NETWORK": "linear", "GEOMX_DATA_DIR": str(data), "GEOMX_EPOCHS": "1"}
    cluster.launch_flat(RUNTIME, workers=1, env=env)
    cluster.finish()
    assert not said.exists(), said.read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change the owner of a file")
def test_a_folder_of_another_user_is_refused(desk: Desk) -> None:
    theirs = desk.folder / "theirs"
    theirs.mkdir()
    os.chown(theirs, 65_534, 65_534)
    done = desk.geomx("launch", "--local", "--network", "linear", "--job-dir", str(theirs))
    assert done.returncode == 5, done.stderr
    assert f"{theirs} cannot be trusted: it belongs to another user" in done.stderr
    assert not (theirs / "plan.json").exists()


def test_a_folder_that_others_may_write_to_is_made_private_and_not_believed_later(desk: Desk) -> None:
    folder = desk.folder / "job"
    folder.mkdir()
    folder.chmod(0o777)
    launch = desk.launch("--job-dir", str(folder), "--detach")
    assert launch.finish() == 0, launch.errors
    launch.wait_until_running()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    for command in ("stop", "status", "attach"):
        done = desk.geomx(command)
        assert done.returncode == 5, (command, done.stderr)
        assert f"others can write to {folder}" in done.stderr and "chmod go-w" in done.stderr
    assert len(launch.pids()) > 8, "nothing was stopped"
    folder.chmod(0o700)
    assert desk.geomx("stop").returncode == 0 and not launch.pids()
