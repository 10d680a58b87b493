"""Checks of hosts and links: real probes on this machine, in network namespaces, and behind sshd."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster import ROOT, free_ports
from msgspec import structs
from networks import Network, PrefixedConnector, bare_python, star
from sshd import Person, Sshd

from geomx_cli import preflight
from geomx_cli.cli import main
from geomx_cli.core.errors import CheckFailed, HostUnreachable
from geomx_cli.hosts import Connector
from geomx_cli.hosts.local import LocalConnector
from geomx_cli.hosts.ssh.options import SshOptions
from geomx_cli.inventory import Inventory
from geomx_cli.plan import JobSpec, Plan, plan
from geomx_cli.plan.automatic_topology import topology_line, with_topology
from geomx_cli.plan.job_spec import complete
from geomx_cli.preflight import Check, probe_pool
from geomx_cli.preflight.connect import place
from geomx_cli.probe.ports import PROBED, Reservations

SPEC = JobSpec(python=sys.executable, script=("python", "train.py"))
NAMES = ("hub", "alpha", "beta")
HERE = dict.fromkeys(NAMES, "127.0.0.1")
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Three sites and the machine from which they are checked."""
    made = Network([*NAMES, "control"])
    yield made
    made.close()


@pytest.fixture
def check(network: Network) -> Callable[..., preflight.Report]:
    """Checks the star of three sites."""

    def run(spec: JobSpec = SPEC, **changes: Mapping[str, object]) -> preflight.Report:
        inventory = star({name: network.address(name) for name in NAMES}, range(9000, 9008), **changes)
        return examine({name: network.host(name, sys.executable) for name in NAMES}, inventory, spec=spec)

    return run


def examine(
    reached: Mapping[str, Connector], inventory: Inventory, *, full: bool = False, spec: JobSpec = SPEC
) -> preflight.Report:
    try:
        return preflight.examine(reached, inventory, spec, full=full)
    finally:
        for host in reached.values():
            host.close()


def local(name: str) -> LocalConnector:
    return LocalConnector(name, sys.executable)


def wrong(report: preflight.Report) -> list[Check]:
    return [found for found in report.checks if found.level != "ok"]


def only(report: preflight.Report) -> Check:
    """The only failed check."""
    [found] = wrong(report)
    return found


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_all_is_well_and_the_ports_are_free_afterwards(address: str) -> None:
    reached = {name: local(name) for name in NAMES}
    report = preflight.examine(reached, star(dict.fromkeys(NAMES, address), free_ports(8)), SPEC, full=False)
    resolved, checks = report.inventory, report.checks
    assert [found for found in checks if found.level != "ok"] == []
    preflight.refuse(checks)
    subjects = {found.subject for found in checks if found.name == "link"}
    assert subjects == {"alpha -> hub", "beta -> hub"}
    for host in resolved.hosts:
        assert (host.python, host.package) == (sys.executable, str(ROOT / "geomx_cli"))
        for port in host.ports:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            socket.create_server((address, port), family=family).close()
    assert len({port for host in resolved.hosts for port in host.ports}) == sum(len(h.ports) for h in resolved.hosts)
    for host in reached.values():
        host.close()


def test_only_what_is_free_is_taken_and_a_holder_is_named() -> None:
    ports = free_ports(8)
    with socket.create_server(("127.0.0.1", ports[0])):
        report = examine({name: local(name) for name in NAMES}, star(HERE, ports))
        assert wrong(report) == []
        assert all(ports[0] not in host.ports for host in report.inventory.hosts)
        found = only(examine({name: local(name) for name in NAMES}, star(HERE, ports[:1])))
    assert f"port {ports[0]}: " in found.what
    assert f"(pid {os.getpid()})" in found.what


def test_a_port_that_is_taken_at_the_last_moment() -> None:
    [port] = free_ports(1)
    hub = local("hub")
    with closing(hub), probe_pool.ProbePool({"hub": hub}) as asked, socket.create_server(("127.0.0.1", port)):
        bind = {"token": asked.token("hub"), "owner": asked.owner, "binds": [("127.0.0.1", port, "tcp")]}
        [result] = asked.ask("listen", {"hub": bind}, 5.0)["hub"]["results"]
    assert result["in_use"]
    assert f"(pid {os.getpid()})" in result["holder"]


