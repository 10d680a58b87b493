"""The command, environment and endpoints of each process. Pure functions."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from geomx_cli.contract.addresses import is_loopback
from geomx_cli.contract.config import PlaneSettings, Role
from geomx_cli.contract.settings import Settings
from geomx_cli.core import deliveries, plugins
from geomx_cli.core.conventions import file_name, module_command
from geomx_cli.inventory import Host, RankScope, WanLink, is_ip
from geomx_cli.plan.endpoints import Endpoint, for_datagrams, lay_endpoints
from geomx_cli.plan.job_spec import JobSpec
from geomx_cli.plan.topology import Plane, TopologyLink, TopologyNode, links, planes

__all__ = ["Layout", "PLACEHOLDERS", "Process", "RENDEZVOUS", "fill", "values_for"]

# Placeholders in a script's arguments that are filled in for each worker: `--shard {rank}`. Pure functions.

PLACEHOLDERS = ("rank", "num_workers", "global_rank", "num_all_workers", "party", "local_rank")
"""Names allowed in braces. Each is also an attribute of the store, except local_rank (the variable LOCAL_RANK)."""
_PATTERN = re.compile(r"\{(" + "|".join(PLACEHOLDERS) + r")\}")


def values_for(
    node: TopologyNode, workers: int, all_workers: int, rank_scope: RankScope, local_rank: str
) -> dict[str, str]:
    """Return the placeholders' values for one worker. `workers`: the workers of its plane or process group."""
    global_rank = -1 if node.global_rank is None else node.global_rank
    ranks_are_global = rank_scope == "global"
    values = {
        "rank": global_rank if ranks_are_global else node.rank,
        "num_workers": all_workers if ranks_are_global else workers,
        "global_rank": global_rank,
        "num_all_workers": all_workers,
        "party": node.party,
        "local_rank": local_rank,
    }
    return {name: str(value) for name, value in values.items()}


def fill(words: Iterable[str], values: Mapping[str, str]) -> list[str]:
    """Substitute the placeholders in `words`; other braces are left unchanged."""
    return [_PATTERN.sub(lambda found: values[found[1]], word) for word in words]


RENDEZVOUS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""Variables that scripts for torchrun may read. Nothing listens there, because groups use the job's servers."""
_PACKAGE = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Process:
    """One process. `rank` counts the processes of its role (see topology.TopologyNode). `env` is complete."""

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
        """Base name of its log and event log: "A-worker-1"."""
        return file_name(self.name)


