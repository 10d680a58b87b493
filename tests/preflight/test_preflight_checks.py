"""Checks derived from the facts of hosts: pure functions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs
from networks import star

from geomx_cli import __version__
from geomx_cli.core.errors import CheckFailed, HostUnreachable, InvalidSettings
from geomx_cli.hosts import closing
from geomx_cli.hosts.local import LocalConnector
from geomx_cli.inventory import Host, Ssh
from geomx_cli.plan import JobSpec, plan
from geomx_cli.preflight import Check, exit_code, hosts, refuse
from geomx_cli.preflight.connect import complete_inventory
from geomx_cli.preflight.diagnose import together
from geomx_cli.preflight.hosts import Requirements, requirements
from geomx_cli.preflight.probe_pool import Facts, Folder, ProbePool, Skew
from geomx_cli.preflight.report import failure_check
from geomx_cli.probe.facts import code_digest

GIB = 1 << 30
FACTS = Facts(
    version=__version__,
    code=code_digest(),
    package="/there/geomx_cli",
    python="3.12.1",
    executable="/there/bin/python",
    home="/home/me",
    user="me",
    boot="one",
    clock=0.0,
    state=Folder("/home/me/.local/state/geomx", False, "", 100 * GIB),
    work=Folder("/home/me/work", True, "", 100 * GIB),
    temp="/run/me",
    sockets="",
    uid=1007,
    addresses={"lo": ["127.0.0.1"], "lan0": ["fd00::5", "10.0.0.5"], "wan0": ["192.0.2.5"], "six": ["fd00::6"]},
    free={"0.0.0.0": [9001, 9002, 9003], "10.0.0.5": [9000, 9001, 9002, 9003]},
    taken={9000: "sshd (pid 1)"},
    unusable={},
    memory=8 * GIB,
    cores=4,
    slow_start=True,
    shared_memory=1 << 30,
    gpus=["NVIDIA A100, 40960 MiB"],
    missing=[],
    versions={"numpy": "1.26.4", "mxnet": "1.9.1"},
)
NEED = Requirements(processes=3, training=2, memory=GIB, modules=("zmq", "numpy", "mxnet"))
HOST = Host(name="alpha", parties=("A",))


def changed(**fields: Any) -> Facts:
    return msgspec.structs.replace(FACTS, **fields)


def wrong(found: list[Check]) -> list[Check]:
    return [check for check in found if check.level != "ok"]


@pytest.mark.parametrize(
    ("sent", "clock", "received", "what"),
    [
        (100.0, 100.5, 101.0, ""),
        (100.0, 102.6, 101.0, ""),  # 2.1 s ahead, with an uncertainty of half a second
        (100.0, 103.1, 101.0, "its clock is 2.6 s ahead of that of this machine"),
        (100.0, 40.0, 100.0, "its clock is 1 min 00 s behind that of this machine"),
    ],
)
def test_clocks(sent: float, clock: float, received: float, what: str) -> None:
    check = hosts.check_clock("alpha", Skew.of(sent, clock, received))
    assert (check.what, check.level) == (what, "warning" if what else "ok")


def test_a_host_with_all_it_needs() -> None:
    assert wrong(hosts.check_host(HOST, FACTS, Skew(0, 0), NEED)) == []


@pytest.mark.parametrize(
    ("fields", "name", "level", "what"),
    [
        ({"python": "3.9.2"}, "python", "problem", "Python 3.9.2 at /there/bin/python is too old"),
        ({"missing": ["mxnet", "torch"]}, "modules", "problem", "/there/bin/python has no mxnet"),
        (
            {"versions": {"numpy": "2.1.0", "mxnet": "1.9.1"}},
            "modules", "problem", "/there/bin/python has numpy 2.1.0, with which mxnet 1.9.1 does not work",
        ),
        ({"state": Folder("/s", True, "", 99_000_000)}, "disk", "problem", "at /s, where jobs lie: less than 100 MB"),
        ({"state": Folder("/s", True, "", 900_000_000)}, "disk", "warning", "at /s, where jobs lie: less than 1 GB"),
        ({"state": Folder("/s", True, "Read-only", GIB * 9)}, "disk", "problem", "cannot write to /s"),
        ({"sockets": "File name too long"}, "sockets", "problem", "no unix socket can be made"),
        ({"unusable": {"0.0.0.0": "none of its own"}}, "address", "problem", "nothing can listen at 0.0.0.0"),
        ({"version": "9.9"}, "geomx", "problem", "geomx 9.9 is in /there/geomx_cli, and this machine has"),
        ({"code": "other"}, "geomx", "warning", "has other source code than the one here"),
    ],
)  # fmt: skip
def test_a_host_that_lacks_something(fields: dict[str, Any], name: str, level: str, what: str) -> None:
    [check] = wrong(hosts.check_host(HOST, changed(**fields), Skew(0, 0), NEED))
    assert (check.subject, check.name, check.level) == ("alpha", name, level)
    assert what in check.what
    assert check.fix


def test_an_extra_is_named_for_mxnet() -> None:
    [check] = wrong(hosts.check_host(HOST, changed(missing=["mxnet"]), Skew(0, 0), NEED))
    install = "there: /there/bin/python -m pip install 'geomx-cli[mxnet]'"
    assert check.fix == install
    only_torch, need = changed(missing=["mxnet"], versions={"torch": "2.6.0"}), replace(NEED, instead="torch")
    [check] = wrong(hosts.check_host(HOST, only_torch, Skew(0, 0), need))
    assert check.fix == f"{install}, or train with torch, which it has: --framework torch"
    [check] = wrong(hosts.check_host(HOST, only_torch, Skew(0, 0), NEED))
    assert check.fix == install, "a script for MXNet"


def test_a_workdir_that_is_not_there() -> None:
    facts = changed(work=Folder("/home/me/data", False, "", GIB))
    assert wrong(hosts.check_host(HOST, facts, Skew(0, 0), NEED)) == []
    [check] = wrong(hosts.check_host(structs.replace(HOST, workdir="~/data"), facts, Skew(0, 0), NEED))
    assert check.what == "there is no folder /home/me/data, its workdir"


def test_hosts_of_one_machine_share_its_memory_and_cores() -> None:
    required = {"alpha": replace(NEED, memory=3 * GIB), "beta": replace(NEED, memory=6 * GIB)}
    alone = {"alpha": FACTS, "beta": changed(boot="two")}
    both = {"alpha": FACTS, "beta": FACTS}
    assert wrong(list(hosts.check_memory(alone, required))) == []
    [check] = wrong(list(hosts.check_memory(both, required)))
    assert (check.subject, check.level) == ("alpha, beta", "problem")
    assert check.what == "6 processes need at least 9.66 GB of memory, and there are 8.59 GB"
    assert wrong(list(hosts.check_memory({name: changed(memory=0) for name in both}, required))) == []  # unknown
    planned = [HOST, structs.replace(HOST, name="beta", threads=2)]
    assert wrong(list(hosts.check_hardware(planned, alone, required))) == []
    [check] = wrong(list(hosts.check_hardware(planned, both, required)))
    assert (check.level, check.what) == ("warning", "the workers take 6 cores, and there are 4")


@pytest.mark.parametrize(
    ("algorithm", "slow", "boots", "warned"),
    [
        ("diloco", True, "abc", ["hub", "alpha", "beta"]),
        ("fsa", True, "abc", []),  # no pauses
        ("hfa", False, "abc", []),
        ("hfa", True, "aaa", []),  # one machine
    ],
)
def test_tcp_that_forgets_its_links_in_pauses(algorithm: str, slow: bool, boots: str, warned: list[str]) -> None:
    names = ("hub", "alpha", "beta")
    spec = JobSpec(job="j", job_dir="/j", socket_dir="/tmp/gx-0-abc", key_dir="/k", options={"algo": algorithm})
    addresses = {name: f"10.0.0.{number}" for number, name in enumerate(names)}
    planned = plan(star(addresses, range(9000, 9008)), spec)
    facts = {name: changed(slow_start=slow, boot=boot) for name, boot in zip(names, boots, strict=True)}
    found = wrong(list(hosts.check_slow_start(facts, planned)))
    assert [check.subject for check in found] == warned
    assert all(check.level == "warning" and "tcp_slow_start_after_idle=0" in check.fix for check in found)


@pytest.mark.parametrize(("restarts", "warned"), [(3, ["hub", "beta"]), (0, [])])
def test_state_that_has_no_room_in_memory(restarts: int, warned: list[str]) -> None:
    names = ("hub", "alpha", "beta")
    spec = JobSpec(job="j", job_dir="/j", socket_dir="/tmp/gx-0-abc", key_dir="/k", options={"restarts": restarts})
    planned = plan(star({name: f"10.0.0.{n}" for n, name in enumerate(names)}, range(9000, 9008)), spec)
    rooms = {"hub": 63 << 20, "alpha": 64 << 20, "beta": 0}
    found = wrong(list(hosts.check_restarts({name: changed(shared_memory=rooms[name]) for name in names}, planned)))
    assert [check.subject for check in found] == warned
    assert [check.what.split(":")[0] for check in found] == [
        "/dev/shm has only 66.1 MB free" if check.subject == "hub" else "/dev/shm is not in memory" for check in found
    ]


def test_gpus() -> None:
    host = structs.replace(HOST, devices=("gpu0", "gpu3"))
    [check] = wrong(list(hosts.check_hardware([host], {"alpha": FACTS}, {"alpha": NEED})))
    assert check.what == "there is gpu0 (NVIDIA A100, 40960 MiB), and the inventory wants gpu3"
    [check] = wrong(list(hosts.check_hardware([host], {"alpha": changed(gpus=[])}, {"alpha": NEED})))
    assert check.what == "there is no GPU, and the inventory wants gpu0, gpu3"
    others = [structs.replace(HOST, name=name) for name in ("beta", "gamma")]
    [check] = hosts.warn_of_gpus([host, *others], {"alpha": changed(gpus=[]), "beta": changed(gpus=[])})
    assert (check.level, check.what) == ("warning", "there is no GPU, and the inventory wants gpu0, gpu3")


@pytest.mark.parametrize(
    ("script", "frameworks"),
    [
        ("", ("mxnet",)),
        ("import os\nimport torch.nn as nn\n", ("torch",)),
        ("if True:\n    from mxnet import gluon\n", ("mxnet",)),
        ("# import mxnet\nimport mxnet_like", ()),
        ("import geomx_cli.torch as geomx", ("torch",)),
        ("from geomx_cli import torch as geomx", ("torch",)),
    ],
)
def test_what_a_job_needs(tmp_path: Path, script: str, frameworks: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text(script)
    words = ("python", str(tmp_path / "train.py"), "--epochs", "3") if script else ()
    spec = JobSpec(options={"network": "cnn"}, script=words)
    inventory = star(dict.fromkeys(("hub", "alpha"), "127.0.0.1"), range(9000, 9009), alpha={"interface": "lo"})
    found, saving = requirements(inventory, spec), () if script else ("safetensors",)
    assert found["alpha"].modules == ("zmq", "msgspec", "numpy", "psutil", *frameworks, *saving)
    assert (found["hub"].processes, found["hub"].training) == (4, 0)
    assert (found["alpha"].processes, found["alpha"].training) == (3, 1)
    assert found["alpha"].memory == (75 << 20 if script else 190 << 20)


@pytest.mark.parametrize(
    ("version", "cuda", "devices", "said"),
    [
        ("2.4.1", "", ["cpu"], ""),
        ("2.6.0", "12.6", ["gpu0"], ""),
        ("2.3.1", "", ["cpu"], "/there/bin/python has torch 2.3.1, and geomx needs 2.4 or newer"),
        ("2.13.0", "", ["gpu0"], "/there/bin/python has torch 2.13.0, which is built without CUDA, and is to train on"
         " GPUs"),
    ],
)  # fmt: skip
def test_the_version_of_pytorch(version: str, cuda: str, devices: list[str], said: str) -> None:
    host = structs.replace(HOST, devices=tuple(devices))
    facts = changed(versions={"numpy": "2.4.0", "torch": version, "torch.cuda": cuda}, gpus=["A100"])
    need = Requirements(processes=3, training=1, memory=GIB, modules=("zmq", "numpy", "torch"))
    assert [check.what for check in wrong(hosts.check_host(host, facts, Skew(0, 0), need))] == [said][: bool(said)]


def test_hosts_with_other_versions_of_pytorch() -> None:
    found = {name: changed(versions={"torch": text}) for name, text in (("a", "2.6.0+cu126"), ("b", "2.6.0+cpu"))}
    need = Requirements(processes=3, training=1, memory=GIB, modules=("zmq", "torch"))
    assert [check.level for check in hosts.check_torch(found, dict.fromkeys(found, need))] == ["ok"]
    found["c"] = changed(versions={"torch": "2.13.0+cu130"})
    (check,) = hosts.check_torch(found, dict.fromkeys(found, need))
    assert check.what == "torch 2.13.0 on c, and 2.6.0 on a, b"
    for name, text in (("a", "2.21.5"), ("b", "2.21.5"), ("c", "2.27.3")):
        found[name] = changed(versions={"torch": "2.6.0", "torch.nccl": text})
    _, check = hosts.check_torch(found, dict.fromkeys(found, need))
    assert check.what == "NCCL 2.21.5 on a, b, and 2.27.3 on c" and "one build of torch" in check.fix
    assert not [*hosts.check_torch(found, dict.fromkeys(found, replace(need, modules=("zmq",))))]


def test_the_linear_network_needs_no_framework() -> None:
    inventory = star(dict.fromkeys(("hub", "alpha"), "127.0.0.1"), range(9000, 9009))
    spec = JobSpec(options={"network": "linear"})
    assert requirements(inventory, spec)["alpha"].modules == ("zmq", "msgspec", "numpy", "safetensors")


def test_resolving_fills_in_what_only_the_host_knows() -> None:
    asked: dict[str, object] = {
        "address": "", "interface": "lan0", "wan_interface": "wan0", "state_dir": "~/.local/state/geomx",
        "workdir": "~/work", "python": "python3",
    }  # fmt: skip
    inventory = star({"hub": "10.0.0.9", "alpha": ""}, range(9000, 9004), alpha=asked)
    resolved = complete_inventory(inventory, {"alpha": FACTS})
    alpha = resolved.host("alpha")
    assert (alpha.address, alpha.wan_address) == ("10.0.0.5", "192.0.2.5")
    assert (alpha.python, alpha.package) == ("/there/bin/python", "/there/geomx_cli")
    assert (alpha.state_dir, alpha.workdir) == ("/home/me/.local/state/geomx", "/home/me/work")
    assert alpha.ports == (9001,)
    assert resolved.host("hub") == structs.replace(inventory.host("hub"), ports=(9000, 9001, 9002))
    assert complete_inventory(resolved, {"alpha": FACTS}).host("alpha") == alpha


def test_who_is_dialled_by_name_listens_on_both_versions_of_ip() -> None:
    facts = changed(free={**FACTS.free, "::": [9003]})
    for known, listens, port in (("10.0.0.5", "", 9001), ("alpha.example.org", "::", 9003)):
        inventory = star({"hub": "10.0.0.9", "alpha": known}, range(9000, 9004))
        alpha = complete_inventory(inventory, {"alpha": facts}).host("alpha")
        assert (alpha.listen, alpha.ports) == (listens, (port,))
    inventory = star({"hub": "10.0.0.9", "alpha": "alpha.example.org"}, range(9000, 9004))
    assert complete_inventory(inventory, {"alpha": FACTS}).host("alpha").listen == "", "a host without IPv6"


def test_each_account_has_its_own_folder_for_sockets() -> None:
    there: dict[str, object] = {"access": Ssh(address="10.0.0.5", user="bob")}
    inventory = star({"hub": "127.0.0.1", "alpha": "10.0.0.5"}, range(9000, 9004), alpha=there)
    resolved = complete_inventory(inventory, {"alpha": FACTS, "hub": FACTS})
    planned = plan(resolved, JobSpec(job="j", job_dir="/j", socket_dir="/tmp/gx-0-abc", key_dir="/k"))
    assert planned.socket_dirs == {"hub": "/tmp/gx-0-abc", "alpha": "/run/me/gx-1007-abc"}
    assert planned.process("alpha/server:0").env["GEOMX_SCHEDULER"].startswith("ipc:///run/me/gx-1007-abc/")


def test_resolving_keeps_an_address_and_takes_one_of_ipv6_where_there_is_no_other() -> None:
    kept: dict[str, object] = {"address": "10.0.0.7", "interface": "lan0", "wan_interface": "six"}
    alpha = complete_inventory(star({"hub": "10.0.0.9", "alpha": ""}, range(9000, 9004), alpha=kept), {"alpha": FACTS})
    assert (alpha.host("alpha").address, alpha.host("alpha").wan_address) == ("10.0.0.7", "fd00::6")
    assert alpha.host("alpha").state_dir == ""


def test_ports_are_free_where_the_host_listens() -> None:
    inventory = star({"hub": "10.0.0.9", "alpha": "10.0.0.5"}, range(9000, 9004), alpha={"listen": "10.0.0.5"})
    assert complete_inventory(inventory, {"alpha": FACTS}).host("alpha").ports == (9000,)
    inventory = star({"hub": "10.0.0.9", "alpha": "10.0.0.5"}, [9000], hub={"ports": (1, 2, 3)})
    with pytest.raises(InvalidSettings, match=r"host alpha needs 1 .*\(alpha port 9000: sshd \(pid 1\)\)"):
        complete_inventory(inventory, {"alpha": FACTS})


def test_an_interface_that_is_not_there() -> None:
    inventory = star({"hub": "10.0.0.9", "alpha": ""}, range(9000, 9004), alpha={"wan_interface": "eth9"})
    with pytest.raises(InvalidSettings, match="host alpha has no network interface eth9") as raised:
        complete_inventory(inventory, {"alpha": FACTS})
    assert "lan0 (fd00::5, 10.0.0.5), wan0 (192.0.2.5)" in raised.value.hint


def test_what_is_said_alike_of_several_is_said_once() -> None:
    alike = [Check(name, "disk", "problem", "full", "make room") for name in ("a", "b")]
    other, fine = Check("c", "disk", "warning", "nearly full", "make room"), Check("c", "clock")
    assert together([fine, *alike, other]) == [Check("a, b", "disk", "problem", "full", "make room"), other, fine]


@pytest.mark.processes
@pytest.mark.parametrize("python", ["/none/bin/python", "/usr/bin/true"])
def test_hosts_with_the_same_wrong_python_are_one_finding(python: str) -> None:
    there = {name: LocalConnector(name, python) for name in ("one", "two")}
    with closing(there), ProbePool(there) as probes:
        failures = [failure_check(name, probes.failures[name]) for name in there]
    (found,) = together(failures)
    assert found.subject == "one, two" and found.text == f"one, two: there is no Python at {python}"


def test_the_exit_code_and_the_error_of_all_checks() -> None:
    fine, odd = Check("a", "clock"), Check("a", "clock", "warning", "late", "set it")
    bad, away = Check("b", "disk", "problem", "full", "make room"), Check("c", "reachable", "problem", "away", "look")
    assert [exit_code(checks) for checks in ([fine, odd], [fine, bad], [bad, away])] == [0, 5, 4]
    refuse([fine, odd])
    with pytest.raises(CheckFailed, match=r"^b: full \(make room\)$"):
        refuse([fine, odd, bad])
    with pytest.raises(HostUnreachable, match=r"^2 problems:\n  b: full\n    make room\n  c: away\n    look$"):
        refuse([bad, away])