def test_launches_and_doctors_at_the_same_time_take_other_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from when a launch has released its ports until its job listens; and one waits for the other's last ones."""
    ports = free_ports(10)

    def taken(wanted: Sequence[int], holding: ExitStack | None = None) -> set[int]:
        reached = {name: local(name) for name in NAMES}
        report = preflight.examine(reached, star(HERE, wanted), SPEC, full=False, holding=holding)
        for host in reached.values():
            (holding or closed).callback(host.close)
        assert wrong(report) == [], wrong(report)
        planned = plan(report.inventory, complete(SPEC))
        ends = [end for process in planned.processes for end in process.endpoints if end.protocol != "ipc"]
        return {place(end)[1] for end in ends}

    with ExitStack() as closed, ExitStack() as first, ExitStack() as second:
        mine = taken(ports[:5], first)
        others = taken(ports, second)
        assert mine and others and not mine & others
        second.close()
        monkeypatch.setattr(preflight.report, "_OTHERS", 0.0)
        said = only(examine({name: local(name) for name in NAMES}, star(HERE, ports[:5])))
        assert f"port {min(mine)}: another geomx launch or doctor" in said.what
        monkeypatch.setattr(preflight.report, "_OTHERS", 60.0)
        threading.Timer(0.5, first.close).start()
        again = taken(ports[:5])
        assert again <= {*ports[:5]} and len(again) == len(mine)


def test_after_a_port_was_lost_to_another_launch_all_are_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    ports, listen, lost = free_ports(10), preflight.links.listen, Reservations(PROBED)

    def late(probes: probe_pool.ProbePool, planned: Plan, facts: Any) -> Any:
        hub = next(each for process in planned.processes for each in process.endpoints if each.protocol == "tcp")
        lost.hold("0.0.0.0", place(hub)[1], "abc") if not said else None
        said.append(place(hub)[1])
        return listen(probes, planned, facts)

    said: list[int] = []
    monkeypatch.setattr(preflight.links, "listen", late)
    report = examine({name: local(name) for name in NAMES}, star(HERE, ports))
    lost.release()
    assert wrong(report) == [] and len(said) == 2 and said[0] != said[1]


def test_hosts_that_listen_at_different_addresses_may_use_one_port() -> None:
    addresses = {"hub": "127.0.0.1", "alpha": "127.0.0.2", "beta": "127.0.0.3"}
    listens = {name: {"listen": address} for name, address in addresses.items()}
    spread = structs.replace(star(addresses, free_ports(4), **listens), topology="spread")
    report = examine({name: local(name) for name in NAMES}, spread)
    assert wrong(report) == []
    assert {host.ports[0] for host in report.inventory.hosts} == {spread.hosts[0].ports[0]}


def test_sites_that_reach_each_other(check: Callable[..., preflight.Report]) -> None:
    report = check(hub={"address": "", "interface": "net0"})
    assert wrong(report) == []
    assert report.exit_code == 0
    assert report.inventory.host("hub").address == "10.99.0.1"


def test_a_firewall_that_drops_datagrams(network: Network, check: Callable[..., preflight.Report]) -> None:
    spec = replace(SPEC, options={**SPEC.options, "dgt": 1})
    assert wrong(check(spec)) == []
    with network.filtered("hub", f"ip saddr {network.address('alpha')} meta l4proto udp drop"):
        report = check(spec)
        assert wrong(check()) == []
    found = only(report)
    assert (found.subject, found.name, found.level) == ("alpha -> hub", "datagrams", "warning")
    assert "no datagram reaches 10.99.0.1 UDP port 9001 (alpha/server:0 sends to hub/global_server:0)" in found.what
    assert found.fix.startswith("let alpha reach UDP port 9001 of hub")
    assert report.exit_code == 0


def test_a_firewall_that_drops_one_port(network: Network, check: Callable[..., preflight.Report]) -> None:
    with network.filtered("hub", f"ip saddr {network.address('alpha')} tcp dport 9001 drop"):
        report = check()
    found = only(report)
    assert (found.subject, found.name, found.level) == ("alpha -> hub", "link", "problem")
    assert "10.99.0.1 port 9001 cannot be reached (alpha/server:0 dials hub/global_server:0): no answer" in found.what
    assert "a firewall drops what goes to port 9001" in found.what
    assert found.fix == "let alpha reach TCP port 9001 of hub"
    assert report.exit_code == 5
    with pytest.raises(CheckFailed, match=r"^alpha -> hub: 10\.99\.0\.1 port 9001 cannot be reached"):
        preflight.refuse(report.checks)


