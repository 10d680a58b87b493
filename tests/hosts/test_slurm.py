"""Jobs on nodes of a real Slurm: geomx asks for them, gives them back however the job ends, and uses those that it was
started on.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import slurm_cluster
from cluster import free_ports, until
from desk import Desk
from idx import write_data
from slurm_cluster import SlurmCluster
from sshd import Person, Sshd

from geomx_cli.core import plugins
from geomx_cli.core.conventions import module_command
from geomx_cli.core.errors import HostUnreachable, TimedOut, UsageError
from geomx_cli.hosts.local import LocalConnector
from geomx_cli.hosts.slurm import SlurmConnector, find_job
from geomx_cli.inventory import Host, Local, Request, Requested, Slurm
from geomx_cli.plan import JobSpec

pytestmark = [
    pytest.mark.processes, pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing())
]  # fmt: skip


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A Slurm of four nodes."""
    made = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture
def desk(tmp_path: Path, slurm: SlurmCluster) -> Iterator[Desk]:
    """A desk on a login node of the Slurm, where nothing is left in the queue at the end."""
    made = Desk(tmp_path, environment={"SLURM_CONF": str(slurm.conf)})
    yield made
    made.close()
    slurm.call("scancel", "--user=root")


def test_two_parties_of_which_one_waits_behind_ssh(
    desk: Desk, slurm: SlurmCluster, machines: Callable[..., Sshd], person: Person, tmp_path: Path
) -> None:
    home = tmp_path / "machines" / "login" / "home"
    login = machines("login", settings=[f"SetEnv HOME={home} SLURM_CONF={slurm.conf}"])
    keys = [
        'partition = "q"', f'login = "{login.address}"', f"ssh_port = {login.port}", f'key = "{person.key}"',
        f'fingerprint = "{login.fingerprint}"', 'time = "10m"', 'sbatch = ["--comment=hello"]',
        f'state_dir = "{desk.state}/geomx"',
    ]  # fmt: skip
    apptainer = tmp_path / "apptainer"
    apptainer.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nshift 2\nexec "$@"\n')
    apptainer.chmod(0o755)
    desk.environment["PATH"] += f"{os.pathsep}{tmp_path}"
    slurm.set_nodes("n[3-4]", "drain")
    contained = {"central": ['container = "/images/geomx.sif"'], "A": keys}
    job = desk.launch(allocator="slurm", story={"*": ""}, keys=contained)
    job.wait_for(lambda: [slurm.jobs().get(name, (0, ""))[1] for name in ("central", "A")] == ["RUNNING", "PENDING"])
    shown = slurm.call("scontrol", "show", "job", str(slurm.jobs()["A"][0]))
    assert {"TimeLimit=00:10:00", "Partition=q", "Comment=hello"} <= {*shown.split()}
    slurm.set_nodes("n[3-4]", "resume")
    assert job.finish() == 0
    assert "A waits in the queue of Slurm (" in job.errors and "place 1 of 1" in job.errors
    assert "A has its 1 machine" in job.errors
    job.wait_for(lambda: not slurm.jobs(), 30)
    job.assert_clean()
    calls = (tmp_path / "calls").read_text().splitlines()
    python = job.mark and desk.folder / f"{job.mark}.sh"
    begin = f"exec /images/geomx.sif {python} -P -m geomx_cli.agent"
    assert {call.split(" ")[6] for call in calls if call.startswith(begin)} == {"step", "in-step"}
    hosts = json.loads((job.directory / "inventory.json").read_bytes())["hosts"]
    assert {host["access"]["node"] for host in hosts} < {"n1", "n2", "n3", "n4"} and len(hosts) == 2
    assert "A/worker:0 begins" in desk.geomx("logs", job.id, "--role", "worker").stdout, "of nodes that are released"


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("scancel A", "Slurm job {A} for A was cancelled"), ("node of A fails", "Slurm job {A} for A has lost a node"),
        ("time limit of A", ""), ("Ctrl-C", ""),
    ],
)  # fmt: skip
def test_an_end_from_outside(desk: Desk, slurm: SlurmCluster, end: str, why: str) -> None:
    job = desk.launch("--grace", "2s", allocator="slurm", story={"*": "forever"}).wait_until_running()
    ids = {name: number for name, (number, _) in slurm.jobs().items()}
    match end.split():
        case ["scancel", _]:
            slurm.call("scancel", str(ids["A"]))
        case ["time", *_]:  # what --signal=B:USR1@TIME lets Slurm do
            slurm.call("scancel", "--batch", "--signal=USR1", str(ids["A"]))
        case ["node", *_]:
            node = slurm.call("squeue", "--noheader", f"--jobs={ids['A']}", "--format=%N").strip()
            slurm.set_nodes(node, "down")
        case _:
            job.process.send_signal(2)
    status = job.finish()
    assert status in ((1, 130) if why else (130,))
    assert why.format(**ids) in job.errors
    job.wait_for(lambda: not slurm.jobs(), 30)
    slurm.repair()
    job.assert_clean()
    assert why or not list(desk.folder.glob(".local/state/geomx/*")), "the output of the batch scripts"


