"""The plan of a job: every process with its host, command, environment and endpoints. A pure function.

`launch` starts what the plan says and `--dry-run` prints it; nothing here looks at the machine.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from geomx_cli import plugins
from geomx_cli.endpoints import Endpoint, lay_endpoints
from geomx_cli.errors import InvalidSettings
from geomx_cli.inventory import Host, Inventory, is_ip, is_loopback
from geomx_cli.options import Value, check, defaults
from geomx_cli.ps.config import PlaneSettings, Role
from geomx_cli.runtime.settings import Settings
from geomx_cli.topology import Link, Node, Plane, arrange, file_name, links, planes

__all__ = ["SCHEMA_VERSION", "Endpoint", "JobSpec", "Plan", "Process", "file_name", "plan"]

SCHEMA_VERSION = 1
_PACKAGE = str(Path(__file__).parent)


@dataclass(frozen=True)
class JobSpec:
    """What to run. `options` may leave out those at their default; `script` is () for the bundled job.

    `job_dir`, `socket_dir` and `key_dir` are paths on every host; one with a `state_dir` has the job in
    `{state_dir}/jobs/{job}` and its keys beneath. Each process has its own file of keys; without `key_dir` there
    are none, and processes listen on loopback only. `python` is for hosts that name none. `env` is what each
    process of this machine has beneath its own variables (a host's `env` goes before it): PYTHONPATH, thread counts.
    `carried` are words of the script that name files which other machines get, with their place below `files_dir`.
    """

    job: str = ""
    options: Mapping[str, Value] = field(default_factory=dict)
    script: tuple[str, ...] = ()
    carried: Mapping[str, str] = field(default_factory=dict)
    job_dir: str = ""
    socket_dir: str = ""
    key_dir: str = ""
    python: str = "python3"
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Process:
    """One process. `rank` counts the processes of its role (see topology.Node); `env` is exact."""

    name: str
    host: str
    party: str
    role: Role
    rank: int
    global_rank: int | None
    argv: tuple[str, ...]
    env: Mapping[str, str]
    endpoints: tuple[Endpoint, ...]

    @property
    def file_name(self) -> str:
        """The stem of its log and event log: "A-worker-1"."""
        return file_name(self.name)


@dataclass(frozen=True)
class Plan:
    """Every process of a job, and who dials whom. `spec` has every option's value.

    `job_dirs` has, for each host that runs something, the job's directory there.
    """

    job: str
    spec: JobSpec
    topology: Literal["central", "spread", "flat"]
    processes: tuple[Process, ...]
    links: tuple[tuple[str, str], ...]
    job_dirs: Mapping[str, str]

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Those of all processes."""
        return tuple(endpoint for process in self.processes for endpoint in process.endpoints)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts that run something, in the order of the processes."""
        return tuple(dict.fromkeys(process.host for process in self.processes))

    def process(self, name: str) -> Process:
        """The process called `name`. Raises InvalidSettings when there is none."""
        for process in self.processes:
            if process.name == name:
                return process
        known = ", ".join(process.name for process in self.processes)
        raise InvalidSettings(f"there is no process {name!r}", f"there are {known}")

    def files_dir(self, host: str) -> str:
        """Where a host that is another machine keeps what it got along with the job."""
        return f"{self.job_dirs[host]}/files"

    def on_host(self, host: str) -> tuple[Process, ...]:
        """The processes of one host."""
        return tuple(process for process in self.processes if process.host == host)

    def to_json(self) -> dict[str, Any]:
        """The plan as an object that `json` writes."""
        return {
            "schema_version": SCHEMA_VERSION,
            "job": self.job,
            "topology": self.topology,
            "script": list(self.spec.script),
            "options": dict(self.spec.options),
            "job_dir": self.spec.job_dir,
            "job_dirs": dict(self.job_dirs),
            "socket_dir": self.spec.socket_dir,
            "processes": [asdict(process) for process in self.processes],
            "links": [{"dialler": dialler, "listener": listener} for dialler, listener in self.links],
        }


def plan(inventory: Inventory, spec: JobSpec) -> Plan:
    """Lay out the job `spec` on the machines of `inventory`.

    The cluster's options in `spec` give way to the inventory. Raises InvalidSettings for an unknown option, a
    value out of range, a combination that cannot work, a host with too few ports and too deep a socket
    directory.
    """
    spec = replace(spec, options=_complete(inventory, spec))
    _check(inventory, spec)
    nodes = arrange(inventory)
    layout = _Layout.of(nodes, spec)
    return Plan(
        job=spec.job,
        spec=spec,
        topology=inventory.topology,
        processes=tuple(_process(node, layout) for node in nodes),
        links=tuple((wire.dialler.name, wire.listener.name) for wire in layout.wires),
        job_dirs={node.host.name: _job_dir(node.host, spec) for node in nodes},
    )


@dataclass(frozen=True)
class _Layout:
    """What every process's settings are made from. `carriers`: the processes of each party that have a part of its
    emulated link."""

    spec: JobSpec
    wires: tuple[Link, ...]
    planes: Mapping[str, Plane]
    endpoints: Mapping[str, Sequence[Endpoint]]
    carriers: Mapping[str, Collection[str]]
    all_workers: int

    @classmethod
    def of(cls, nodes: Sequence[Node], spec: JobSpec) -> "_Layout":
        wires = links(nodes)
        return cls(
            spec=spec,
            wires=wires,
            planes=planes(nodes),
            endpoints=lay_endpoints(nodes, wires, spec.socket_dir),
            carriers=_carriers(wires),
            all_workers=sum(node.global_rank is not None for node in nodes),
        )


def _complete(inventory: Inventory, spec: JobSpec) -> dict[str, Value]:
    known = {option.name: option for option in plugins.table()}
    for name in spec.options:
        if name not in known:
            raise InvalidSettings(f"there is no option {name!r}", f"choose from {', '.join(sorted(known))}")
    values = defaults(known.values()) | dict(spec.options) | inventory.options()
    return {name: check(known[name], value) for name, value in values.items()}


def _check(inventory: Inventory, spec: JobSpec) -> None:
    """Refuse what cannot work, with one message each."""
    options, topology = spec.options, inventory.topology
    if topology == "flat" and inventory.central.workers:
        raise InvalidSettings(
            "--topology flat has no central workers", "leave them out, or add a party (--parties)"
        )
    if topology == "flat" and inventory.local_servers > 1:
        raise InvalidSettings("--topology flat has no local servers", "share the model with --global-servers")
    if float(options["silence"]) < 2 * float(options["heartbeat"]):
        raise InvalidSettings(
            f"--silence {options['silence']:g}s is too short for a heartbeat every {options['heartbeat']:g}s",
            "make --silence at least twice --heartbeat",
        )
    remote = [host.name for host in inventory.hosts if host.ssh is not None]
    if options["wan"] and remote:
        raise InvalidSettings(
            f"--wan emulates links on one machine, and host {remote[0]} is another", "leave out --wan"
        )
    for kind, option in (("algorithm", "algo"), ("delivery", "delivery")):
        name = str(options[option])
        reason = plugins.find(kind, name).refuses(spec)  # type: ignore[arg-type]
        if reason:
            hint = f"change --{option} or what it cannot work with"
            raise InvalidSettings(f"--{option} {name}: {reason}", hint)


def _job_dir(host: Host, spec: JobSpec) -> str:
    return f"{host.state_dir}/jobs/{spec.job}" if host.state_dir else spec.job_dir


def _command(host: Host, spec: JobSpec) -> list[str]:
    """The script's command, with the files that another machine got where they lie there."""
    if host.ssh is None:
        return list(spec.script)
    folder = f"{_job_dir(host, spec)}/files"
    return [f"{folder}/{spec.carried[word]}" if word in spec.carried else word for word in spec.script]


def _key_file(node: Node, spec: JobSpec) -> str:
    if not spec.key_dir:
        return ""
    folder = f"{_job_dir(node.host, spec)}/keys" if node.host.state_dir else spec.key_dir
    return f"{folder}/{file_name(node.name)}.key"


def _settings(node: Node, layout: _Layout) -> Settings:
    spec, own = layout.spec, layout.endpoints.get(node.name, ())
    carriers = layout.carriers.get(node.party, ())
    return Settings(
        role=node.role,
        local=_plane(node.local, node, layout),
        upper=_plane(node.upper, node, layout),
        master=node.master,
        central_workers=bool(node.local) and node.index is None and int(spec.options["central_workers"]) > 0,
        num_all_workers=layout.all_workers,
        interface=node.host.interface,
        node_host=_node_host(node.host),
        job=spec.job,
        job_dir=_job_dir(node.host, spec),
        process=node.name,
        party=node.party,
        party_index=node.index,
        host=node.host.name,
        rank=node.rank,
        global_rank=node.global_rank,
        bind=tuple(endpoint.bind for endpoint in own),
        advertise=tuple(endpoint.advertised for endpoint in own),
        key_file=_key_file(node, spec),
        wan_share=1 / len(carriers) if node.name in carriers else 1.0,
        device=node.device if node.device.startswith("gpu") else "",
        options=spec.options,
    )


def _node_host(host: Host) -> str:
    """The host's own IP address, for a script that asks for it; "" where it is not known or means nothing elsewhere."""
    address = host.near_address
    return address if is_ip(address) and not is_loopback(address) else ""


def _plane(name: str, node: Node, layout: _Layout) -> PlaneSettings | None:
    if not name:
        return None
    plane = layout.planes[name]
    leader, endpoints = plane.leader, layout.endpoints[plane.leader.name]
    near = leader.host.name == node.host.name and leader is not node
    sockets = [endpoint.advertised for endpoint in endpoints if endpoint.protocol == "ipc"]
    return PlaneSettings(
        uri=leader.host.address_for(node.host),
        port=endpoints[0].port,
        servers=len(plane.servers),
        workers=len(plane.clients),
        scheduler=sockets[0] if near else "",
    )


def _carriers(wires: Sequence[Link]) -> dict[str, set[str]]:
    """Of each party, the processes that carry slices over its emulated link."""
    found: dict[str, set[str]] = {}
    for wire in wires:
        if wire.wide_area and not wire.listener.role.endswith("scheduler"):
            for end in (wire.dialler, wire.listener):
                found.setdefault(end.party, set()).add(end.name)
    return found


def _process(node: Node, layout: _Layout) -> Process:
    spec = layout.spec
    python = node.host.python or spec.python
    # Servers add arrays in one thread; a worker shares the cores with others unless its host says more.
    threads = node.host.threads if node.role == "worker" else 1
    env = {"OMP_NUM_THREADS": str(threads), **(spec.env if node.host.ssh is None else {})}
    if node.device.startswith("gpu"):
        env["CUDA_VISIBLE_DEVICES"] = node.device.removeprefix("gpu")
    env |= node.host.env
    argv: tuple[str, ...] = (python, "-m", "geomx_cli.runtime")
    if node.role == "worker" and spec.script:
        program, *arguments = _command(node.host, spec)
        argv = (python if program in ("python", "python3") else program, *arguments)
        hook = str(PurePosixPath(node.host.package or _PACKAGE, "runtime", "hook"))
        env["PYTHONPATH"] = f"{hook}:{env['PYTHONPATH']}" if env.get("PYTHONPATH") else hook
    env |= _settings(node, layout).to_environment(plugins.table())
    return Process(
        name=node.name,
        host=node.host.name,
        party=node.party,
        role=node.role,
        rank=node.rank,
        global_rank=node.global_rank,
        argv=argv,
        env=dict(sorted(env.items())),
        endpoints=tuple(layout.endpoints.get(node.name, ())),
    )
