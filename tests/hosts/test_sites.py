"""Three sites and the machine that launches a job, each in a network namespace behind real sshd. Needs root."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import forks
import numpy as np
import pytest
from cluster import ROOT, until
from forking import Served
from idx import write_data
from networks import Network
from rounds import assert_equal, expected
from sshd import Person, Sshd

from benchmarks.netns import call
from geomx_cli.agent import processes

CONTROL, NAMES = "control", ("hub", "alpha", "beta")
SCRIPT = ROOT / "tests/scripts/rounds.py"
MARK = "SITES_TEST"
pytestmark = [pytest.mark.processes, pytest.mark.slow]


class World:
    """The four machines. `desk` is the working directory at "control"."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.network = network
        self.desk = folder / "desk"
        self.desk.mkdir()
        self.person = Person(folder / "home")
        self.mark = uuid.uuid4().hex  # concurrent tests may have folders of the same name
        self.machines = {
            name: Sshd(folder / name, name, self.person, network.address(name), network.spaces.name(name), port=22)
            for name in NAMES
        }

    def describe(self, workers: int = 2, **variables: str) -> None:
        """Write hosts.toml; every process gets `variables`. workers: of the last party; the other one has two."""
        env = ", ".join(f"{name} = {json.dumps(text)}" for name, text in {MARK: self.mark, **variables}.items())
        python = f"~/geomx/bin/{Path(sys.executable).name}"
        lines = ['central = "hub"', "[defaults]", f'python = "{python}"', f"env = {{ {env} }}"]
        lines += [f'key = "{self.person.key}"', 'ports = "9100-9109"']
        for name, machine in self.machines.items():
            link = machine.home / "geomx"
            if not link.is_symlink():
                link.symlink_to(Path(sys.executable).parent.parent)
            devices = ["cpu"] * {"hub": 0, NAMES[-1]: workers}.get(name, 2)
            lines += ["[[host]]", f'name = "{name}"', f'party = "{name}"', f'ssh = "{machine.address}"']
            lines += [f'state_dir = "{machine.state_dir}"', f"devices = {json.dumps(devices)}"]
        (self.desk / "hosts.toml").write_text("\n".join(lines))

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start `geomx` at the control machine."""
        return Served(
            forks.server(), ["-m", "geomx_cli", *arguments], namespace=self.network.spaces.name(CONTROL),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.desk,
            env={**os.environ, "HOME": str(self.person.home), "PYTHONPATH": str(ROOT),
                 "XDG_STATE_HOME": str(self.desk / "state")},
        )  # fmt: skip

    def geomx(self, *arguments: str, limit: float = 240) -> subprocess.CompletedProcess[str]:
        """Run `geomx` to its end."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=limit)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def running(self) -> list[int]:
        """The pids of the job's processes on all sites."""
        return [who.pid for who in processes.marked({MARK: self.mark})]

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Disconnect the control machine's network in both directions."""
        nft = self.network.spaces.command(CONTROL, ["nft", "-f", "-"])
        hooks = [f"add chain inet cut {hook} {{ type filter hook {hook} priority 0; policy drop; }}" for hook in HOOKS]
        call(nft, lines=["add table inet cut", *hooks, ""])
        try:
            yield
        finally:
            call(nft, lines=["flush ruleset", ""])

    def close(self) -> None:
        """Kill everything."""
        for who in processes.marked({MARK: self.mark}):
            processes.send_signal([who], signal.SIGKILL)
        for machine in self.machines.values():
            machine.stop()


HOOKS = ("input", "output")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Three running sites, known to the user at the control machine."""
    network = Network([CONTROL, *NAMES])
    made = World(tmp_path, network)
    try:
        for machine in made.machines.values():
            machine.start()
        known = [f"{machine.address} {machine.host_key}\n" for machine in made.machines.values()]
        made.person.known_hosts.write_text("".join(known))
        yield made
    finally:
        made.close()
        network.close()


def rounds(world: World, count: int, slow: float = 0, **variables: str) -> list[str]:
    """The command of a job of `count` rounds, with three tensors and a pause of `slow` seconds before each."""
    world.describe(ROUNDS=str(count), OUT="w{rank}.npz", SERVER_OPTIMIZER="1", SLOW=str(slow), **variables)
    return ["--", "python", str(SCRIPT)]


def results(world: World) -> dict[int, list[np.ndarray]]:  # type: ignore[type-arg]
    """The workers' results, saved beside the script on their machines."""
    states = [Path(machine.state_dir) for machine in world.machines.values()]
    paths = [path for state in states for path in state.glob("jobs/*/files/w*.npz")]  # agents may still remove keys
    return {int(path.stem[1:]): list(np.load(path).values()) for path in paths}


def test_a_job_over_three_sites_survives_a_dropped_connection(world: World) -> None:
    command = rounds(world, 40, slow=0.03)
    launch = world.start("launch", "--json", *command)
    until(lambda: len(world.running()) >= 11)  # the master may have ended
    world.machines["alpha"].cut()
    out, err = launch.communicate(timeout=240)
    assert launch.returncode == 0, err
    assert "the connection to host alpha broke" in err and "host alpha is connected again" in err
    assert json.loads(out)["status"] == "done"
    assert_equal(results(world), expected([[0, 1], [2, 3]], dict.fromkeys(range(4), 40), optimizer=True))
    assert world.geomx("status").returncode == 0
    collected = world.geomx("logs", "collect", "--to", "here")
    assert collected.returncode == 0, collected.stderr
    assert len(list((world.desk / "here").glob("*/logs/*.log"))) == 13
    stopped = world.geomx("stop")
    assert stopped.returncode == 0 and "nothing of it runs" in stopped.stdout
    assert not world.running()