def test_inside_an_allocation_that_ends_and_inside_the_next(desk: Desk, slurm: SlurmCluster) -> None:
    write_data(desk.folder / "data", 64, 16)
    train = ["--network", "linear", "--data-dir", "data", "--batch-size", "8", "--epochs", "100000", "--grace", "5s"]
    first, out = submit(desk, "p", "launch", "--job-dir", "job", *train)
    events = desk.folder / "job" / "events" / "A-worker-0.jsonl"
    until(lambda: events.exists() and events.read_text().count('"round"') > 3, 120, out.read_text)
    slurm.call("scancel", "--batch", "--signal=USR1", slurm.call("squeue", "--noheader", "--format=%A").strip())
    assert first.wait(120) == 75, out.read_text()
    said = out.read_text()
    assert "2 nodes (n[1-2]); party A has 2 nodes and 2 workers; --parties and --workers change this" in said
    plan = json.loads((desk.folder / "job" / "plan.json").read_bytes())
    assert {process["host"] for process in plan["processes"]} == {"central", "n1", "n2"}
    second, out = submit(desk, "q", "launch", "--job-dir", "again", "--resume", "./job", "--time-limit", "2s")
    assert second.wait(120) == 0, out.read_text()
    said = out.read_text()
    assert "(n[3-4])\n" in said and "\ngoing on from the checkpoint of " in said
    hosts = json.loads((desk.folder / "again" / "inventory.json").read_bytes())["hosts"]
    assert [host["access"]["node"] for host in hosts] == ["n3", "n3", "n4"]


def test_tasks_and_gpus_of_an_allocation(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    find = plugins.find("allocator", "slurm").present  # type: ignore[attr-defined]
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2,04]", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    assert find({}) is None
    assert find(job).devices == {"n1": ("cpu",), "n2": ("cpu",), "n04": ("cpu",)}
    tasks = find({**job, "SLURM_NTASKS": "5", "SLURM_CPUS_PER_TASK": "8"})
    assert (list(map(len, tasks.devices.values())), tasks.threads, tasks.title) == ([2, 2, 1], 8, "Slurm job 7")
    assert find({**job, "SLURM_GPUS_ON_NODE": "2"}).devices["n04"] == ("gpu0", "gpu1")
    assert find({**job, "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "2,3"}).devices["n1"] == ("gpu2", "gpu3")
    assert find({**job, "SLURM_CPUS_PER_TASK": "", "SLURM_GPUS_ON_NODE": ""}).threads == 1
    for task in "01":
        with pytest.raises(UsageError, match="srun has started geomx 4 times in Slurm job 7"):
            find({**job, "SLURM_PROCID": task, "SLURM_STEP_NUM_TASKS": "4"})
    with pytest.raises(UsageError, match="Slurm job 7 is heterogeneous"):
        find({**job, "SLURM_HET_SIZE": "2"})


def test_a_controller_that_does_not_answer(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = re.sub(r"SlurmctldPort=.*", f"SlurmctldPort={free_ports(1)[0]}", slurm.conf.read_text())
    (tmp_path / "slurm.conf").write_text(text)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    with pytest.raises(TimedOut, match=r"squeue on east: .*Unable to contact slurm controller"):
        find_job(LocalConnector("east"), name="geomx-1")
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    assert find_job(LocalConnector("east"), name="geomx-1") is None
    assert find_job(LocalConnector("east"), job=4_000_000) is None


def test_two_launches_in_one_allocation(slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    monkeypatch.setenv("HOME", str(tmp_path))
    number = slurm.call("sbatch", "--parsable", "-p", "p", "--output=/dev/null", "--wrap=exec sleep 600").strip()
    show = ("squeue", "--noheader", f"--jobs={number}", "--states=RUNNING", "--format=%N")
    until(lambda: bool(slurm.call(*show).strip()), 30, lambda: slurm.call("squeue"))
    ours: Any = plugins.find("allocator", "slurm")
    login, request = LocalConnector("here"), Request(name="allocation", allocator="slurm", job=int(number))
    host = Host(name="n", parties=("A",), access=Requested(address=slurm.call(*show).strip()), request="allocation")
    try:
        for job in ("one", "two"):
            ours.ask(request, [host], job, JobSpec(), login)
        (one,), (two,) = (ours.given(request, [host], job, login) for job in ("one", "two"))
        ours.release(request, "one", login)
        assert SlurmConnector("n", two.access, sys.executable, login).run(["echo", "on"], limit=60.0).output == b"on\n"
        steps = slurm.call("squeue", "--steps", "--noheader", f"--jobs={number}", "--format=%j").split()
        assert one.access.step not in steps and two.access.step in steps
    finally:
        slurm.call("scancel", number)


def test_nothing_starts_on_the_login_node_after_the_end(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    access = Slurm("10.0.0.1", login=Local(), job=4_000_000, node="n1", step="geomx-1-east")
    host = SlurmConnector("east", access, sys.executable, LocalConnector("login"))
    (tmp_path / "log").write_text("read")
    assert host.get(str(tmp_path / "log")) == b"read"
    with pytest.raises(HostUnreachable, match="host east: its allocation has ended"):
        host.put(str(tmp_path / "new"), b"")
    with pytest.raises(HostUnreachable, match="host east: its allocation has ended"):
        host.open(module_command(sys.executable, "geomx_cli.agent", "run", str(tmp_path)))
    assert host.run(module_command(sys.executable, "geomx_cli.agent", "files", "/no"), limit=30.0).status == 1
    assert not (tmp_path / "new").exists()


def submit(desk: Desk, partition: str, *words: str) -> tuple["subprocess.Popen[bytes]", Path]:
    """Submit a batch script that runs geomx on two nodes; returns what waits for its end, and its output."""
    out = desk.folder / f"{partition}.out"
    out.touch()
    run = f"exec {sys.executable} -m geomx_cli {shlex.join(words)}"
    sbatch = ["sbatch", "--wait", "--quiet", "--nodes=2", "-p", partition, f"--output={out}", f"--wrap={run}"]
    process = subprocess.Popen(sbatch, env=desk.environment, cwd=desk.folder)
    desk.commands.append(process)  # type: ignore[arg-type]
    return process, out