def test_a_topology_that_geomx_chose_becomes_central_where_parties_do_not_reach_each_other(network: Network) -> None:
    """What is wrong with central is reported, as it is the one that the job would have."""
    given = star({name: network.address(name) for name in NAMES}, range(9000, 9008))
    chosen = with_topology(structs.replace(given, topology_is_automatic=True))
    assert chosen.topology == "spread"
    blocked = f"ip saddr {network.address('beta')} tcp dport 9000-9007 reject"

    def looked_at(inventory: Inventory) -> preflight.Report:
        reached = {name: network.host(name, sys.executable) for name in NAMES}
        return examine(reached, inventory)

    with network.filtered("alpha", blocked):
        report = looked_at(chosen)
        assert wrong(report) == []
        assert topology_line(report.inventory) == "topology central: no connection beta -> alpha"
        asked = looked_at(structs.replace(chosen, topology_is_automatic=False))
        assert {found.subject for found in wrong(asked)} == {"beta -> alpha"}
        with network.filtered("hub", blocked):
            assert {found.subject for found in wrong(looked_at(chosen))} == {"beta -> hub"}
    assert looked_at(chosen).inventory.topology == "spread"


@pytest.mark.parametrize(
    ("rule", "ports", "looks"),
    [
        ("tcp dport 9000-9007 drop", "ports 9000, 9001", "no answer; a firewall drops it"),
        ("tcp dport 9000 reject with tcp reset", "port 9000", "refused though hub listens; a firewall rejects it"),
        ("tcp dport 9001 reject", "port 9001", "refused though hub listens; a firewall rejects it"),
        ("tcp dport 9001 reject with icmp type admin-prohibited", "port 9001", "no route (No route to host)"),
    ],
)
def test_what_a_firewall_does_to_all(
    network: Network, check: Callable[..., preflight.Report], rule: str, ports: str, looks: str
) -> None:
    with network.filtered("hub", rule):
        found = only(check())
    assert found.subject == "alpha, beta -> hub"
    assert f"10.99.0.1 {ports} cannot be reached" in found.what
    assert looks in found.what


@pytest.mark.parametrize(
    ("address", "looks"),
    [
        ("10.99.0.4", "the address is another machine's (it is none of those that hub itself has)"),
        ("127.0.0.1", "with that address it dials itself"),
        ("no-such-name.invalid", "the name is not known there"),
    ],
)
def test_a_wrong_address(check: Callable[..., preflight.Report], address: str, looks: str) -> None:
    found = only(check(hub={"address": address, "listen": "0.0.0.0"}))
    assert found.subject == "alpha, beta -> hub"
    assert looks in found.what
    assert "correct the address of hub in the inventory (it has 10.99.0.1 on net0)" in found.fix


def test_an_address_of_its_own_at_which_it_does_not_listen(
    network: Network, check: Callable[..., preflight.Report]
) -> None:
    with network.address_beside("hub", "10.99.0.201"):
        found = only(check(hub={"wan_address": "10.99.0.201", "listen": "10.99.0.1"}))
    assert "it listens at 10.99.0.1 only, and this is another of its addresses" in found.what
    assert 'set listen = "0.0.0.0" for hub' in found.fix


def test_an_address_that_is_not_the_hosts_own_cannot_be_listened_at(check: Callable[..., preflight.Report]) -> None:
    found = only(check(hub={"address": "10.99.0.77"}))
    assert (found.subject, found.name) == ("hub", "address")
    assert found.what == "nothing can listen at 10.99.0.77: the address is none of this host's"


def test_an_interface_that_is_not_there(check: Callable[..., preflight.Report]) -> None:
    found = only(check(alpha={"address": "", "interface": "eth7"}))
    assert "host alpha has no network interface eth7" in found.what
    assert "net0 (10.99.0.2)" in found.fix


