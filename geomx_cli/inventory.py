"""The inventory: which machines there are, in which party, and what stands where. Frozen and validated."""

import random
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from geomx_cli.errors import InvalidSettings
from geomx_cli.options import Value

__all__ = ["CENTRAL", "Host", "Inventory", "Party", "Topology", "free_ports", "ports_needed", "this_machine"]

CENTRAL = "central"
Topology = Literal["central", "spread", "flat"]
_NAME = r"^[A-Za-z][A-Za-z0-9_.-]{0,31}$"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Host(_Frozen):
    """One planned host. Its processes reach each other over unix sockets, those of other hosts over TCP.

    Two hosts of an inventory may be one machine, if their ports differ.
    """

    name: str = Field(pattern=_NAME)
    kind: Literal["local", "ssh"] = "ssh"
    parties: tuple[str, ...] = Field(min_length=1, description="whose processes it runs; one as a rule")
    address: str = Field(min_length=1, description="what hosts of its own party dial")
    wan_address: str = Field(default="", description="what hosts of other parties dial; empty: the address")
    interface: str = ""
    devices: tuple[str, ...] = Field(default=("cpu",), min_length=1, description="to place workers")
    threads: int = Field(default=1, ge=1, description="threads in the numeric libraries of each worker")
    python: str = Field(default="", description="its Python; empty: that of the job")
    package: str = Field(default="", description="where its geomx_cli lies; empty: where ours does")
    workdir: str = Field(default="", description="where its processes start; empty: the agent's directory")
    env: Mapping[str, str] = Field(default_factory=dict, description="variables for each of its processes")
    ports: tuple[int, ...] = Field(default=(), description="for its schedulers and servers, in this order")

    @model_validator(mode="after")
    def _check_ports(self) -> Self:
        wrong = [port for port in self.ports if not 0 < port < 65536]
        if wrong:
            raise ValueError(f"host {self.name}: {wrong[0]} is no port; it lies between 1 and 65535")
        return self

    def address_for(self, other: "Host") -> str:
        """What a process on `other` dials to reach this host."""
        near = not set(self.parties).isdisjoint(other.parties)
        return self.address if near else self.wan_address or self.address


class Party(_Frozen):
    """A data centre and how many of its workers train."""

    name: str = Field(pattern=_NAME)
    workers: int = Field(ge=0, le=1024)


class Inventory(_Frozen):
    """All parties and hosts. `parties` are the participating ones, in the order of their index.

    `global_servers` counts the global servers in all, or with topology "spread" those in each party.
    """

    parties: tuple[Party, ...] = Field(min_length=1)
    central: Party
    hosts: tuple[Host, ...] = Field(min_length=1)
    topology: Topology = "central"
    global_servers: int = Field(default=1, ge=1, le=256)
    local_servers: int = Field(default=1, ge=1, le=64)

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        parties = [party.name for party in (self.central, *self.parties)]
        _refuse_twice(parties, "party")
        _refuse_twice([host.name for host in self.hosts], "host")
        _refuse_twice([f"{host.address}:{port}" for host in self.hosts for port in host.ports], "port")
        for host in self.hosts:
            for name in host.parties:
                if name not in parties:
                    raise ValueError(f"host {host.name} belongs to party {name}, which is not there")
        for name in parties:
            if not self.hosts_of(name):
                raise ValueError(f"party {name} has no host")
        for party in self.parties:
            if party.workers == 0:
                raise ValueError(f"party {party.name} has no worker")
        return self

    def hosts_of(self, party: str) -> tuple[Host, ...]:
        """The hosts of one party, in the inventory's order."""
        return tuple(host for host in self.hosts if party in host.parties)

    def host(self, name: str) -> Host:
        """The host called `name`. Raises InvalidSettings when there is none."""
        for host in self.hosts:
            if host.name == name:
                return host
        known = ", ".join(host.name for host in self.hosts)
        raise InvalidSettings(f"there is no host {name!r}", f"there are {known}")

    def options(self) -> dict[str, Value]:
        """The cluster's options as this inventory has them; `workers` is that of the largest party."""
        return {
            "parties": len(self.parties),
            "workers": max(party.workers for party in self.parties),
            "central_workers": self.central.workers,
            "topology": self.topology,
            "global_servers": self.global_servers,
            "local_servers": self.local_servers,
        }


def this_machine(
    options: Mapping[str, Value],
    ports: Sequence[int],
    *,
    one_host: bool = False,
    python: str = "",
    workdir: str = "",
    env: Mapping[str, str] | None = None,
) -> Inventory:
    """The built-in inventory: one planned host for each party on 127.0.0.1, or with `one_host` one for all.

    `options` has those of the cluster (parties, workers, ...). `ports` are free ports, `ports_needed` of
    them. Raises InvalidSettings when there are too few, or for an impossible number.
    """
    need = ports_needed(options)
    if len(ports) < need:
        raise InvalidSettings(f"{need} free ports are needed and there are {len(ports)}", "give more ports")
    names = [_party_name(index) for index in range(int(options["parties"]))]
    groups = {"local": (CENTRAL, *names)} if one_host else {name: (name,) for name in (CENTRAL, *names)}
    share = need // len(groups)
    hosts = [
        {
            "name": name,
            "kind": "local",
            "parties": parties,
            "address": "127.0.0.1",
            "python": python,
            "workdir": workdir,
            "env": dict(env or {}),
            "ports": tuple(ports[index * share : (index + 1) * share]),
        }
        for index, (name, parties) in enumerate(groups.items())
    ]
    fields = {name: options[name] for name in ("topology", "global_servers", "local_servers")}
    parties = [{"name": name, "workers": options["workers"]} for name in names]
    central = {"name": CENTRAL, "workers": options["central_workers"]}
    return _validated({"parties": parties, "central": central, "hosts": hosts, **fields})


def ports_needed(options: Mapping[str, Value]) -> int:
    """How many ports `this_machine` takes: the same number for each host, enough for any of them."""
    each = 2 + int(options["global_servers"]) + int(options["local_servers"])
    return (int(options["parties"]) + 1) * each


def free_ports(count: int) -> list[int]:
    """`count` TCP ports of 127.0.0.1 on which nobody listens now.

    They lie below the range that Linux gives to outgoing connections by default, so that none takes one
    before the job does. Another program that listens may still be faster; its bind, or ours, then fails with
    a message. Raises InvalidSettings when there are not so many.
    """
    found: list[int] = []
    candidates = range(10_000, 32_768)
    for port in random.sample(candidates, len(candidates)):
        if len(found) == count:
            return found
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    raise InvalidSettings(f"there are not {count} free ports on this machine", "use fewer parties or servers")


def _validated(data: Mapping[str, Any]) -> Inventory:
    try:
        return Inventory.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        text = first["msg"].removeprefix("Value error, ")
        message = f"inventory: {where}: {text}" if where else f"inventory: {text}"
        raise InvalidSettings(message, "correct this entry") from None


def _party_name(index: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    name = ""
    index += 1
    while index:
        index, letter = divmod(index - 1, 26)
        name = chr(ord("A") + letter) + name
    return name


def _refuse_twice(names: Sequence[str], what: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{what} {name} is there twice")