@dataclass(frozen=True)
class Layout:
    """Inputs to the settings of all processes.

    socket_dirs: each host's folder for unix sockets.
    carriers: the processes of each party that share its emulated link.
    links: the emulated links between parties.
    on_cpus: host and global rank of all workers without a GPU.
    """

    spec: JobSpec
    links: tuple[WanLink, ...]
    wires: tuple[TopologyLink, ...]
    planes: Mapping[str, Plane]
    endpoints: Mapping[str, Sequence[Endpoint]]
    socket_dirs: Mapping[str, str]
    carriers: Mapping[str, Collection[str]]
    all_workers: int
    on_cpus: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, nodes: Sequence[TopologyNode], spec: JobSpec, emulated: tuple[WanLink, ...] = ()) -> "Layout":
        """Build the layout. Raises InvalidSettings as lay_endpoints does."""
        wires = links(nodes)
        socket_dirs = {node.host.name: spec.socket_dir_on(node.host) for node in nodes}
        return cls(
            spec=spec,
            links=emulated,
            wires=wires,
            planes=planes(nodes),
            endpoints=lay_endpoints(nodes, wires, socket_dirs),
            socket_dirs=socket_dirs,
            carriers=_carriers(wires),
            all_workers=sum(node.global_rank is not None for node in nodes),
            on_cpus=tuple(
                (node.host.name, node.global_rank)
                for node in nodes
                if node.global_rank is not None and not node.device.startswith("gpu")
            ),
        )

    def process(self, node: TopologyNode) -> Process:
        """Return the planned process of `node`."""
        spec = self.spec
        python = node.host.python or spec.python
        # Servers aggregate in one thread; a worker shares the cores with others unless its host is configured
        # otherwise.
        threads = node.host.threads if node.role == "worker" else 1
        env = {"OMP_NUM_THREADS": str(threads), **(spec.env if node.host.shares_files else {})}
        if node.device.startswith("gpu"):
            env["CUDA_VISIBLE_DEVICES"] = node.device.removeprefix("gpu")
        env |= node.host.env
        argv: tuple[str, ...] = (*module_command(python, "geomx_cli.runtime"),)
        if node.role == "worker" and spec.script:
            scope: RankScope = "global" if spec.options["rank_scope"] == "global" else "party"
            beside = node.group or len(self.planes[node.local].clients)
            own = values_for(node, beside, self.all_workers, scope, self._torchrun(node).get("LOCAL_RANK", "0"))
            there = spec.command_on(node.host)  # its paths on the host may have braces of their own
            filled = zip(spec.script, fill(spec.script, own), there, strict=True)
            program, *arguments = [ours if word == given else word for given, ours, word in filled]
            argv = (python if program in ("python", "python3") else program, *arguments)
            hook = str(PurePosixPath(node.host.package or _PACKAGE, "runtime", "hook"))
            env["PYTHONPATH"] = f"{hook}:{env['PYTHONPATH']}" if env.get("PYTHONPATH") else hook
        env |= _settings(node, self).to_environment(plugins.table())
        if node.role == "worker" and spec.script:
            env.setdefault("GEOMX_SEED", str(spec.options["seed"]))  # also at its default, so that scripts can read it
            env = {**RENDEZVOUS, **env, **self._torchrun(node), **self._group(node)}
        return Process(
            name=node.name,
            host=node.host.name,
            party=node.party,
            role=node.role,
            rank=node.rank,
            global_rank=node.global_rank,
            argv=argv,
            env=dict(sorted(env.items())),
            endpoints=self._endpoints(node),
        )

    def _endpoints(self, node: TopologyNode) -> tuple[Endpoint, ...]:
        """The process's endpoints, with an endpoint for datagrams at a root if the delivery sends some."""
        ends = tuple(self.endpoints.get(node.name, ()))
        parts = [plugins.find("delivery", name) for name in deliveries.chain(self.spec.options)]
        sends = [part.sends_datagrams for part in parts if hasattr(part, "sends_datagrams")]
        if node.role != "global_server" or not any(asks(self.spec.options) for asks in sends):
            return ends
        return (*ends, *for_datagrams(ends))

    def _torchrun(self, node: TopologyNode) -> dict[str, str]:
        """The variables by which torchrun tells a script's worker its ranks. A master that does not train has none."""
        if node.global_rank is None:
            return {}
        groups = self._local_groups()
        group, beside = next(item for item in enumerate(groups) if node.global_rank in item[1])
        rank, size = str(node.global_rank), str(self.all_workers)
        begins_again = self.spec.options["on_worker_loss"] == "restart-all"
        return {
            "RANK": rank, "WORLD_SIZE": size,
            "LOCAL_RANK": str(beside.index(node.global_rank)), "LOCAL_WORLD_SIZE": str(len(beside)),
            "GROUP_RANK": str(group), "GROUP_WORLD_SIZE": str(len(groups)), "NODE_RANK": str(group),
            "ROLE_NAME": "default", "ROLE_RANK": rank, "ROLE_WORLD_SIZE": size,
            "TORCHELASTIC_RUN_ID": self.spec.job, "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": str(self.spec.options["restarts"]) if begins_again else "0",
        }  # fmt: skip

    def _local_groups(self) -> list[list[int]]:
        """The groups, in torchrun's sense, as global ranks. The workers on the CPUs of a host form a group, in which
        local ranks count. A worker with a GPU sees no other GPU, so its device is cuda:0, and it forms a separate
        group.
        """
        hosts: dict[int, str] = {rank: host for host, rank in self.on_cpus}
        found: dict[str | int, list[int]] = {}
        for rank in range(self.all_workers):
            found.setdefault(hosts.get(rank, rank), []).append(rank)
        return list(found.values())

    def _group(self, node: TopologyNode) -> dict[str, str]:
        """The variables that tell where its party's process group forms."""
        if node.group < 2:
            return {}
        address, _, port = self.group_ends[node.party].near.removeprefix("tcp://").rpartition(":")
        return {"MASTER_ADDR": address.strip("[]"), "MASTER_PORT": port}

    @property
    def group_ends(self) -> dict[str, Endpoint]:
        """The endpoint of each party's process group."""
        ends = (end for own in self.endpoints.values() for end in own if end.purpose == "group")
        return {end.process.partition("/")[0]: end for end in ends}