def test_another_program_that_answers(network: Network, check: Callable[..., preflight.Report]) -> None:
    """A gateway that forwards a port to another machine, where another program listens."""
    elsewhere = network.spaces.command("control", [sys.executable, "-u", "-m", "http.server", "9001"])
    with subprocess.Popen(elsewhere, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        try:
            assert server.stdout is not None and b"9001" in server.stdout.readline()
            report = check(hub={"address": network.address("control"), "listen": "0.0.0.0"})
        finally:
            server.kill()
    assert any("port 9001 cannot be reached" in found.what for found in wrong(report))
    assert any("another program answers there" in found.what for found in wrong(report))


def test_the_measured_rate_is_that_of_the_link(network: Network) -> None:
    network.shape("alpha", "20mbit")
    network.shape("hub", "60mbit")
    inventory = star({name: network.address(name) for name in ("hub", "alpha")}, range(9000, 9008))
    reached = {name: network.host(name, sys.executable) for name in ("hub", "alpha")}
    [link] = examine(reached, inventory, full=True).wan
    assert (link.dialler, link.listener, link.error) == ("alpha", "hub", "")
    # A loaded machine reads late what the link has carried meanwhile, and so measures somewhat more.
    assert 10e6 < link.there < 25e6
    assert 30e6 < link.back < 75e6
    assert 0 < link.round_trip < 1


def test_a_host_that_cannot_be_reached_beside_two_good_ones(tmp_path: Path) -> None:
    [port] = free_ports(1)
    away = Sshd(tmp_path / "beta", "beta", Person(tmp_path / "home"), port=port).host()
    report = examine({"hub": local("hub"), "alpha": local("alpha"), "beta": away}, star(HERE, free_ports(8)))
    found = only(report)
    assert (found.subject, found.name, found.level) == ("beta", "reachable", "problem")
    assert report.exit_code == 4
    assert [check.subject for check in report.checks if check.name == "link"] == ["alpha -> hub"] * 2
    assert {check.subject for check in report.checks if check.name == "geomx"} == {"hub", "alpha"}
    with pytest.raises(HostUnreachable, match=r"^beta: "):
        preflight.refuse(report.checks)


def with_alpha(python: str, *env: str) -> preflight.Report:
    """The star, where alpha has another Python and environment."""
    alpha = PrefixedConnector("alpha", python, ["env", "-C", "/", *env])
    return examine({"hub": local("hub"), "alpha": alpha, "beta": local("beta")}, star(HERE, free_ports(8)))


def test_a_host_without_python() -> None:
    found = only(with_alpha("/no/such/python"))
    assert (found.subject, found.what) == ("alpha", "there is no Python at /no/such/python")


def test_a_host_whose_shell_greets(tmp_path: Path) -> None:
    """A start-up file may print text: it is not taken for an answer."""
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/sh\necho "Welcome!"\necho "{}"\nexec "$@"\n')
    shell.chmod(0o755)
    assert wrong(with_alpha(sys.executable, str(shell))) == []


def test_a_host_without_geomx(tmp_path: Path) -> None:
    python = bare_python(tmp_path / "bare")
    found = only(with_alpha(python, "-u", "PYTHONPATH"))
    assert (found.subject, found.name, found.what) == ("alpha", "geomx", f"{python} has no geomx")


def test_a_host_without_the_modules(tmp_path: Path) -> None:
    python = bare_python(tmp_path / "bare")
    found = only(with_alpha(python, f"PYTHONPATH={ROOT}"))
    assert found.what == f"{python} has no zmq, msgspec, numpy"
    assert found.fix == f"there: {python} -m pip install 'pyzmq' 'msgspec' 'numpy'"


@pytest.mark.parametrize(
    ("change", "level", "looks"),
    [
        ('__version__ = "0.0.1"\n', "problem", "geomx 0.0.1 is in {copy}/geomx_cli, and this machine has "),
        ("\n# changed\n", "warning", "in {copy}/geomx_cli has other source code than the one here"),
    ],
)
def test_another_geomx(tmp_path: Path, change: str, level: str, looks: str) -> None:
    shutil.copytree(ROOT / "geomx_cli", tmp_path / "geomx_cli", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "geomx_cli" / "__init__.py").open("a") as file:
        file.write(change)
    found = only(with_alpha(sys.executable, f"PYTHONPATH={tmp_path}"))
    assert (found.subject, found.name, found.level) == ("alpha", "geomx", level)
    assert looks.format(copy=tmp_path) in found.what


@pytest.fixture
def sites(network: Network, tmp_path: Path) -> Iterator[Path]:
    """An inventory file of three machines behind sshd, each in its namespace."""
    person = Person(tmp_path / "home")
    machines = [
        Sshd(
            tmp_path / name, name, person, network.address(name), network.spaces.name(name), port=22,
            settings=[f"SetEnv HOME={tmp_path}"],  # without the start-up files of this account's shell
        )
        for name in NAMES
    ]  # fmt: skip
    try:
        tables = [_table(machine.start(), tmp_path) for machine in machines]
        (tmp_path / "hosts.toml").write_text("\n".join(tables))
        (tmp_path / "x.py").touch()
        yield tmp_path / "hosts.toml"
    finally:
        for machine in machines:
            machine.stop()


def _table(machine: Sshd, folder: Path) -> str:
    keys = {
        "name": machine.name,
        "party": machine.name,
        "ssh": machine.address,
        "key": str(machine.person.key),
        "fingerprint": machine.fingerprint,
        "python": sys.executable,
        "interface": "net0",
        "state_dir": str(folder / machine.name / "state"),
        "devices": [] if machine.name == "hub" else ["cpu"],
    }
    return "\n".join(["[[host]]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())])


def geomx(network: Network, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run geomx on the machine "control"."""
    code = "import sys; from geomx_cli.cli import main; sys.exit(main())"
    return subprocess.run(
        network.spaces.command("control", [sys.executable, "-c", code, *arguments]),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=home,
        env={**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT)},
    )


CENTRAL = ("--topology", "central")


def test_the_command_on_machines_behind_sshd(network: Network, sites: Path) -> None:
    done = geomx(network, sites.parent, "doctor", "--hosts", str(sites), "--quick", "--json", "--", "python", "x.py")
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert (done.returncode, report["problems"]) == (0, 0), done.stdout
    assert (report["schema_version"], report["hosts"], report["wan"]) == (1, [*NAMES], [])
    assert report["facts"]["hub"]["addresses"]["net0"] == [network.address("hub")]
    assert "asking 3 hosts" in done.stderr
    with network.filtered("hub", f"ip saddr {network.address('beta')} tcp dport 9100-9163 drop"):
        done = geomx(network, sites.parent, "doctor", "--hosts", str(sites), *CENTRAL, "--", "python", "x.py")
    assert done.returncode == 5, done.stderr
    assert "beta -> hub" in done.stdout
    assert "let beta reach TCP" in done.stdout
    assert "Mbit/s there" in done.stdout
    assert done.stdout.splitlines()[-1].endswith(" 1 problem")
    assert "measuring alpha -> hub\n" in done.stderr
    assert "beta" not in done.stderr.partition("measuring")[2]


def test_the_command_on_this_machine(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from geomx_cli.cli import main; sys.exit(main())",
         "doctor", "--local", "--quick", "--parties", "1"],
        capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "COLUMNS": "20"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "asking 2 hosts\nbinding ports and dialling links\n")
    assert done.stdout.endswith(" ok, 0 warnings, 0 problems\n")
    assert not list(tmp_path.iterdir())


def test_doctor_says_that_there_is_no_inventory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless it was told to check this machine."""
    monkeypatch.chdir(tmp_path)
    said = "no hosts.toml in this folder: checking this machine only; geomx init writes one\n"
    for words, expected in (([], said), (["--local"], "")):
        assert main(["doctor", *words, "--", "./none"]) == 3
        assert capsys.readouterr().err.partition("error: ")[0] == expected


def test_connections_are_made_and_closed_for_an_inventory() -> None:
    said: list[str] = []
    report = preflight.examine_inventory(star(HERE, free_ports(8)), SPEC, SshOptions(), full=False, say=said.append)
    assert report.exit_code == 0
    assert said == ["asking 3 hosts", "binding ports and dialling links"]


def test_checks_of_one_machine_are_told_once() -> None:
    spec = replace(SPEC, job_dir="/proc/none/job", socket_dir="/tmp/gx-doctor-test")
    reached = {name: local(name) for name in NAMES}
    checks = preflight.examine(reached, star(HERE, free_ports(8)), spec, full=False).checks
    [found] = [check for check in checks if check.level != "ok"]
    assert (found.subject, found.name) == ("hub, alpha, beta", "disk")
    assert "/proc/none" in found.what
    for host in reached.values():
        host.close()
