"""Machines from an allocator: real jobs run on those given at launch, and release them however the job ends."""

import getpass
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import ROOT
from desk import Desk, Launch
from sshd import Sshd

from geomx_cli.core import plugins
from geomx_cli.core.errors import CheckFailed, GeomxError, HostUnreachable, InvalidSettings, TimedOut
from geomx_cli.hosts import allocators
from geomx_cli.hosts.allocation import Waiting, allocated, release
from geomx_cli.hosts.ssh.options import SshOptions
from geomx_cli.inventory import Host, Inventory, Local, Party, Request, Requested
from geomx_cli.plan import JobSpec, plan

OURS = ROOT.joinpath("tests", "allocators")
COMMAND = (
    "import sys; from geomx_cli.hosts import allocators; allocators.__path__.append(sys.argv.pop(1));"
    "from geomx_cli.cli import main; sys.exit(main())"
)
HERE = {"access": {"kind": "local"}, "address": "127.0.0.1"}
SPEC = JobSpec(options={"topology": "central"})


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A pool of two machines, both this one, and its allocator as a plug-in."""
    folder = tmp_path / "pool"
    fill(folder, HERE, HERE)
    monkeypatch.setenv("POOL", str(folder))
    allocators.__path__.append(str(OURS))
    plugins._all.cache_clear()
    yield folder
    allocators.__path__.remove(str(OURS))
    plugins._all.cache_clear()


@pytest.fixture
def desk(tmp_path: Path, pool: Path) -> Iterator[Desk]:
    """A desk whose geomx has the pool's allocator."""
    made = Desk(tmp_path, [sys.executable, "-c", COMMAND, str(OURS)], {"POOL": str(pool)})
    yield made
    made.close()


def fill(pool: Path, *machines: dict[str, Any]) -> None:
    """Replace the machines of a pool."""
    shutil.rmtree(pool, ignore_errors=True)
    (pool / "free").mkdir(parents=True)
    for number, machine in enumerate(machines):
        (pool / "free" / f"machine-{number}").write_text(json.dumps(machine))


def free(pool: Path) -> int:
    return len(list((pool / "free").iterdir()))


def inventory(**changes: Any) -> Inventory:
    h, a = ({"name": name, "access": Requested(address=name), "request": name} for name in ("h", "a"))
    hosts = (Host(**h, parties=("hub",)), Host(**a, parties=("A",), devices=("cpu",)))
    fields = {"parties": (Party(name="A", workers=1),), "central": Party(name="hub", workers=0), "hosts": hosts}
    requests = (Request(name="h", allocator="pool"), Request(name="a", allocator="pool"))
    return Inventory(**{**fields, "requests": requests, **changes})


def launch(desk: Desk, *arguments: str, **story: str) -> Launch:
    return desk.launch(*arguments, story={"*": "", **story}, allocator="pool")


@pytest.mark.parametrize(("story", "status"), [({}, 0), ({"A/worker:1": "raise"}, 1)])
def test_a_job_runs_on_what_it_is_given_and_gives_it_back(
    desk: Desk, pool: Path, story: dict[str, str], status: int
) -> None:
    job = launch(desk, **story)
    assert job.finish() == status
    assert "asking pool for 1 machine (central)\nasking pool for 1 machine (A)\n" in job.errors
    kept = json.loads((job.directory / "inventory.json").read_bytes())
    assert [host["access"]["kind"] for host in kept["hosts"]] == ["local", "local"]
    assert free(pool) == 2


def test_machines_behind_ssh(desk: Desk, pool: Path, sites: list[Sshd]) -> None:
    fill(
        pool,
        *(
            {
                "access": {
                    "kind": "ssh", "address": site.address, "port": site.port, "user": getpass.getuser(),
                    "key": str(site.person.key), "fingerprint": site.fingerprint,
                },
                "address": "127.0.0.1",
                "state_dir": str(site.state_dir),
            }
            for site in sites[:2]
        ),
    )  # fmt: skip
    job = launch(desk, "--detach", **{"*": "forever"})
    assert job.finish() == 0
    assert free(pool) == 0
    assert [host["agent"] for host in desk.json("status")["hosts"]] == ["running", "running"]
    assert "A/worker:0 begins" in desk.geomx("logs", "--role", "worker").stdout
    assert desk.json("stop")["complete"]
    assert free(pool) == 2


