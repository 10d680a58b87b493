"""A live but stuck worker is named, by whichever process detects it first, before the others' patience ends."""

import os
import re
import signal
from pathlib import Path

from cluster import Cluster, until
from mxnet_scripts import hooked
from rounds import SCRIPT


def launch(cluster: Cluster, tmp_path: Path, stuck: str = "", *, flat: bool = False, **shape: object) -> None:
    """Start named processes; `stuck` sleeps before its first push."""
    cluster.environment |= {"OUT": str(tmp_path / "w{rank}.npz"), "GEOMX_PATIENCE": "3s", "SERVER_OPTIMIZER": "1"}
    names = ("gs", "root0", "cs", "master", "s", "srv0", "w0", "w1", "As", "Asrv0", "Aw0", "Aw1", "Bs", "Bsrv0", "Bw0")
    for name in names:
        cluster.each[name] = {"GEOMX_PROCESS": name, **cluster.each.get(name, {})}
    cluster.each.setdefault(stuck, {})["SLOW"] = "1000"
    (cluster.launch_flat if flat else cluster.launch)(SCRIPT, **shape)  # type: ignore[operator]


def assert_all_name(cluster: Cluster, stuck: str, message: str) -> None:
    """Every process but the stuck one ends and prints the reason."""
    others = {name: process for name, process in cluster.processes.items() if name != stuck}
    until(lambda: all(process.poll() is not None for process in others.values()))
    for name, process in others.items():
        if process.returncode or name != "master":  # which may have left before
            said = re.search(message, cluster.output(name))
            assert (process.returncode, said is not None) == (1, True), cluster.outputs()


def test_its_server_names_a_stuck_worker_and_warns_before(cluster: Cluster, tmp_path: Path) -> None:
    launch(cluster, tmp_path, "Aw1", parties=(2, 1))
    assert_all_name(cluster, "Aw1", r"Aw1 has not contributed to round 1 for \d+ s, while others have")
    server = cluster.output("Asrv0")
    assert re.search(r"warning: Aw1 has not contributed to round 1 for \d+ s, while others have", server)
    assert "is it stuck or out of step? --patience (3s)" in server
    assert "has not contributed" not in cluster.output("Bsrv0").split("error:")[0], "it waits for the root"


def test_a_root_asks_the_party_of_which_nothing_comes(cluster: Cluster, tmp_path: Path) -> None:
    launch(cluster, tmp_path, "Bw0", parties=(2, 1))
    assert_all_name(cluster, "Bw0", r"Bw0 has not contributed to round 1 for \d+ s, while others have")
    assert "warning: Bw0 has not contributed" in cluster.output("root0")


def test_in_a_flat_cluster(cluster: Cluster, tmp_path: Path) -> None:
    launch(cluster, tmp_path, "w1", flat=True, workers=2)
    assert_all_name(cluster, "w1", r"w1 has not contributed to round 1 for \d+ s, while others have")


def test_who_does_not_come_to_a_barrier_is_named(cluster: Cluster, tmp_path: Path) -> None:
    open_gates, late = tmp_path / "open", tmp_path / "late"
    for folder, gates in ((open_gates, ("declare", "barrier", "leave", "close")), (late, ("declare",))):
        folder.mkdir()
        for gate in gates:
            (folder / gate).touch()
    cluster.environment["GATES"] = str(open_gates)
    cluster.each["Bw0"] = {"GATES": str(late), "LOOK": "1000"}  # one that looks now and then runs, and is waited for
    launch(cluster, tmp_path, parties=(2, 1))
    assert_all_name(cluster, "Bw0", r"Bw0 has not reached a barrier for \d+ s, while others have")


def test_a_master_that_never_sets_the_job_up_is_named(cluster: Cluster) -> None:
    argv, env = hooked("unaware.py", "1000")
    cluster.environment["GEOMX_PATIENCE"] = "3s"
    cluster.launch(argv, env=env, parties=(1, 1), worker_env={"master": {"GEOMX_PROCESS": "master"}})
    message = r"master has not set an optimizer, pulled or left for \d+ s, and the first round waits for that"
    assert_all_name(cluster, "master", message)


def test_a_worker_that_dies_as_soon_as_it_has_joined_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """Before any heartbeat of the new connection has been answered."""
    cluster.environment = {"GATES": str(tmp_path)}
    cluster.launch(SCRIPT)
    until(lambda: "at declare" in cluster.output("Aw0"))
    os.killpg(cluster.processes["Aw0"].pid, signal.SIGKILL)
    for gate in ("declare", "leave"):
        (tmp_path / gate).touch()
    statuses = cluster.wait()
    assert statuses["As"] and "has been gone for 1" in cluster.output("As"), cluster.outputs()
