"""Host files of MPI as inventories."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from desk import Desk

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.inventory import Local, Ssh, hostfile


def read(folder: Path, text: str) -> Any:
    path = folder / "machines"
    path.write_text(text)
    return hostfile.read(path, lambda _: ())


def test_spellings_of_openmpi_and_mpich(tmp_path: Path) -> None:
    lines = ["# mine", "", "node1 slots=2 max-slots = 8  # two", "bob@node2:3", "10.0.0.3 gpus=2", "[2001:db8::1]"]
    found = read(tmp_path, "\n".join([*lines, "node1"])).inventory
    assert (found.central.name, found.central.workers, [(item.name, item.workers) for item in found.parties]) == (
        "central", 0, [("A", 9)],
    )  # fmt: skip
    assert {host.name: host.devices for host in found.hosts} == {
        "node1": ("cpu",) * 3, "node2": ("cpu",) * 3, "host3": ("gpu0", "gpu1"), "host4": ("cpu",), "node1-central": (),
    }  # fmt: skip
    access = [host.access for host in found.hosts]
    assert all(isinstance(each, Ssh) for each in access)
    assert [each.address for each in access] == ["node1", "node2", "10.0.0.3", "2001:db8::1", "node1"]
    assert [each.user for each in access if isinstance(each, Ssh)][1] == "bob"


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("n[1-3,07] slots=2", {"n1": 2, "n2": 2, "n3": 2, "n07": 2}), ("a,b[1-2]", {"a": 1, "b1": 1, "b2": 1}),
        ("2*host", {"host": 2}), ("2*host,3*rack[08-10]-x", {"host": 2, "rack08-x": 3, "rack09-x": 3, "rack10-x": 3}),
        ("r[1-2]n[3-4]:2", {"r1n3": 2, "r1n4": 2, "r2n3": 2, "r2n4": 2}), ("2001:db8::1 slots=4", {"2001:db8::1": 4}),
        ("jo@corp.example@n1", {"n1": 1}), ("7of9@2001:db8::1", {"2001:db8::1": 1}),
        ("[2001:db8::1]:4", {"2001:db8::1": 4}),
    ],
)  # fmt: skip
def test_lists_of_slurm_and_bare_ipv6(tmp_path: Path, line: str, wanted: dict[str, int]) -> None:
    found = read(tmp_path, line).inventory
    assert {host.access.address: len(host.devices) for host in found.hosts if host.devices} == wanted


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_byte_order_marks(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "machines"
    path.write_bytes("n1 slots=2\r\nn2\r\n".encode(encoding))
    assert [host.name for host in hostfile.read(path, lambda _: ()).inventory.hosts] == ["n1", "n2", "n1-central"]


def test_parties(tmp_path: Path) -> None:
    """As in an inventory, the first is central, and its workers train."""
    found = read(tmp_path, "a slots=2 party=x\nb party=y\nc party=y\nc slots=2 party=x").inventory
    assert (found.central.name, found.central.workers) == ("x", 4)
    assert [(item.name, item.workers) for item in found.parties] == [("y", 2)]
    assert [(host.name, host.parties) for host in found.hosts] == [
        ("a", ("x",)), ("b", ("y",)), ("c", ("y",)), ("c-x", ("x",)),
    ]  # fmt: skip


def test_this_machine_needs_no_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(tmp_path, "localhost slots=2").inventory
    assert [(type(host.access), host.address) for host in found.hosts] == [(Local, "")] * 2
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    found = read(tmp_path, "here slots=2\nthere").inventory
    assert [(type(host.access), host.address) for host in found.hosts] == [(Local, "here"), (Ssh, ""), (Local, "here")]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("\nnode1 slots=x", "machines:2: 'x' is no number of workers"),
        ("node1:0", "machines:1: '0' is no number of workers"),
        ("node1 slot=2", "machines:1: 'slot=2' is not a setting of a machine (did you mean slots?)"),
        ("node1 2", "machines:1: '2' is not a setting of a machine"),
        ("node1:2 slots=2", "machines:1: the number of slots is there twice"),
        ("node1 slots=1 gpus=2", "machines:1: 1 slots and 2 GPUs"),
        ("node1 gpus=1\nnode1 gpus=1", "machines:2: gpu0 is there twice"),
        ("10.0.0.300", "machines:1: '10.0.0.300' is no IPv4 address"),
        ("bob@", "machines:1: 'bob@' is no machine"),
        ("n[3-1]", "machines:1: 3-1 in 'n[3-1]' runs backwards (write 1-3)"),
        ("n[1-999999999]", "machines:1: 'n[1-999999999]' names more than 4096 machines"),
        ("a,n[1-3 slots=4", "machines:1: 'a,n[1-3' has a bracket without its pair"),
        ("0*n", "machines:1: '0' is no number of workers"),
        ("b party=global\nc party=x", "machines:1: a party cannot be called global"),
        ("localhost\nnode2", "machines:1: the other machines cannot dial localhost"),
        ("# none", "machines names no machine"),
    ],
)
def test_mistakes_have_lines(tmp_path: Path, text: str, wanted: str) -> None:
    with pytest.raises(InvalidSettings, match=re.escape(wanted.partition(" (")[0])) as found:
        read(tmp_path, text)
    assert found.value.hint


def test_no_host_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="there is no host file") as found:
        hostfile.read(tmp_path / "machines", lambda _: [])
    assert "geomx init" not in found.value.hint


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="machines has 2 mistakes") as found:
        read(tmp_path, "node1 slots=x\nnode2\nnode3:y")
    assert "machines:1: 'x'" in found.value.message and "machines:3: 'y'" in found.value.message


@pytest.mark.processes
def test_it_takes_the_place_of_an_inventory(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text("this is no inventory")
    (tmp_path / "machines").write_text("localhost slots=3\n")
    done = desk.geomx("launch", "--hostfile", "machines", "--dry-run", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    roles = [process["role"] for process in json.loads(done.stdout)["processes"]]
    assert roles.count("worker") == 4, "and the master of the central party does not train"
    done = desk.geomx("hosts", "check", "--hostfile", "machines", cwd=tmp_path)
    assert done.returncode == 0 and "party A: 3 workers that train" in done.stdout
    for other in (["--local"], ["--hosts", "hosts.toml"]):
        done = desk.geomx("launch", "--hostfile", "machines", *other, cwd=tmp_path)
        assert done.returncode == 2 and "name different machines" in done.stderr