def test_interrupted_at_its_start_or_in_the_middle(desk: Desk, pool: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        (pool / "closed").touch()
        job = launch(desk, **{"*": "forever"})
        job.wait_for(lambda: len(list(pool.iterdir())) > 2)
        os.kill(job.process.pid, number)
        assert job.finish() == 130
        assert "interrupted" in job.errors
        for folder in set(pool.iterdir()) - {pool / "free"}:
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    job = launch(desk, **{"*": "forever"}).wait_until_running()
    assert free(pool) == 0
    os.kill(job.process.pid, signal.SIGINT)
    assert job.finish() == 130
    assert free(pool) == 2


def test_a_job_that_goes_on_alone_keeps_them_until_its_end(desk: Desk, pool: Path) -> None:
    job = launch(desk, "--detach", **{"*": "wait"})
    assert job.finish() == 0
    assert free(pool) == 0
    (job.directory / "go").touch()
    assert desk.geomx("attach").returncode == 0
    assert free(pool) == 2


def test_the_end_of_a_job_that_nobody_follows(desk: Desk, pool: Path) -> None:
    job = launch(desk, "--detach", **{"*": "wait"})
    assert job.finish() == 0
    (job.directory / "go").touch()
    job.wait_for(lambda: desk.json("status")["state"] == "done")
    assert free(pool) == 2


def test_stop_after_launch_was_killed(desk: Desk, pool: Path) -> None:
    job = launch(desk, **{"*": "forever"}).wait_until_running()
    os.kill(job.process.pid, signal.SIGKILL)
    job.finish()
    assert free(pool) == 0
    assert desk.json("stop")["complete"]
    assert free(pool) == 2


def test_too_few_machines(desk: Desk, pool: Path) -> None:
    fill(pool, HERE)
    job = launch(desk)
    assert job.finish() == 5
    assert job.errors.splitlines()[-2:] == [
        "error: allocator pool: there is no machine for A",
        "  wait until another job has ended",
    ]
    assert free(pool) == 1


def test_machines_that_cannot_be_released(desk: Desk, pool: Path) -> None:
    (pool / "broken").touch()
    job = launch(desk)
    assert job.finish() == 7
    assert f"allocator pool has not released the machines of {job.id}: the pool does not answer" in job.errors
    (pool / "broken").unlink()
    assert desk.geomx("stop", job.id).returncode == 0
    assert free(pool) == 2


def test_the_shape_that_was_asked_for_is_given(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, said = inventory(), list[str]()
    with allocated(asked, "one", SPEC, SshOptions(), sys.executable, said.append) as allocation:
        assert free(pool) == 0
        assert [host.access for host in allocation.inventory.hosts] == [Local(), Local()]
        with pytest.raises(CheckFailed, match="allocator pool: there is no machine for h"):
            allocated(asked, "two", SPEC, SshOptions(), sys.executable, said.append).__enter__()
        allocation.kept = True
    assert free(pool) == 0
    assert release(asked, "one") == release(asked, "one") == ()
    fill(pool, HERE, {**HERE, "devices": ["cpu", "cpu"]})
    with pytest.raises(TypeError, match="allocator pool gives other hosts than it was asked for"):
        allocated(asked, "three", SPEC, SshOptions(), sys.executable, said.append).__enter__()
    monkeypatch.delenv("POOL")
    fixed = inventory(hosts=(Host(name="h", parties=("hub",)), inventory().hosts[1]), requests=())
    assert allocated(fixed, "four", SPEC, SshOptions(), "", said.append).__enter__().inventory is fixed


def test_a_login_node_that_does_not_answer_for_a_while(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have machines already, and the place in the queue would be lost."""
    ours: Any = plugins.find("allocator", "pool")
    given = ours.given
    failures: list[GeomxError] = [HostUnreachable("the connection broke"), TimedOut("it did not end within 60 s")]

    def unreachable(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return given(*arguments)

    monkeypatch.setattr(ours, "given", unreachable)
    said = list[str]()
    with allocated(inventory(), "one", SPEC, SshOptions(), sys.executable, said.append) as allocation:
        assert not any(isinstance(host.access, Requested) for host in allocation.inventory.hosts)
    assert "h waits for its login node to answer, allocator pool: it did not end within 60 s" in said
    assert free(pool) == 2


@pytest.mark.parametrize(("python", "connections"), [("", 1), ("/opt/python", 2)])
def test_requests_with_one_login_node_share_its_connection(
    python: str, connections: int, pool: Path, sites: list[Sshd], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connection may cost a person a second factor. The release, which may be days later, has its own."""
    ours: Any = plugins.find("allocator", "pool")

    def logs_in(name: str) -> None:
        does = getattr(ours, name)

        def call(*arguments: Any) -> Any:
            assert arguments[-1].run(["true"], limit=60.0).status == 0
            return does(*arguments)

        monkeypatch.setattr(ours, name, call)

    for name in ("ask", "given", "release"):
        logs_in(name)
    login = sites[0]
    requests = (
        Request(name="h", allocator="pool", login=login.ssh()),
        Request(name="a", allocator="pool", login=login.ssh(), python=python),
    )
    with allocated(
        inventory(requests=requests), "one", SPEC, login.person.options(), sys.executable, list[str]().append
    ):
        assert login.log.read_text().count("Accepted publickey") == connections
    assert login.log.read_text().count("Accepted publickey") == 2 * connections
    assert free(pool) == 2


def test_machines_that_do_not_start(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken one must not hold those of the others for ever."""
    broken = Waiting("for geomx to start", "n1: no python3", limit=0.1, hint="see n1")
    monkeypatch.setattr(plugins.find("allocator", "pool"), "given", lambda *arguments: broken)
    with pytest.raises(CheckFailed, match=r"allocator pool: h has waited 100 ms for geomx to start, n1: no python3"):
        allocated(inventory(), "one", SPEC, SshOptions(), sys.executable, list[str]().append).__enter__()
    assert free(pool) == 2


def test_mistakes_of_an_allocator_are_reported_as_such(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither hides another error or the outcome of a job."""

    def mistake(*_: object) -> None:
        raise KeyError("no such zone")

    said = list[str]()
    ours = plugins.find("allocator", "pool")
    with monkeypatch.context() as patch:
        patch.setattr(ours, "ask", mistake)
        with pytest.raises(CheckFailed, match=r"allocator pool failed: KeyError\('no such zone'\)"):
            allocated(inventory(), "one", SPEC, SshOptions(), sys.executable, said.append).__enter__()
    monkeypatch.setattr(ours, "release", mistake)
    with allocated(inventory(), "two", SPEC, SshOptions(), sys.executable, said.append) as allocation:
        pass
    assert set(allocation.problems) == {"allocator pool has not released the machines of two: KeyError('no such zone')"}
    assert said[-1] == f"warning: {allocation.problems[0]}"


def test_a_job_that_the_allocator_refuses(pool: Path) -> None:
    with pytest.raises(InvalidSettings, match="allocator pool: it has no machines for one plane"):
        plan(inventory(topology="flat"), JobSpec(job="j", job_dir="/j", socket_dir="/s"))
