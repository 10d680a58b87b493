"""Plans: for each host and role the exact environment, and the invariants of every topology."""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import geomx_cli
from geomx_cli.commands._plan_text import plan_text
from geomx_cli.contract.settings import Settings
from geomx_cli.core import options
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import defaults
from geomx_cli.core.plugins import table
from geomx_cli.hosts.ports import free_ports, release
from geomx_cli.inventory import Host, Inventory, Party, Ssh, WanLink, validated
from geomx_cli.plan import JobSpec, Plan, plan
from geomx_cli.plan.ports import choose, ports_needed
from geomx_cli.plan.this_machine import this_machine
from geomx_cli.ps.cluster.members import Member

HOOK = str(Path(geomx_cli.__file__).parent / "runtime" / "hook")
SPEC = JobSpec(job="j1", job_dir="/jobs/j1", socket_dir="/s", key_dir="/jobs/j1/keys", python="/py")
SCRIPT = replace(SPEC, script=("python", "train.py"))


def make(spec: JobSpec = SPEC, *, one_host: bool = False, **given: options.Value) -> Plan:
    values = options.defaults() | given
    ports = range(20001, 20001 + ports_needed(values))
    return plan(this_machine(values, ports, one_host=one_host), replace(spec, options=values))


def environment(name: str, host: str, **variables: Any) -> dict[str, str]:
    """The environment of every process of the job, plus `variables`."""
    party, _, rest = name.partition("/")
    common = {
        "GEOMX_JOB": "j1",
        "GEOMX_JOB_DIR": "/jobs/j1",
        "GEOMX_PROCESS": name,
        "GEOMX_PARTY": party,
        "GEOMX_HOST": host,
        "GEOMX_RANK": rest.partition(":")[2],
        "GEOMX_KEY_FILE": f"/jobs/j1/keys/{name.replace('/', '-').replace(':', '-')}.key",
        "GEOMX_RANK_SCOPE": "party",
        "GEOMX_TOPOLOGY": "central",
        "OMP_NUM_THREADS": "1",
    }
    in_flat = rest.startswith("server") and variables.get("GEOMX_TOPOLOGY") == "flat"
    if rest.startswith(("worker", "global_server")) or in_flat:
        common["GEOMX_OUTPUT_DIR"] = f"/jobs/j1/outputs/{name.replace('/', '-').replace(':', '-')}"
    return common | {key: str(value) for key, value in variables.items()}


def local(port: int, servers: int, workers: int) -> dict[str, Any]:
    return {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": port,
        "DMLC_NUM_SERVER": servers,
        "DMLC_NUM_WORKER": workers,
    }


def upper(port: int, servers: int, workers: int) -> dict[str, Any]:
    return {
        "DMLC_PS_GLOBAL_ROOT_URI": "127.0.0.1",
        "DMLC_PS_GLOBAL_ROOT_PORT": port,
        "DMLC_NUM_GLOBAL_SERVER": servers,
        "DMLC_NUM_GLOBAL_WORKER": workers,
    }


def listens(*endpoints: str) -> dict[str, str]:
    return {"GEOMX_BIND": " ".join(endpoints), "GEOMX_ADVERTISE": " ".join(endpoints)}


ALL = {"DMLC_NUM_ALL_WORKER": 4}
SCHEDULER, SERVER, WORKER = ({"DMLC_ROLE": role} for role in ("scheduler", "server", "worker"))
GLOBAL_SCHEDULER = {"DMLC_ROLE_GLOBAL": "global_scheduler"}
ROOT = {"DMLC_ROLE": "server", "DMLC_ROLE_GLOBAL": "global_server"}
MASTER = {"DMLC_ROLE": "worker", "DMLC_ROLE_MASTER_WORKER": 1}


def party(name: str, index: int, port: int, global_ranks: tuple[int, ...]) -> dict[str, dict[str, str]]:
    """A party of the reference cluster: a scheduler, one local server and its workers."""
    dial = {"GEOMX_SCHEDULER": f"ipc:///s/{name}-scheduler-0.sock"}
    common = ALL | local(port, 1, len(global_ranks)) | {"GEOMX_PARTY_INDEX": index}
    entries = {
        f"{name}/scheduler:0": SCHEDULER | listens(f"ipc:///s/{name}-scheduler-0.sock"),
        f"{name}/server:0": SERVER | dial | upper(20001, 1, 2) | listens(f"ipc:///s/{name}-server-0.sock"),
    }
    for rank, global_rank in enumerate(global_ranks):
        entries[f"{name}/worker:{rank}"] = WORKER | dial | {"GEOMX_GLOBAL_RANK": global_rank}
    return {who: environment(who, name, **common, **extra) for who, extra in entries.items()}


CENTRAL_DIAL = {"GEOMX_SCHEDULER": "ipc:///s/central-scheduler-0.sock"}
GLOBAL_DIAL = {"GEOMX_GLOBAL_SCHEDULER": "ipc:///s/central-global_scheduler-0.sock"}
REFERENCE = {
    "central/global_scheduler:0": environment(
        "central/global_scheduler:0", "central",
        **ALL, **GLOBAL_SCHEDULER, **upper(20001, 1, 2),
        **listens("ipc:///s/central-global_scheduler-0.sock", "tcp://127.0.0.1:20001"),
    ),
    "central/global_server:0": environment(
        "central/global_server:0", "central",
        **ALL, **ROOT, **upper(20001, 1, 2), **local(20003, 1, 1), **CENTRAL_DIAL, **GLOBAL_DIAL,
        **listens("ipc:///s/central-global_server-0.sock", "tcp://127.0.0.1:20002"),
    ),
    "central/scheduler:0": environment(
        "central/scheduler:0", "central",
        **ALL, **SCHEDULER, **local(20003, 1, 1), **listens("ipc:///s/central-scheduler-0.sock"),
    ),
    "central/worker:0": environment(
        "central/worker:0", "central", **ALL, **MASTER, **local(20003, 1, 1), **CENTRAL_DIAL
    ),
    **party("A", 0, 20005, (0, 1)),
    **party("B", 1, 20009, (2, 3)),
}  # fmt: skip


