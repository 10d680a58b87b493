"""The inventory: machines, their parties, and the placement of roles. Immutable and validated."""

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, structs

from geomx_cli.contract.config import Role
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.option import nearest
from geomx_cli.core.options import Value
from geomx_cli.core.typed import to_type
from geomx_cli.inventory.access import Local, Requested, Slurm, Ssh

__all__ = [
    "CENTRAL", "DEVICE", "NAME", "Host", "HostError", "Inventory", "Local", "Party", "RankScope", "Request",
    "Requested", "Slurm", "Ssh", "Topology", "WanLink", "is_ip", "validated",
]  # fmt: skip

CENTRAL = "central"
NAME = r"^[A-Za-z][A-Za-z0-9_.-]{0,31}\Z"
"""Pattern of host and party names."""
DEVICE = r"^(cpu|gpu(0|[1-9][0-9]?))\Z"
"""Pattern of devices that a worker may train on."""
Name = Annotated[str, Meta(pattern=NAME)]
Device = Annotated[str, Meta(pattern=DEVICE)]
Topology = Literal["central", "spread", "flat"]
RankScope = Literal["global", "party"]
Reduce = Literal["servers", "torch"]


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One planned host. Its processes communicate over unix sockets, with other hosts over TCP.

    Two hosts of an inventory may share a machine; they get different ports. Empty fields that only the machine itself
    can provide (address, package, state_dir) are filled in before a job starts.

    parties: the parties whose processes it runs; usually one.
    access: how geomx reaches it.
    request: the name of the Request that gives its machine; if empty, the machine is fixed.
    address: the address that hosts of its own party dial; see near_address.
    wan_address: the address that hosts of other parties dial; if empty, `address`.
    listen: the address to bind; if empty, geomx derives it from the other addresses.
    interface: the interface to the network of its party.
    wan_interface: the interface to the network between parties.
    devices: each has a worker.
    threads: number of threads in the numeric libraries of each worker.
    python: its Python; if empty, the job's.
    package: where its geomx_cli lies; if empty, where the control machine's lies.
    workdir: where its processes start; if empty, in the agent's directory.
    state_dir: where jobs lie; if empty, where the job's own directory is.
    sockets: prefix of the paths of folders for unix sockets; if empty, the job's own.
    env: variables for each of its processes.
    ports: for its schedulers and servers, in this order.
    clock_ahead: seconds by which its clock is ahead of the control machine's; known at launch.
    reachable_from: parties that can dial it; None for all others.
    runs: roles that run here; if empty, geomx assigns them by rule.
    """

    name: Name
    parties: Annotated[tuple[str, ...], Meta(min_length=1)]
    access: Local | Ssh | Slurm | Requested = Local()
    request: str = ""
    address: str = ""
    wan_address: str = ""
    listen: str = ""
    interface: str = ""
    wan_interface: str = ""
    devices: tuple[Device, ...] = ()
    threads: Annotated[int, Meta(ge=1)] = 1
    python: str = ""
    package: str = ""
    workdir: str = ""
    state_dir: str = ""
    sockets: str = ""
    env: Mapping[str, str] = msgspec.field(default_factory=dict)
    ports: tuple[int, ...] = ()
    clock_ahead: float = 0.0
    reachable_from: tuple[str, ...] | None = None
    runs: tuple[Role, ...] = ()

    def __post_init__(self) -> None:
        wrong = [port for port in self.ports if not 0 < port < 65536]
        if wrong:
            raise ValueError(f"host {self.name}: {wrong[0]} is no port; it lies between 1 and 65535")
        _refuse_twice((f"{self.near_address}:{port}" for port in self.ports), "port")
        _refuse_twice((name for name in self.devices if name != "cpu"), f"host {self.name}: device")

    @property
    def near_address(self) -> str:
        """The address that hosts of its own party dial: `address`. While that is unknown, the address that geomx dials.
        """
        return self.address or self.access.address

    @property
    def shares_files(self) -> bool:
        """Whether it has the files, environment and account of the machine that runs geomx. For other hosts, geomx
        copies a job's files, and local paths do not apply.
        """
        return self.access.shares_files

    @property
    def is_here(self) -> bool:
        """Whether it is the machine that runs geomx."""
        return self.access.is_here

    @property
    def known_as(self) -> frozenset[tuple[str, str]]:
        """Pairs (party, address) under which it is dialled. Hosts with a common pair cannot use the same port."""
        near = {(party, self.near_address) for party in self.parties}
        return frozenset(near | {("", self.wan_address or self.near_address)})

    def is_reachable_from(self, other: "Host") -> bool:
        """Whether processes on `other` can dial this host, according to the inventory."""
        parties = set(other.parties)
        return self.reachable_from is None or not parties.isdisjoint((*self.parties, *self.reachable_from))

    def address_for(self, other: "Host") -> str:
        """Return the address that processes on `other` dial to reach this host."""
        near = not set(self.parties).isdisjoint(other.parties)
        return self.near_address if near else self.wan_address or self.near_address


@dataclass(frozen=True)
class HostError:
    """An error in one key of one host."""

    host: str
    key: str
    message: str
    hint: str


class Party(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A data centre and its number of training workers, each on a device of one of its hosts."""

    name: Name
    workers: Annotated[int, Meta(ge=0, le=1024)]


class WanLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The emulated link from one party to another, in this direction.

    rate: bits per second, 0 for unlimited.
    delay: seconds.
    """

    source: str
    target: str
    rate: Annotated[float, Meta(ge=0)] = 0.0
    delay: Annotated[float, Meta(ge=0)] = 0.0

    @property
    def text(self) -> str:
        """The link in the form that a process's settings use: "A>B=100000000bit,0.015s"."""
        parts = [f"{self.rate:.0f}bit"] * bool(self.rate) + [f"{self.delay:.6f}s"] * bool(self.delay)
        return f"{self.source}>{self.target}={','.join(parts)}"


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an allocator is asked for at launch: the machines of the hosts with this `request`. Empty fields default to
    the batch system's own.

    allocator: the plug-in's name.
    login: the machine on which the batch system's commands run.
    python: on the machines that it gives; empty: that of the job.
    job: an allocation that is there already, in which geomx was launched; 0: a new one.
    arguments: further ones of the batch system's command.
    time: seconds; 0: the batch system's default.
    container: an image in which Apptainer runs everything.
    """

    name: Name
    allocator: str
    login: Local | Ssh = Local()
    python: str = ""
    job: int = 0
    partition: str = ""
    account: str = ""
    constraint: str = ""
    gres: str = ""
    time: Annotated[float, Meta(ge=0)] = 0.0
    arguments: tuple[str, ...] = ()
    container: str = ""


class Inventory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All parties and hosts.

    parties: the participating parties, in the order of their index.
    links: emulated between parties, instead of --wan.
    requests: for the hosts that get their machines at launch.
    topology_is_automatic: geomx chooses the topology (plan/automatic_topology.py). Until then `topology` is "central".
    topology_reason: why geomx has chosen this topology, as a clause.
    global_servers: their total number or, with topology "spread", the number in each party.
    central_server: whether a central party that trains has a local server.
    rank_scope: with "global", global rank 0 is the master worker.
    delivery: how slices travel. With some deliveries workers listen for each other.
    delivery_options: the delivery's own options, by name.
    reduce: with "torch", one worker of each party exchanges with servers.
    shards: the number of workers in each party that exchange with servers, one shard each.
    """

    parties: Annotated[tuple[Party, ...], Meta(min_length=1)]
    central: Party
    hosts: Annotated[tuple[Host, ...], Meta(min_length=1)]
    links: tuple[WanLink, ...] = ()
    requests: tuple[Request, ...] = ()
    topology: Topology = "central"
    topology_is_automatic: bool = False
    topology_reason: str = ""
    global_servers: Annotated[int, Meta(ge=1, le=256)] = 1
    central_server: bool = False
    rank_scope: RankScope = "party"
    local_servers: Annotated[int, Meta(ge=1, le=64)] = 1
    delivery: str = "direct"
    delivery_options: Mapping[str, Value] = msgspec.field(default_factory=dict)
    reduce: Reduce = "servers"
    shards: Annotated[int, Meta(ge=1, le=1024)] = 1

    def __post_init__(self) -> None:
        parties = [party.name for party in (self.central, *self.parties)]
        _refuse_twice(parties, "party")
        if "global" in parties:
            raise ValueError("a party cannot be called global, as the plane between parties is")
        _refuse_twice((host.name for host in self.hosts), "host")
        devices = Counter[str]()
        for host in self.hosts:
            for name in host.parties:
                if name not in parties:
                    raise ValueError(f"host {host.name} belongs to party {name}, which is not there")
                devices[name] += len(host.devices)
            for name in host.reachable_from or ():
                if name not in parties:
                    raise ValueError(f"host {host.name} is reachable from party {name}, which is not there")
        for party in (self.central, *self.parties):
            if party.name not in devices:
                raise ValueError(f"party {party.name} has no host")
            if party.workers > devices[party.name]:
                raise ValueError(f"party {party.name} has {party.workers} workers and {devices[party.name]} devices")
            if party.workers == 0 and party is not self.central:
                raise ValueError(f"party {party.name} has no worker")

    def hosts_of(self, party: str) -> tuple[Host, ...]:
        """Return the hosts of one party, in the inventory's order."""
        return tuple(host for host in self.hosts if party in host.parties)

    def hosts_for(self, request: Request) -> tuple[Host, ...]:
        """Return the hosts that have the machines of a request."""
        return tuple(host for host in self.hosts if host.request == request.name)

    def requested_again(self, job: int = 0, nodes: Sequence[str] = ()) -> "Inventory":
        """Return the inventory of a job that has ended, without the machines that it was given. Those of an allocation
        in which it was launched become the `nodes` of the allocation `job`; raises InvalidSettings if there are fewer.
        """
        inside = {request.name for request in self.requests if request.job}
        before = dict.fromkeys(
            host.access.node for host in self.hosts if host.request in inside and isinstance(host.access, Slurm)
        )
        if len(before) > len(nodes):
            what = f"the job has run on the {len(before)} nodes of an allocation, and here there are {len(nodes)}"
            raise InvalidSettings(what, "launch inside an allocation with as many nodes")
        now = dict(zip(before, nodes, strict=False))

        def without_machine(host: Host) -> Host:
            if not host.request:
                return host
            node = host.access.node if isinstance(host.access, Slurm) else ""
            access = Requested(now.get(node, host.name), host.shares_files)
            return structs.replace(host, access=access, address="", wan_address="")

        requests = tuple(structs.replace(each, job=job) if each.job else each for each in self.requests)
        return structs.replace(self.with_hosts(map(without_machine, self.hosts)), requests=requests)

    def host(self, name: str) -> Host:
        """Return the host called `name`. Raises InvalidSettings if there is none."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise InvalidSettings(f"there is no host {name!r}", nearest(name, (host.name for host in self.hosts)))

    def with_hosts(self, hosts: Iterable[Host]) -> "Inventory":
        """Return a copy with other hosts, which must have the same number, names and parties."""
        return structs.replace(self, hosts=tuple(hosts))

    def options(self) -> dict[str, Value]:
        """Return this inventory's values of cluster options; `workers` is the number in the largest party."""
        return {
            "parties": len(self.parties),
            "workers": max(party.workers for party in self.parties),
            "central_workers": self.central.workers,
            "topology": self.topology,
            "global_servers": self.global_servers,
            "local_servers": self.local_servers,
            "rank_scope": self.rank_scope,
            "delivery": self.delivery,
            "reduce": self.reduce,
            "shards": self.shards,
        }


def topology_fields(chosen: object) -> dict[str, object]:
    """Return an inventory's fields for a value of --topology."""
    if chosen == "auto":
        return {"topology": "central", "topology_is_automatic": True, "topology_reason": ""}
    return {"topology": chosen, "topology_is_automatic": False, "topology_reason": ""}


def validated(data: Mapping[str, Any]) -> Inventory:
    """Validate `data` as an inventory. Raises InvalidSettings for the first error."""
    try:
        return to_type(data, Inventory)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$")
        place = re.sub(r"\[([0-9]+)\]", r".\1", where.rstrip("`")).lstrip(".")
        message = f"inventory: {place}: {text}" if place else f"inventory: {text}"
        raise InvalidSettings(message, "correct this entry") from None


def is_ip(address: str) -> bool:
    """Whether `address` is an IP address rather than a name."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def _refuse_twice(names: Iterable[str], what: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{what} {name} is there twice")
