"""The inventory: machines, their parties, and the placement of roles. Immutable and validated."""

import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.nearest import nearest
from geomx_cli.core.options import Value
from geomx_cli.inventory.access import Local, Ssh
from geomx_cli.ps.cluster.config import Role

__all__ = [
    "CENTRAL", "DEVICE", "NAME", "Host", "HostError", "Inventory", "Local", "Party", "RankScope", "Ssh", "Topology",
    "WanLink", "is_ip", "validated",
]  # fmt: skip

CENTRAL = "central"
NAME = r"^[A-Za-z][A-Za-z0-9_.-]{0,31}$"
"""Pattern of host and party names."""
DEVICE = r"^(cpu|gpu(0|[1-9][0-9]?))$"
"""Pattern of devices that a worker may train on."""
Device = Annotated[str, Field(pattern=DEVICE)]
Topology = Literal["central", "spread", "flat"]
RankScope = Literal["global", "party"]
Reduce = Literal["servers", "torch"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Host(_Frozen):
    """One planned host. Its processes communicate over unix sockets, with other hosts over TCP.

    Two hosts of an inventory may share a machine; they get different ports. Empty fields that only the machine itself
    can provide (address, package, state_dir) are filled in before a job starts.
    """

    name: str = Field(pattern=NAME)
    parties: tuple[str, ...] = Field(min_length=1, description="whose processes it runs; one as a rule")
    access: Local | Ssh = Field(default=Local(), discriminator="kind", description="how it is reached")
    address: str = Field(default="", description="what hosts of its own party dial; see near_address")
    wan_address: str = Field(default="", description="what hosts of other parties dial; empty: the address")
    listen: str = Field(default="", description="what to bind; empty: what fits the addresses")
    interface: str = Field(default="", description="of the network of its party")
    wan_interface: str = Field(default="", description="of the network between parties")
    devices: tuple[Device, ...] = Field(default=(), description="each has a worker")
    threads: int = Field(default=1, ge=1, description="threads in the numeric libraries of each worker")
    python: str = Field(default="", description="its Python; empty: that of the job")
    package: str = Field(default="", description="where its geomx_cli lies; empty: where ours does")
    workdir: str = Field(default="", description="where its processes start; empty: the agent's directory")
    state_dir: str = Field(default="", description="where jobs lie; empty: where the job's own directory is")
    sockets: str = Field(default="", description="how paths of folders for unix sockets begin; empty: the job's own")
    env: Mapping[str, str] = Field(default_factory=dict, description="variables for each of its processes")
    ports: tuple[int, ...] = Field(default=(), description="for its schedulers and servers, in this order")
    clock_ahead: float = Field(default=0.0, description="seconds that its clock is ahead of ours; known at launch")
    reachable_from: tuple[str, ...] | None = Field(default=None, description="parties that dial it; None: all others")
    runs: tuple[Role, ...] = Field(default=(), description="roles that run here; empty: by rule")

    @model_validator(mode="after")
    def _check(self) -> Self:
        wrong = [port for port in self.ports if not 0 < port < 65536]
        if wrong:
            raise ValueError(f"host {self.name}: {wrong[0]} is no port; it lies between 1 and 65535")
        _refuse_twice((f"{self.near_address}:{port}" for port in self.ports), "port")
        _refuse_twice((name for name in self.devices if name != "cpu"), f"host {self.name}: device")
        return self

    @property
    def near_address(self) -> str:
        """Address dialled by hosts of its own party: `address`, or while that is unknown the one geomx itself dials."""
        return self.address or self.access.address

    @property
    def shares_files(self) -> bool:
        """Whether it is the machine that runs geomx, with the same files, environment and account. To other hosts a
        job's files are copied, and local paths do not apply.
        """
        return self.access.shares_files

    @property
    def known_as(self) -> frozenset[tuple[str, str]]:
        """Pairs (party, address) under which it is dialled. Hosts that share one cannot use the same port."""
        near = {(party, self.near_address) for party in self.parties}
        return frozenset(near | {("", self.wan_address or self.near_address)})

    def is_reachable_from(self, other: "Host") -> bool:
        """Whether processes on `other` can dial this host, by what the inventory says."""
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


class Party(_Frozen):
    """A data centre and its number of training workers, each on a device of one of its hosts."""

    name: str = Field(pattern=NAME)
    workers: int = Field(ge=0, le=1024)


class WanLink(_Frozen):
    """The emulated link from one party to another, in this direction. rate: bits per second, 0 for unlimited. delay:
    seconds.
    """

    source: str
    target: str
    rate: float = Field(default=0.0, ge=0)
    delay: float = Field(default=0.0, ge=0)

    @property
    def text(self) -> str:
        """As a process's settings have it: "A>B=100000000bit,0.015s"."""
        parts = [f"{self.rate:.0f}bit"] * bool(self.rate) + [f"{self.delay:.6f}s"] * bool(self.delay)
        return f"{self.source}>{self.target}={','.join(parts)}"


class Inventory(_Frozen):
    """All parties and hosts. `parties` are the participating ones, in the order of their index.

    `global_servers` is the total number of global servers or, with topology "spread", the number in each party.
    """

    parties: tuple[Party, ...] = Field(min_length=1)
    central: Party
    hosts: tuple[Host, ...] = Field(min_length=1)
    links: tuple[WanLink, ...] = Field(default=(), description="emulated between parties, instead of --wan")
    allocator: str = Field(default="", description="gives the hosts their machines at launch; empty: they have them")
    topology: Topology = "central"
    global_servers: int = Field(default=1, ge=1, le=256)
    central_server: bool = Field(default=False, description="a central party that trains has a local server")
    rank_scope: RankScope = Field(default="party", description="global: global rank 0 is the master worker")
    local_servers: int = Field(default=1, ge=1, le=64)
    delivery: str = Field(default="direct", description="how slices travel: workers may listen for each other")
    delivery_options: Mapping[str, Value] = Field(default_factory=dict, description="the delivery's own, by name")
    reduce: Reduce = Field(default="servers", description="torch: one worker of a party exchanges with servers")
    shards: int = Field(default=1, ge=1, le=1024, description="with reduce torch: so many, a shard each")

    @model_validator(mode="after")
    def _check(self) -> Self:
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
                raise ValueError(
                    f"party {party.name} has {party.workers} workers and {devices[party.name]} devices"
                )
            if party.workers == 0 and party is not self.central:
                raise ValueError(f"party {party.name} has no worker")
        return self

    def hosts_of(self, party: str) -> tuple[Host, ...]:
        """Return the hosts of one party, in the inventory's order."""
        return tuple(host for host in self.hosts if party in host.parties)

    def host(self, name: str) -> Host:
        """Return the host called `name`. Raises InvalidSettings if there is none."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise InvalidSettings(f"there is no host {name!r}", nearest(name, (host.name for host in self.hosts)))

    def with_hosts(self, hosts: Iterable[Host]) -> "Inventory":
        """Return a copy with other hosts, which must have the same number, names and parties."""
        return self.model_copy(update={"hosts": tuple(hosts)})

    def options(self) -> dict[str, Value]:
        """Return this inventory's values of cluster options; `workers` is that of the largest party."""
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


def validated(data: Mapping[str, Any]) -> Inventory:
    """Validate `data` as an inventory. Raises InvalidSettings for the first error."""
    try:
        return Inventory.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        text = first["msg"].removeprefix("Value error, ")
        message = f"inventory: {where}: {text}" if where else f"inventory: {text}"
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