def _settings(node: TopologyNode, layout: "Layout") -> Settings:
    spec, ends = layout.spec, layout.endpoints.get(node.name, ())
    own = [end for end in ends if end.purpose != "group"]
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
        job_dir=spec.job_dir_on(node.host),
        output_dir=f"{spec.job_dir_on(node.host)}/outputs/{file_name(node.name)}" if _saves(node, spec) else "",
        process=node.name,
        party=node.party,
        party_index=node.index,
        host=node.host.name,
        rank=node.rank,
        global_rank=node.global_rank,
        bind=tuple(endpoint.bind for endpoint in own),
        advertise=tuple(dict.fromkeys(seen for end in own for seen in (end.near, end.advertised))),
        start_dir=spec.start_dir_on(node.host) if node.role == "worker" else "",
        key_file=spec.key_file_on(node.host, node.name),
        group_size=node.group,
        rendezvous=_rendezvous(node, layout),
        peers=node.peers,
        links=tuple(link.text for link in layout.links),
        wan_share=1 / len(carriers) if node.name in carriers else 1.0,
        device=node.device if node.device.startswith("gpu") else "",
        clock_ahead=node.host.clock_ahead,
        options=spec.options,
    )


def _rendezvous(node: TopologyNode, layout: "Layout") -> tuple[str, ...]:
    """Where its party's process group forms: the address to dial and, for the group's leader, the address to bind."""
    if node.group < 2:
        return ()
    end = layout.group_ends[node.party]
    return (end.near, end.bind) if node.leads_group else (end.near,)


def _saves(node: TopologyNode, spec: JobSpec) -> bool:
    """Whether the process may save outputs: a worker, and in the bundled job a root, which runs the optimizer."""
    is_root = node.role == "global_server" or (node.role == "server" and not node.upper)
    return node.role == "worker" or (is_root and not spec.script)


def _node_host(host: Host) -> str:
    """Return the host's own IP address, for scripts that ask for it; "" if it is unknown or loopback."""
    address = host.near_address
    return address if is_ip(address) and not is_loopback(address) else ""


def _plane(name: str, node: TopologyNode, layout: "Layout") -> PlaneSettings | None:
    if not name:
        return None
    plane = layout.planes[name]
    leader, endpoints = plane.leader, layout.endpoints[plane.leader.name]
    near = leader.host.name == node.host.name and leader is not node
    sockets = [endpoint.bind for endpoint in endpoints if endpoint.protocol == "ipc"]
    return PlaneSettings(
        uri=leader.host.address_for(node.host),
        port=endpoints[0].port,
        servers=len(plane.servers),
        workers=len(plane.clients),
        scheduler=sockets[0] if near else "",
    )


def _carriers(wires: Sequence[TopologyLink]) -> dict[str, set[str]]:
    """Return, for each party, the processes that send or receive slices over its emulated link."""
    found: dict[str, set[str]] = {}
    for wire in wires:
        if wire.wide_area and not wire.listener.role.endswith("scheduler"):
            for end in (wire.dialler, wire.listener):
                found.setdefault(end.party, set()).add(end.name)
    return found
