"""The dials between hosts that a plan requires, and their results."""

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.units import some_of
from geomx_cli.inventory import Host, Inventory, is_ip
from geomx_cli.plan import Endpoint, Plan, Process, ports
from geomx_cli.preflight.probe_pool import Facts, Skew

__all__ = [
    "ALL", "Dial", "Dialled", "complete_inventory", "dials", "listening", "place", "unreached_servers",
    "with_clocks",
]  # fmt: skip

# Completes an inventory from the facts of its hosts. Pure functions.

ALL = "::"
"""Wildcard address for both IP versions."""


def complete_inventory(inventory: Inventory, facts: Mapping[str, Facts]) -> Inventory:
    """Return the inventory with absolute paths, addresses of interfaces, and the chosen ports.

    A host without facts is unchanged, and its ports are assumed to be free. Raises InvalidSettings for an interface
    that is missing or has no address, and for a host with too few free ports.
    """
    completed = inventory.with_hosts(
        _completed(host, facts[host.name]) if host.name in facts else host for host in inventory.hosts
    )
    free = {host.name: _free(host, facts.get(host.name)) for host in completed.hosts}
    try:
        return ports.choose(completed, free)
    except InvalidSettings as error:
        raise InvalidSettings(error.message + _holders(inventory, facts), error.hint) from None


def with_clocks(inventory: Inventory, skews: Mapping[str, Skew]) -> Inventory:
    """Return the inventory with the offsets of its hosts' clocks."""
    return inventory.with_hosts(
        structs.replace(host, clock_ahead=round(skews[host.name].certain, 6)) if host.name in skews else host
        for host in inventory.hosts
    )


def listening(host: Host) -> str:
    """Return the address at which a host's ports must be free: `listen`, by default all addresses."""
    if host.listen:
        return host.listen
    return ALL if ":" in host.near_address else "0.0.0.0"


def _completed(host: Host, facts: Facts) -> Host:
    python = host.python if host.python.startswith("/") else facts.executable
    known = {"python": python, "package": host.package or facts.package}
    if host.state_dir or not host.shares_files:
        known["state_dir"] = facts.state.path
    if not host.is_here:
        known["sockets"] = f"{facts.temp.rstrip('/')}/gx-{facts.uid}"
    if host.workdir:
        known["workdir"] = facts.work.path
    for field, interface in (("address", host.interface), ("wan_address", host.wan_interface)):
        if interface:
            found = _address(host, facts, interface)
            known[field] = getattr(host, field) or found
    completed = structs.replace(host, **known)
    # A name may resolve to both IP versions, and the dialler chooses one.
    names = [known for known in (completed.near_address, completed.wan_address) if known and not is_ip(known)]
    if any(name != "localhost" for name in names) and not host.listen and ALL in facts.free:
        return structs.replace(completed, listen=ALL)
    return completed


def _address(host: Host, facts: Facts, interface: str) -> str:
    """Return the first IPv4 address of an interface. If it has none, the first IPv6 address."""
    if interface not in facts.addresses:
        there = ", ".join(f"{name} ({', '.join(own)})" for name, own in facts.addresses.items() if own)
        raise InvalidSettings(
            f"host {host.name} has no network interface {interface} with an address",
            f"it has {there or 'none at all'}; name one of these in the inventory",
        )
    own: Sequence[str] = facts.addresses[interface]
    return min(own, key=lambda address: ipaddress.ip_address(address).version)


def _free(host: Host, facts: Facts | None) -> Sequence[int]:
    if facts is None:
        return host.ports
    return facts.free.get(listening(host), host.ports)  # an unbindable address is reported by another check


def _holders(inventory: Inventory, facts: Mapping[str, Facts]) -> str:
    """Describe the holders of candidate ports, as a suffix to an error message."""
    words = [
        f"{host.name} port {port}: {holder or 'somebody'}"
        for host in inventory.hosts
        if host.name in facts
        for port, holder in facts[host.name].taken.items()
    ]
    return f" ({'; '.join(words[:8])})" if words else ""


@dataclass(frozen=True)
class Dial:
    """A dial from one host to a port of another.

    dialler, listener: the hosts.
    processes: one link of the plan, of possibly many, that uses the dial.
    wide_area: whether any such link connects two parties.
    bound: the listening address.
    protocol: "udp" if datagrams are sent.
    """

    dialler: str
    listener: str
    address: str
    port: int
    processes: tuple[str, str]
    wide_area: bool
    bound: str
    protocol: str = "tcp"

    @property
    def subject(self) -> str:
        """Its subject in a check."""
        return f"{self.dialler} -> {self.listener}"


@dataclass(frozen=True)
class Dialled:
    """The result of a dial: see probe/dialling.py; `round_trip` in seconds."""

    dial: Dial
    kind: str
    detail: str
    ip: str
    round_trip: float


def dials(inventory: Inventory, planned: Plan) -> list[Dial]:
    """Return the dials between different hosts, each port once per dialling host and protocol."""
    processes = {process.name: process for process in planned.processes}
    found: dict[tuple[str, str, int, str], Dial] = {}
    for names in planned.links:
        dialler, listener = (processes[name] for name in names)
        if dialler.host == listener.host:
            continue
        address = inventory.host(listener.host).address_for(inventory.host(dialler.host))
        wide = dialler.party != listener.party
        for end in _dialled(dialler, listener):
            bound, port = place(end)
            dial = Dial(dialler.host, listener.host, address, port, (names[0], names[1]), wide, bound, end.protocol)
            before = found.get((dialler.host, address, port, end.protocol))
            if before is None or (wide and not before.wide_area):
                found[dialler.host, address, port, end.protocol] = dial
    return list(found.values())


def unreached_servers(results: Iterable[Dialled], planned: Plan) -> str:
    """Return a clause that names hosts which cannot reach a global server outside the central party. Only topology
    spread has such servers. "" if all hosts reach them.
    """
    central = {process.party for process in planned.processes if process.role == "global_scheduler"}
    spread = {process.name: process for process in planned.processes if process.role == "global_server"}
    failed = [
        result.dial.subject
        for result in results
        if result.kind != "ok"
        and (server := spread.get(result.dial.processes[1])) is not None
        and server.party not in central
    ]
    return f"no connection {some_of(list(dict.fromkeys(failed)), 2)}" if failed else ""


def _dialled(dialler: Process, listener: Process) -> Iterator[Endpoint]:
    """Yield the endpoints that the process dials. Only local servers send datagrams."""
    yield from [end for end in listener.endpoints if end.protocol == "tcp"][:1]
    if dialler.role == "server":
        yield from (end for end in listener.endpoints if end.protocol == "udp")


def place(endpoint: Endpoint) -> tuple[str, int]:
    """Return the address and port that a TCP or UDP endpoint binds."""
    address, _, port = endpoint.bind.removeprefix(f"{endpoint.protocol}://").rpartition(":")
    return address.strip("[]"), int(port)