def test_a_detached_job_finishes_without_the_control_machine(world: World) -> None:
    gates = world.desk / "gates"
    gates.mkdir()
    for name in ("declare", "part0", "barrier", "leave", "close"):
        (gates / name).touch()
    launch = world.geomx("launch", "--detach", *rounds(world, 60, GATES=str(gates), SEGMENT="30"))
    assert launch.returncode == 0, launch.stderr
    with world.cut():
        until(lambda: len(world.running()) >= 11)  # the master may have ended
        (gates / "part1").touch()
        until(lambda: not world.running())
    assert_equal(results(world), expected([[0, 1], [2, 3]], dict.fromkeys(range(4), 60), optimizer=True))
    status = json.loads(world.geomx("status", "--json").stdout)
    assert status["state"] == "done"
    collected = world.geomx("logs", "collect", "--to", "here")
    assert collected.returncode == 0, collected.stderr
    attached = world.geomx("attach")
    assert attached.returncode == 0, attached.stderr


def test_a_followed_job_ends_when_the_control_machine_is_gone(world: World) -> None:
    launch = world.start("launch", "--lease", "3s", *rounds(world, 10_000, slow=0.03))
    until(lambda: len(world.running()) >= 11)  # the master may have ended
    with world.cut():
        until(lambda: not world.running())
        launch.communicate(timeout=240)
    assert launch.returncode == 1
    stopped = world.geomx("stop")
    assert stopped.returncode == 0, stopped.stderr


def complete(world: World) -> int:
    """How many schedulers report that all their members have joined."""
    paths = [path for machine in world.machines.values() for path in machine.home.rglob("*scheduler-0.jsonl")]
    return sum('"roster"' in path.read_text() for path in paths)


@pytest.mark.parametrize("wholly", [True, False])
def test_a_host_that_is_cut_off_while_training_is_told_from_a_broken_link(world: World, wholly: bool) -> None:
    launch = world.start("launch", "--silence", "6s", "--lease", "30s", *rounds(world, 10_000, slow=0.03))
    until(lambda: complete(world) >= 4)  # of the global plane, and of each party
    others = "10.99.0.0/24" if wholly else world.network.address("hub")
    with world.network.filtered("alpha", f"ip saddr {others} drop"):
        _, errors = launch.communicate(timeout=240)
    assert launch.returncode == 1
    error = errors[errors.rindex("error: ") :]
    if wholly:
        assert error.startswith("error: host alpha cannot be reached since "), errors
        assert "lease" in error and "host alpha cannot be reached; waiting for it to stop" in errors
    else:
        assert "the link between hosts " in error and "geomx doctor" in error, errors
        assert "hub" in error and "alpha" in error


def test_a_firewall_that_drops_one_port_is_named_before_the_start(world: World) -> None:
    command = rounds(world, 1)
    with world.network.filtered("hub", "tcp dport 9101 drop"):
        launch = world.geomx("launch", *command)
    assert launch.returncode == 5, launch.stderr
    assert "alpha, beta -> hub" in launch.stderr and "9101" in launch.stderr and "firewall" in launch.stderr
    assert not world.running()


def test_hosts_with_an_unknown_and_a_changed_key_are_refused(world: World) -> None:
    command = rounds(world, 1)
    lines = world.person.known_hosts.read_text().splitlines()
    other = world.machines["beta"].host_key
    changed = f"{world.machines['alpha'].address} {other}"
    world.person.known_hosts.write_text("\n".join([lines[0], changed]) + "\n")
    for option in ([], ["--accept-new-host-keys"]):
        launch = world.geomx("launch", *option, *command)
        assert launch.returncode == 4, launch.stderr
        assert "alpha" in launch.stderr and "HAS CHANGED" in launch.stderr
        assert ("--accept-new-host-keys" in launch.stderr) == (not option), launch.stderr
    assert not world.running()


def test_two_jobs_that_are_launched_at_one_moment_on_the_same_machines(world: World) -> None:
    """They allocate ports one after another, and then run concurrently."""
    command = rounds(world, 100, slow=0.03, SIZES="700,10,3")
    launches = [world.start("launch", *command) for _ in range(2)]
    until(lambda: len(world.running()) >= 20)  # the masters may have ended
    for launch in launches:
        _, err = launch.communicate(timeout=240)
        assert launch.returncode == 0, err
    assert not world.running()


def test_a_bundled_job_goes_on_with_other_numbers(world: World, tmp_path: Path) -> None:
    """Its model and the roots' optimizer come from their hosts, and go to those of the new inventory."""
    samples = 4 * 3 * 20
    data = str(write_data(tmp_path / "idx", samples, 64))
    world.describe()
    words = ["--network", "linear", "--data-dir", data, "--batch-size", "20", "--json"]
    first = world.geomx("launch", *words, "--epochs", "1", "--topology", "central")
    assert first.returncode == 0, first.stderr
    done = json.loads(first.stdout)
    again = world.geomx("launch", "--resume", done["job"], "--hosts", "hosts.toml")
    assert again.returncode == 2 and "has the same processes as the inventory" in again.stderr
    world.describe(workers=1)
    second = world.geomx("launch", "--resume", done["job"], "--hosts", "hosts.toml", "--epochs", "3", "--json")
    assert second.returncode == 0, second.stderr
    result = json.loads(second.stdout)
    assert sorted(result["data"]) == ["alpha/worker:0", "alpha/worker:1", "beta/worker:0"]
    assert sum(one["samples"] for one in result["data"].values()) == 3 * samples
    assert result["rounds"] == done["rounds"] + 2 * samples // 3 // 20
    assert not world.running()