def test_the_reference_cluster_has_twelve_processes_in_order() -> None:
    assert [process.name for process in make().processes] == list(REFERENCE)


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_environment(name: str) -> None:
    process = make().process(name)
    assert process.env == REFERENCE[name]
    assert process.argv == ("/py", "-P", "-m", "geomx_cli.runtime")
    assert process.host == REFERENCE[name]["GEOMX_HOST"]


SPREAD_OPTIONS = {"GEOMX_TOPOLOGY": "spread"}
SPREAD = {
    "central/scheduler:0": environment(
        "central/scheduler:0", "central", **ALL, **SPREAD_OPTIONS, **SCHEDULER, **local(20002, 2, 1),
        **listens("ipc:///s/central-scheduler-0.sock", "tcp://127.0.0.1:20002"),
    ),
    "central/worker:0": environment(
        "central/worker:0", "central", **ALL, **SPREAD_OPTIONS, **MASTER, **local(20002, 2, 1), **CENTRAL_DIAL
    ),
    "B/global_server:1": environment(
        "B/global_server:1", "B", **ALL, **SPREAD_OPTIONS, **ROOT, **upper(20001, 2, 2), **local(20002, 2, 1),
        **listens("ipc:///s/B-global_server-1.sock", "tcp://127.0.0.1:20009"), GEOMX_WAN_SHARE=0.5,
    ),
    "B/server:0": environment(
        "B/server:0", "B", **ALL, **SPREAD_OPTIONS, **SERVER, **upper(20001, 2, 2), **local(20010, 1, 2),
        GEOMX_SCHEDULER="ipc:///s/B-scheduler-0.sock", GEOMX_PARTY_INDEX=1, GEOMX_WAN_SHARE=0.5,
        **listens("ipc:///s/B-server-0.sock"),
    ),
    "B/worker:1": environment(
        "B/worker:1", "B", **ALL, **SPREAD_OPTIONS, **WORKER, **local(20010, 1, 2), GEOMX_GLOBAL_RANK=3,
        GEOMX_SCHEDULER="ipc:///s/B-scheduler-0.sock", GEOMX_PARTY_INDEX=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPREAD)
def test_spread_environment(name: str) -> None:
    assert make(topology="spread").process(name).env == SPREAD[name]


FLAT_OPTIONS = {"GEOMX_TOPOLOGY": "flat", "GEOMX_GLOBAL_SERVERS": 2}
FLAT = {
    "central/scheduler:0": environment(
        "central/scheduler:0", "central", **ALL, **FLAT_OPTIONS, **SCHEDULER, **local(20001, 2, 4),
        **listens("ipc:///s/central-scheduler-0.sock", "tcp://127.0.0.1:20001"),
    ),
    "central/server:1": environment(
        "central/server:1", "central", **ALL, **FLAT_OPTIONS, **SERVER, **local(20001, 2, 4), **CENTRAL_DIAL,
        **listens("tcp://127.0.0.1:20003"), GEOMX_WAN_SHARE=0.5,
    ),
    "A/worker:0": environment(
        "A/worker:0", "A", **ALL, **FLAT_OPTIONS, **WORKER, **local(20001, 2, 4),
        GEOMX_GLOBAL_RANK=0, GEOMX_PARTY_INDEX=0, GEOMX_WAN_SHARE=0.5,
    ),
    "B/worker:3": environment(
        "B/worker:3", "B", **ALL, **FLAT_OPTIONS, **WORKER, **local(20001, 2, 4),
        GEOMX_GLOBAL_RANK=3, GEOMX_PARTY_INDEX=1, GEOMX_WAN_SHARE=0.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FLAT)
def test_flat_environment(name: str) -> None:
    assert make(topology="flat", global_servers=2).process(name).env == FLAT[name]


def test_several_servers() -> None:
    found = make(local_servers=2, global_servers=3)
    assert [process.name for process in found.on_host("A")] == [
        "A/scheduler:0", "A/server:0", "A/server:1", "A/worker:0", "A/worker:1",
    ]  # fmt: skip
    for name, variable, count in (
        ("A/worker:0", "DMLC_NUM_SERVER", "2"),
        ("A/server:1", "DMLC_NUM_GLOBAL_SERVER", "3"),
        ("A/server:1", "DMLC_NUM_GLOBAL_WORKER", "4"),
        ("central/worker:0", "DMLC_NUM_SERVER", "3"),
        ("A/server:1", "GEOMX_WAN_SHARE", "0.5"),
    ):
        assert found.process(name).env[variable] == count
    assert float(found.process("central/global_server:2").env["GEOMX_WAN_SHARE"]) == 1 / 3


def test_central_workers_train_and_come_last() -> None:
    found = make(central_workers=2)
    first, second = (found.process(f"central/worker:{rank}") for rank in (0, 1))
    assert (first.global_rank, second.global_rank) == (4, 5)
    assert first.env["DMLC_ROLE_MASTER_WORKER"] == "1"
    assert "DMLC_ROLE_MASTER_WORKER" not in second.env
    for name in ("central/worker:0", "central/worker:1", "central/global_server:0"):
        assert found.process(name).env["DMLC_ENABLE_CENTRAL_WORKER"] == "1"
        assert found.process(name).env["DMLC_NUM_WORKER"] == "2"
    assert "DMLC_ENABLE_CENTRAL_WORKER" not in found.process("A/server:0").env
    assert {process.env["DMLC_NUM_ALL_WORKER"] for process in found.processes} == {"6"}


@pytest.mark.parametrize(
    ("given", "worker", "argument"),
    [
        ({}, "B/worker:1", "1/2 3/4 B"),
        ({}, "central/worker:0", "0/1 -1/4 central"),
        ({"rank_scope": "global"}, "B/worker:1", "3/4 3/4 B"),
        ({"topology": "flat"}, "B/worker:3", "3/4 3/4 B"),
    ],
)
def test_each_worker_has_its_own_argument(given: dict[str, Any], worker: str, argument: str) -> None:
    words = ("python", "train.py", "{rank}/{num_workers} {global_rank}/{num_all_workers} {party}", '{"rank": 1}{x}')
    found = make(replace(SPEC, script=words), **given).process(worker)
    assert found.argv == ("/py", "train.py", argument, '{"rank": 1}{x}')


def test_a_path_on_a_host_may_have_braces() -> None:
    """Only words of the user's command are filled in."""
    values = defaults()
    inventory = this_machine(values, range(9000, 9200), one_host=False)
    far = {"access": Ssh(address="far"), "address": "10.0.0.1", "state_dir": "/{rank}", "python": "/{party}/py"}
    hosts = [structs.replace(host, **far, sockets="/tmp/gx") for host in inventory.hosts]
    spec = replace(SPEC, options=values, script=("python", "train.py", "{rank}"), carried={"train.py": "train.py"})
    argv = plan(inventory.with_hosts(hosts), spec).process("B/worker:1").argv
    assert argv == ("/{party}/py", f"/{{rank}}/jobs/{spec.job}/files/train.py", "1")


@pytest.mark.parametrize(
    ("given", "processes"),
    [
        ({}, 10),
        ({"topology": "spread"}, 11),
        ({"topology": "spread", "central_workers": 1}, 15),
        ({"central_workers": 2}, 13),
        ({"local_servers": 2, "global_servers": 3}, 14),
    ],
)
def test_with_global_ranks_global_rank_0_is_the_master(given: dict[str, Any], processes: int) -> None:
    """All workers train; roots without central workers have no plane of the central party."""
    found = make(rank_scope="global", **given)
    assert len(found.processes) == processes
    (master,) = [process for process in found.processes if "DMLC_ROLE_MASTER_WORKER" in process.env]
    assert (master.name, master.global_rank) == ("A/worker:0", 0)
    workers = [process for process in found.processes if process.role == "worker"]
    count = 4 + given.get("central_workers", 0)
    assert sorted(process.env["GEOMX_GLOBAL_RANK"] for process in workers) == [str(rank) for rank in range(count)]
    assert {process.env["GEOMX_RANK_SCOPE"] for process in found.processes} == {"global"}
    roots = [process for process in found.processes if process.role == "global_server"]
    central_plane = "central_workers" in given and "topology" not in given
    assert all(("DMLC_PS_ROOT_URI" in root.env) == central_plane for root in roots)
    assert not any(process.role == "scheduler" for process in found.on_host("central")) or "central_workers" in given


def test_every_worker_runs_the_script_with_the_import_hook() -> None:
    spec = replace(SPEC, script=("python", "train.py", "--lr", "a b"), env={"PYTHONPATH": "/x:/y"})
    found = make(spec)
    for process in found.processes:
        if process.role == "worker":
            assert process.argv == ("/py", "train.py", "--lr", "a b")
            assert process.env["PYTHONPATH"] == f"{HOOK}:/x:/y"
            assert process.env["GEOMX_SEED"] == "1", "the default too, as scripts read it"
        else:
            assert "GEOMX_SEED" not in process.env
            assert process.argv == ("/py", "-P", "-m", "geomx_cli.runtime")
            assert process.env["PYTHONPATH"] == "/x:/y"
    plain = make(replace(SPEC, script=("./run", "python"))).process("A/worker:0")
    assert plain.argv == ("./run", "python")
    assert plain.env["PYTHONPATH"] == HOOK


def test_one_host_needs_no_tcp() -> None:
    found = make(one_host=True)
    assert found.hosts == ("local",)
    assert {endpoint.protocol for endpoint in found.endpoints} == {"ipc"}
    assert found.process("A/server:0").env.items() >= GLOBAL_DIAL.items()


def test_datagrams_come_to_the_port_of_the_slices() -> None:
    """The option chooses the delivery; no process needs another port."""
    found, without = make(dgt=1, global_servers=2), make(global_servers=2)
    ends = [end for end in found.endpoints if end.protocol == "udp"]
    assert [end.process for end in ends] == ["central/global_server:0", "central/global_server:1"]
    for end in ends:
        (tcp,) = (each for each in without.process(end.process).endpoints if each.protocol == "tcp")
        assert (end.purpose, end.port, end.bind) == ("datagrams", tcp.port, tcp.bind.replace("tcp", "udp"))
    assert f"listens      {ends[0].bind} (datagrams, global plane)" in plan_text(found)
    assert [end for end in found.endpoints if end.protocol != "udp"] == list(without.endpoints)
    env = found.process("A/server:0").env
    assert (env["GEOMX_DELIVERY"], env["ENABLE_DGT"]) == ("dgt", "1")
    assert "udp" not in {end.protocol for end in make(dgt=2).endpoints}
    assert {end.protocol for end in make(one_host=True, dgt=1).endpoints} == {"ipc"}


CLUSTERS: list[dict[str, Any]] = [
    {},
    {"parties": 28, "workers": 1},
    {"central_workers": 3},
    {"local_servers": 3, "global_servers": 2},
    {"topology": "spread"},
    {"topology": "spread", "parties": 3, "global_servers": 2, "local_servers": 2},
    {"topology": "spread", "central_workers": 2},
    {"topology": "flat"},
    {"topology": "flat", "parties": 1, "workers": 5, "global_servers": 4},
    {"one_host": True, "central_workers": 1},
    {"one_host": True, "topology": "spread"},
    {"one_host": True, "topology": "flat"},
]


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
class TestEveryCluster:
    def test_what_is_dialled_is_bound_by_exactly_one(self, cluster: dict[str, Any]) -> None:
        found = make(**cluster)
        bound: dict[str, list[str]] = {}
        for process in found.processes:
            for endpoint in process.env.get("GEOMX_BIND", "").split():
                bound.setdefault(endpoint, []).append(process.name)
        for process in found.processes:
            settings = Settings.from_environment(table(), process.env)
            for plane, leads in (
                (settings.local, settings.role == "scheduler"),
                (settings.upper, settings.role == "global_scheduler"),
            ):
                if plane is not None and not leads:
                    assert len(bound[plane.endpoint]) == 1
        for dialler, listener in found.links:
            near = found.process(dialler).host == found.process(listener).host
            scheme = "ipc://" if near else "tcp://"
            own = found.process(listener).endpoints
            (reached,) = [item for item in own if item.advertised.startswith(scheme)]
            assert bound[reached.bind] == [listener]

    def test_names_ranks_and_ports_are_unique(self, cluster: dict[str, Any]) -> None:
        found = make(**cluster)
        names = [process.name for process in found.processes]
        files = [process.file_name for process in found.processes]
        ranks = [process.global_rank for process in found.processes if process.global_rank is not None]
        ports = [endpoint.port for endpoint in found.endpoints if endpoint.protocol == "tcp"]
        assert len(set(names)) == len(names) == len(set(files))
        assert sorted(ranks) == list(range(len(ranks)))
        assert {process.env["DMLC_NUM_ALL_WORKER"] for process in found.processes} == {str(len(ranks))}
        assert len(set(ports)) == len(ports)
        assert sum("DMLC_ROLE_MASTER_WORKER" in process.env for process in found.processes) == (
            cluster.get("topology") != "flat"
        )

    def test_the_sizes_of_the_planes_are_those_of_the_links(self, cluster: dict[str, Any]) -> None:
        found = make(**cluster)
        for process in found.processes:
            if not process.role.endswith("scheduler"):
                continue
            members = [dialler for dialler, listener in found.links if listener == process.name]
            infix = "GLOBAL_" if process.role == "global_scheduler" else ""
            sizes = [int(process.env[f"DMLC_NUM_{infix}{kind}"]) for kind in ("SERVER", "WORKER")]
            assert len(members) == sum(sizes)

    def test_the_environment_is_read_back(self, cluster: dict[str, Any]) -> None:
        for process in make(**cluster).processes:
            settings = Settings.from_environment(table(), process.env)
            assert settings.to_environment(table()) | {"OMP_NUM_THREADS": "1"} == process.env
            assert settings.role == process.role
            assert (settings.rank, settings.global_rank) == (process.rank, process.global_rank)

    def test_the_same_inputs_give_the_same_plan(self, cluster: dict[str, Any]) -> None:
        assert make(**cluster) == make(**cluster)
        written = json.loads(json.dumps(make(**cluster).to_json()))
        assert written["schema_version"] == 1
        assert len(written["processes"]) == len(make(**cluster).processes)


def wide_area() -> Inventory:
    """Four machines; the central one has another external address, and party B uses IPv6."""
    return Inventory(
        central=Party(name="hub", workers=0),
        parties=(Party(name="A", workers=3), Party(name="B", workers=1)),
        hosts=(
            Host(
                name="h", parties=("hub",), access=Ssh(address="gate"), address="10.0.0.1", wan_address="192.0.2.1",
                interface="eth1", python="/opt/py", ports=(9092, 9093, 9094),
            ),
            Host(
                name="a1", parties=("A",), access=Ssh(address="10.1.0.1"), devices=("gpu0", "gpu3"),
                ports=(9092, 9093), threads=4, state_dir="/var/gx",
            ),
            Host(
                name="a2", parties=("A",), access=Ssh(address="a2"), address="10.1.0.2", devices=("cpu", "cpu"),
                env={"OMP_NUM_THREADS": "7"}, package="/lib/geomx_cli",
            ),
            Host(
                name="b", parties=("B",), access=Ssh(address="b"), address="2001:db8::1", ports=(9092,),
                devices=("cpu",), listen="::",
            ),
        ),
    )  # fmt: skip


def test_machines_of_several_parties() -> None:
    found = plan(wide_area(), replace(SPEC, script=("python3", "t.py")))
    root = found.process("hub/global_server:0")
    assert root.env["GEOMX_BIND"].split()[1] == "tcp://0.0.0.0:9093"
    assert root.env["GEOMX_ADVERTISE"].split()[1] == "tcp://192.0.2.1:9093"
    assert root.env["DMLC_INTERFACE"] == "eth1"
    assert root.argv[0] == "/opt/py"
    server = found.process("A/server:0")
    assert server.env["DMLC_PS_GLOBAL_ROOT_URI"] == "192.0.2.1"
    assert server.env["GEOMX_BIND"].split() == ["ipc:///s/A-server-0.sock", "tcp://10.1.0.1:9093"]
    assert [found.process(f"A/worker:{rank}").host for rank in range(3)] == ["a1", "a1", "a2"]
    far = found.process("A/worker:2").env
    assert (far["DMLC_PS_ROOT_URI"], far["DMLC_PS_ROOT_PORT"]) == ("10.1.0.1", "9092")
    assert "GEOMX_SCHEDULER" not in far
    assert (far["OMP_NUM_THREADS"], far["PYTHONPATH"]) == ("7", "/lib/geomx_cli/runtime/hook")
    assert found.process("A/worker:0").env["OMP_NUM_THREADS"] == "4"
    assert found.process("B/worker:0").env["DMLC_PS_ROOT_URI"] == "2001:db8::1"
    assert found.process("B/worker:0").env["GEOMX_SCHEDULER"] == "ipc:///s/B-scheduler-0.sock"


def test_scripts_for_torchrun_find_their_ranks() -> None:
    """Those of all parties; local ones by host, but a worker with a GPU has cuda:0 alone."""

    def ranks(found: Plan) -> list[str]:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        workers = [process.env for process in found.processes if process.role == "worker"]
        return [" ".join(env.get(name, "-") for name in names) for env in workers]

    spec = replace(SPEC, script=("python3", "t.py"), env={"MASTER_ADDR": "10.9.8.7"})
    assert ranks(make(spec, rank_scope="global")) == ["0 4 0 2", "1 4 1 2", "2 4 0 2", "3 4 1 2"]
    assert ranks(make(spec)) == ["- - - -", "0 4 0 2", "1 4 1 2", "2 4 0 2", "3 4 1 2"], "the master does not train"
    several = plan(wide_area(), spec)
    assert ranks(several)[1:] == ["0 4 0 1", "1 4 0 1", "2 4 0 1", "3 4 0 1"]
    env = make(spec).process("A/worker:0").env
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.9.8.7", "29500")
    groups = [[env[f"{kind}_{name}"] for kind in ("GROUP", "ROLE") for name in ("RANK", "WORLD_SIZE")]
              for env in (several.process(name).env for name in ("A/worker:1", "A/worker:2", "B/worker:0"))]
    assert groups == [["1", "4", "1", "4"], ["2", "4", "2", "4"], ["3", "4", "3", "4"]]
    assert (env["GROUP_RANK"], env["GROUP_WORLD_SIZE"], env["NODE_RANK"]) == ("0", "2", "0"), "a host of each party"
    assert env["TORCHELASTIC_RUN_ID"] == SPEC.job and env["TORCHELASTIC_RESTART_COUNT"] == "0"
    assert "RANK" not in make(SPEC).process("A/worker:0").env, "the bundled job"


def test_the_central_party_dials_its_servers_by_their_near_address() -> None:
    hosts = [
        *(host for host in wide_area().hosts if host.name != "h"),
        structs.replace(wide_area().host("h"), name="g", devices=("cpu",)),
    ]
    other = Host(name="h2", parties=("hub",), access=Ssh(address="10.0.0.2"), devices=("cpu",))
    inventory = structs.replace(wide_area(), central=Party(name="hub", workers=2), hosts=(*hosts, other))
    found = plan(inventory, SPEC)
    root, worker = found.process("hub/global_server:0"), found.process("hub/worker:1")
    assert (root.host, worker.host) == ("g", "h2")
    assert root.env["GEOMX_ADVERTISE"].split()[1:] == ["tcp://10.0.0.1:9093", "tcp://192.0.2.1:9093"]
    member = Member(root.name, "hub", "g", "server", 0, tuple(root.env["GEOMX_ADVERTISE"].split()))
    for host, party, dialled in (
        ("g", "hub", "ipc:///s/hub-global_server-0.sock"),
        ("h2", "hub", "tcp://10.0.0.1:9093"),
        ("a1", "A", "tcp://192.0.2.1:9093"),
    ):
        assert member.endpoint_for(host, party) == dialled


def test_each_device_has_a_worker() -> None:
    found = plan(wide_area(), SPEC)
    wanted = {"A/worker:0": "0", "A/worker:1": "3", "A/worker:2": None, "hub/worker:0": None, "A/server:0": None}
    for name, device in wanted.items():
        env = found.process(name).env
        assert env.get("CUDA_VISIBLE_DEVICES") == device
        assert env.get("GEOMX_DEVICE") == (device and f"gpu{device}")


def test_a_host_has_its_own_job_directory_and_address() -> None:
    found = plan(wide_area(), SPEC)
    assert found.job_dirs == {"h": "/jobs/j1", "a1": "/var/gx/jobs/j1", "a2": "/jobs/j1", "b": "/jobs/j1"}
    for name, folder, address in (
        ("A/worker:0", "/var/gx/jobs/j1", "10.1.0.1"),
        ("A/worker:2", "/jobs/j1", "10.1.0.2"),
        ("B/server:0", "/jobs/j1", "2001:db8::1"),
    ):
        env = found.process(name).env
        file = name.replace("/", "-").replace(":", "-")
        assert (env["GEOMX_JOB_DIR"], env["GEOMX_KEY_FILE"]) == (folder, f"{folder}/keys/{file}.key")
        assert env["DMLC_NODE_HOST"] == address
    assert "GEOMX_KEY_FILE" not in plan(wide_area(), replace(SPEC, key_dir="")).process("A/worker:0").env
    everywhere = wide_area().with_hosts(
        structs.replace(host, **({"listen": "::"} if host.name == "a1" else {})) for host in wide_area().hosts
    )
    bound = plan(everywhere, SPEC).process("A/server:0").endpoints[1]
    assert (bound.bind, bound.advertised) == ("tcp://[::]:9093", "tcp://10.1.0.1:9093")


@pytest.mark.parametrize(
    ("address", "wan_address", "bound"),
    [
        ("10.0.0.1", "", "tcp://10.0.0.1:9092"),
        ("10.0.0.1", "192.0.2.1", "tcp://0.0.0.0:9092"),
        ("10.0.0.1", "2001:db8::7", "tcp://[::]:9092"),
        ("2001:db8::7", "", "tcp://[2001:db8::7]:9092"),
        ("2001:db8::7", "192.0.2.1", "tcp://[::]:9092"),
        ("hub.example.org", "", "tcp://0.0.0.0:9092"),
        ("localhost", "", "tcp://localhost:9092"),
    ],
)
def test_what_is_bound_can_be_dialled(address: str, wan_address: str, bound: str) -> None:
    changes = {"address": address, "wan_address": wan_address}
    inventory = wide_area().with_hosts(
        structs.replace(host, **(changes if host.name == "h" else {})) for host in wide_area().hosts
    )
    (_, endpoint) = plan(inventory, SPEC).process("hub/global_scheduler:0").endpoints
    assert endpoint.bind == bound
    known = wan_address or address
    assert endpoint.advertised == (f"tcp://[{known}]:9092" if ":" in known else f"tcp://{known}:9092")


def rearranged(runs: dict[str, tuple[str, ...]], **fields: Any) -> Inventory:
    """Six machines of three parties, with these `runs`."""
    hosts = [
        {
            "name": name, "parties": (name[0],), "access": {"kind": "ssh", "address": name},
            "ports": tuple(range(9100, 9110)), "devices": () if name[0] == "c" else ("cpu",),
            "runs": runs.get(name, ()),
        }
        for name in ("c1", "c2", "x1", "x2", "y1", "y2")
    ]  # fmt: skip
    parties = [{"name": name, "workers": 2} for name in "xy"]
    return validated({"central": {"name": "c", "workers": 0}, "parties": parties, "hosts": hosts, **fields})


PLACES: list[tuple[dict[str, tuple[str, ...]], dict[str, Any], dict[str, str]]] = [
    ({}, {"local_servers": 3}, {"x/scheduler:0": "x1", "x/server:0": "x1", "x/server:1": "x2", "x/server:2": "x1"}),
    ({"x2": ("server",)}, {"local_servers": 2}, {"x/scheduler:0": "x1", "x/server:0": "x2", "x/server:1": "x2"}),
    ({"x1": ("server",)}, {}, {"x/scheduler:0": "x2", "x/server:0": "x1", "x/worker:0": "x1", "x/worker:1": "x2"}),
    (
        {"c2": ("global_server", "global_scheduler")},
        {"global_servers": 2},
        {
            "c/global_scheduler:0": "c2", "c/global_server:0": "c2", "c/global_server:1": "c2",
            "c/scheduler:0": "c1", "c/worker:0": "c1",
        },
    ),
    ({"y2": ("global_server",)}, {"topology": "spread"}, {"y/global_server:1": "y2", "y/server:0": "y1"}),
    ({"c2": ("server",)}, {"topology": "flat"}, {"c/scheduler:0": "c1", "c/server:0": "c2"}),
]  # fmt: skip


@pytest.mark.parametrize(("runs", "fields", "wanted"), PLACES, ids=str)
def test_roles_stand_where_the_inventory_says(
    runs: dict[str, tuple[str, ...]], fields: dict[str, Any], wanted: dict[str, str]
) -> None:
    found = plan(choose(rearranged(runs, **fields), None), SPEC)
    assert {name: found.process(name).host for name in wanted} == wanted


@pytest.mark.parametrize(
    ("runs", "fields", "message"),
    [
        ({"x1": ("global_server",)}, {}, "party x has no global_server with topology central"),
        ({"x1": ("server",), "x2": ("server",)}, {}, "no host of party x runs its scheduler"),
        ({"x1": ("scheduler",), "x2": ("scheduler",)}, {}, "scheduler of party x is to run on x1 and x2"),
        ({"x1": ("scheduler",)}, {"topology": "flat"}, "party x has no scheduler with topology flat"),
        ({"x1": ("teacher",)}, {}, "teacher"),
    ],
)
def test_roles_that_cannot_stand_there(
    runs: dict[str, tuple[str, ...]], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidSettings, match=message):
        plan(rearranged(runs, **fields), SPEC)


class TestPorts:
    def ports(self, inventory: Inventory) -> dict[str, tuple[int, ...]]:
        return {host.name: host.ports for host in inventory.hosts}

    def of(self, *hosts: dict[str, Any], **fields: Any) -> Inventory:
        """Each host is a separate party; the first is the central one."""
        made = [
            {"access": {"kind": "ssh", "address": f"m{index}"}, "devices": ("cpu",) if index else (), **host}
            | {"name": f"h{index}", "parties": (f"p{index}",), "ports": tuple(host["ports"])}
            for index, host in enumerate(hosts)
        ]
        parties = [{"name": f"p{index}", "workers": 1} for index in range(1, len(hosts))]
        central = {"name": "p0", "workers": 0}
        return validated({"central": central, "parties": parties, "hosts": made, **fields})

    def test_the_first_candidates_that_are_free(self) -> None:
        inventory = self.of({"ports": range(9100, 9105)}, {"ports": (9103, 9102)}, {"ports": (9100, 9102)})
        assert self.ports(choose(inventory, None)) == {"h0": (9100, 9101, 9102), "h1": (9103,), "h2": (9100,)}
        free = {"h0": [9104, 9103, 9101], "h1": [9102], "h2": [9102]}
        assert self.ports(choose(inventory, free)) == {"h0": (9101, 9103, 9104), "h1": (9102,), "h2": (9102,)}

    def test_hosts_at_one_address_get_different_ports(self) -> None:
        shared = {"address": "10.0.0.1"}
        inventory = self.of(
            {"ports": range(9100, 9103), **shared}, {"ports": range(9100, 9104), **shared}, {"ports": (9100,)}
        )
        assert self.ports(choose(inventory, None)) == {"h0": (9100, 9101, 9102), "h1": (9103,), "h2": (9100,)}

    def test_a_host_gives_way_to_one_that_has_less_choice(self) -> None:
        shared = {"wan_address": "192.0.2.1"}
        inventory = self.of(*({"ports": ports, **shared} for ports in ((1, 2, 3, 4, 5), (1, 2), (2,))))
        assert self.ports(choose(inventory, None)) == {"h0": (3, 4, 5), "h1": (1,), "h2": (2,)}

    def test_equal_private_addresses_of_two_sites_do_not_matter(self) -> None:
        inventory = self.of(
            {"ports": (1, 2, 3), "address": "10.0.0.1", "wan_address": "192.0.2.1"},
            {"ports": (1,), "address": "10.0.0.1", "wan_address": "192.0.2.2"},
        )
        assert self.ports(choose(inventory, None)) == {"h0": (1, 2, 3), "h1": (1,)}

    def test_too_few(self) -> None:
        inventory = self.of({"ports": (1, 2)}, {"ports": (1,)})
        with pytest.raises(InvalidSettings, match=r"host h0 needs 3 ports .* and has 2 \("):
            choose(inventory, None)
        inventory = self.of({"ports": (1, 2, 3), "address": "::1"}, {"ports": (1,), "address": "::1"})
        with pytest.raises(InvalidSettings, match=r"h1 needs 1 port .* shares with h0 at ::1") as caught:
            choose(inventory, None)
        assert "ports = " in caught.value.hint
        with pytest.raises(InvalidSettings, match="has 3, 2 of them taken by other programs"):
            choose(self.of({"ports": (1, 2, 3)}, {"ports": (1,)}), {"h0": [1], "h1": [1]})


def test_a_cluster_of_a_thousand_is_planned_at_once() -> None:
    found = make(parties=200, workers=4)
    assert len(found.processes) == 4 + 200 * 6
    assert len(found.links) == 4 + 200 * (2 + 1 + 4 + 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"topology": "flat", "central_workers": 1}, "flat has no central workers"),
        ({"topology": "flat", "local_servers": 2}, "flat has no local servers"),
        ({"heartbeat": 5.0, "silence": 6.0}, "--silence 6s is too short"),
        ({"algo": "none-such"}, "none-such"),
        ({"parties": 0}, "parties"),
        ({"lr": -1.0}, "--lr"),
        ({"colour": "red"}, "there is no option 'colour'"),
        ({"dgt": 2, "topology": "flat"}, "a flat cluster has no local servers"),
        ({"dgt": 2, "compress": "fp16"}, "--compress fp16 encodes all tensors"),
        ({"dgt": 2, "compress": "mpq:0.01"}, "--compress mpq:0.01 encodes all tensors"),
        ({"dgt": 2, "tsengine": "inter", "compress": "fp16"}, "--dgt 2: --compress fp16 encodes all tensors"),
        ({"delivery": "dgt"}, "write --dgt 1, 2 or 3"),
        ({"dgt": 1, "dgt_block": 1000}, "a multiple of 64"),
        ({"dgt": 4}, "--dgt"),
        ({"on_worker_loss": "leave"}, "--on-worker-loss leave is for scripts"),
        ({"spec": SCRIPT, "on_worker_loss": "restart-all", "restarts": 0}, "with --restarts 0"),
        ({"spec": SCRIPT, "on_worker_loss": "leave", "reduce": "torch"}, "leave with --reduce torch"),
        ({"spec": SCRIPT, "on_worker_loss": "leave", "tsengine": "both"}, "workers send through one another"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettings, match=message) as caught:
        make(**given)
    assert caught.value.hint


def test_a_network_in_numpy_takes_no_gpu() -> None:
    inventory = this_machine(options.defaults(), range(20001, 20013))
    gpus = {"A": ("cpu", "gpu0")}
    hosts = [structs.replace(host, devices=gpus.get(host.name, host.devices)) for host in inventory.hosts]
    inventory = inventory.with_hosts(hosts)
    linear = replace(SPEC, options={"network": "linear"})
    with pytest.raises(InvalidSettings, match="host A: gpu0 is to train, and --network linear uses no GPU"):
        plan(inventory, linear)
    for works in (replace(SPEC, options={"network": "cnn"}), replace(linear, script=("python", "train.py"))):
        assert plan(inventory, works).process("A/worker:1").env["GEOMX_DEVICE"] == "gpu0"


def test_paths_and_ports_are_checked() -> None:
    with pytest.raises(InvalidSettings, match="longer than"):
        make(replace(SPEC, socket_dir="/" + "x" * 90))
    for folder in ("relative", "/with blank", ""):
        with pytest.raises(InvalidSettings, match="directory of unix sockets"):
            make(replace(SPEC, socket_dir=folder))
    with pytest.raises(InvalidSettings, match="12 free ports are needed and there are 3"):
        this_machine(options.defaults(), [1, 2, 3])
    short = structs.replace(wide_area(), global_servers=2)
    with pytest.raises(InvalidSettings, match="host h has 3 ports"):
        plan(short, SPEC)
    with pytest.raises(InvalidSettings, match="host h is another"):
        plan(wide_area(), replace(SPEC, options={"wan": "10mbit"}))
    with pytest.raises(InvalidSettings, match=r"\[\[link\]\] emulates links on one machine"):
        plan(structs.replace(wide_area(), links=(WanLink(source="hub", target="A", delay=0.1),)), SPEC)


def test_every_process_knows_the_emulated_links() -> None:
    values = options.defaults() | {"parties": 2}
    links = (WanLink(source="A", target="B", rate=5e7, delay=0.04), WanLink(source="B", target="A", delay=0.001))
    inventory = structs.replace(this_machine(values, range(20001, 20001 + ports_needed(values))), links=links)
    found = plan(inventory, replace(SPEC, options=values))
    assert {item.env["GEOMX_LINKS"] for item in found.processes} == {"A>B=50000000bit,0.040000s B>A=0.001000s"}
    server = Settings.from_environment(table(), found.process("A/server:0").env)
    assert server.links == tuple(link.text for link in links)
    assert found.network == "emulated network: A to B 50 Mbit/s, delay 40 ms; B to A delay 1 ms"


@pytest.mark.parametrize(
    ("wan", "line"),
    [("", ""), ("100mbit,30ms", "emulated network: each party 100 Mbit/s, round trip 30 ms"),
     ("512kbit", "emulated network: each party 0.512 Mbit/s")],
)  # fmt: skip
def test_a_plan_names_the_emulated_network(wan: str, line: str) -> None:
    values = options.defaults() | {"wan": wan}
    inventory = this_machine(values, range(20001, 20001 + ports_needed(values)))
    found = plan(inventory, replace(SPEC, options=values))
    assert found.network == line
    assert plan_text(found).splitlines()[1:2] == [line], "or an empty line"


def test_the_inventory_refuses_what_does_not_fit() -> None:
    with pytest.raises(InvalidSettings, match=r"port 127\.0\.0\.1:5000 is there twice"):
        this_machine(options.defaults(), [5000] * 12)
    with pytest.raises(InvalidSettings, match=r"port 5001 of 127\.0\.0\.1 is given to two"):
        plan(this_machine(options.defaults(), [5001, 5002, 5003, 5004] * 3), replace(SPEC, key_dir=""))
    with pytest.raises(InvalidSettings, match="port"):
        this_machine(options.defaults(), range(65530, 65542))
    with pytest.raises(ValueError, match="party A has no host"):
        Inventory(
            central=Party(name="hub", workers=0),
            parties=(Party(name="A", workers=1),),
            hosts=(Host(name="h", parties=("hub",), address="::1"),),
        )
    with pytest.raises(ValueError, match="party A has 2 workers and 1 devices"):
        Inventory(
            central=Party(name="hub", workers=0),
            parties=(Party(name="A", workers=2),),
            hosts=(Host(name="h", parties=("hub", "A"), devices=("cpu",)),),
        )
    with pytest.raises(ValueError, match="device gpu1 is there twice"):
        Host(name="h", parties=("hub",), devices=("cpu", "gpu1", "cpu", "gpu1"))


@pytest.mark.processes
def test_no_two_launches_choose_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geomx_cli.hosts.ports.random.sample", lambda candidates, _: list(candidates))
    again = "from geomx_cli.hosts import ports; ports.random.sample = lambda c, _: list(c); print(*ports.free_ports(5))"
    mine = free_ports(5)
    for released in (False, True):
        if released:
            release(mine)
        found = subprocess.run([sys.executable, "-c", again], capture_output=True, text=True, check=True).stdout.split()
        assert len(found) == 5 and bool(set(mine) & set(map(int, found))) == released


def test_free_ports_are_distinct() -> None:
    ports = free_ports(30)
    assert len(set(ports)) == 30


def test_benchmarks_place_nine_parties(monkeypatch: pytest.MonkeyPatch) -> None:
    """C is the site of the central party, and party C at another."""
    monkeypatch.syspath_prepend(str(Path(geomx_cli.__file__).parents[1] / "benchmarks"))
    from pushpull_job import planned  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:  # sockets need a short path
        found = planned({"parties": 9, "workers": 1}, Path(folder), None)
    places = {process.party: site for process, site, *_ in found}
    assert (places["central"], places["C"], places["I"]) == ("C", "D", "J")
    assert len({*places.values()}) == 10
