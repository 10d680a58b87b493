"""Chooses the topology of a job if its user leaves the choice to geomx. Pure functions.

Spread is faster wherever it works: each party's link carries less, and no link carries the traffic of all parties. The
inventory tells beforehand whether spread works. Preflight, which dials, may find later that parties do not reach each
other.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from msgspec import structs

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.units import format_duration, parse_wan
from geomx_cli.inventory import Host, HostError, Inventory
from geomx_cli.plan import ports
from geomx_cli.plan.endpoints import lay_endpoints
from geomx_cli.plan.ports import host_errors
from geomx_cli.plan.topology import TopologyNode, build_topology, links

__all__ = ["Preview", "emulated_network", "in_central", "preview", "topology_line", "with_topology"]

# Preview of what would run on each host of an inventory, without accessing any machine.

# Describes the links between parties that a job on one machine emulates.


def emulated_network(wan: str, links: Iterable[str]) -> str:
    """Return a line about --wan and the `links` of the inventory, each as WanLink.text; "" if nothing is emulated."""
    shapes = [f"each party {_shape(wan, 'round trip')}"] if wan else []
    for link in links:
        pair, _, shape = link.partition("=")
        shapes.append(f"{pair.replace('>', ' to ')} {_shape(shape, 'delay')}")
    return f"emulated network: {'; '.join(shapes)}" if shapes else ""


def _shape(text: str, time: str) -> str:
    rate, seconds = parse_wan(text)
    parts = [f"{rate / 1e6:g} Mbit/s"] * bool(rate) + [f"{time} {format_duration(seconds)}"] * bool(seconds)
    return ", ".join(parts) or "unlimited"


@dataclass(frozen=True)
class Preview:
    """One host.

    reached: "this machine", or "ssh" with user@address:port and jump hosts.
    servers: the port of each scheduler and server, if all `candidates` are free. 0 if only its own host dials it.
    candidates: the host's ports, as ranges.
    reserved: for each scheduler with port 0, the port that identifies it (DMLC_PS_ROOT_PORT). It is one of the host's
        ports, and the scheduler does not listen on it.
    workers: the device of each worker; "" for a master worker that does not train.
    ranks: the global rank of each training worker.
    groups: the port of each worker that leads a process group (`--reduce torch`).
    """

    host: str
    parties: tuple[str, ...]
    reached: str
    address: str
    wan_address: str
    servers: dict[str, int]
    workers: dict[str, str]
    candidates: str
    ranks: dict[str, int]
    groups: dict[str, int]
    reserved: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return the preview as JSON data."""
        return asdict(self)


def preview(inventory: Inventory) -> tuple[Preview, ...]:
    """Return the previews of all hosts in order. Raises InvalidSettings if roles or ports do not fit."""
    chosen = ports.choose(inventory, None)
    nodes = build_topology(chosen)
    endpoints = lay_endpoints(nodes, links(nodes), {host.name: "/" for host in inventory.hosts})
    open_ports = {
        name: next((end.port for end in ends if end.protocol == "tcp"), 0) for name, ends in endpoints.items()
    }
    reserved = {name: ends[0].port for name, ends in endpoints.items() if not open_ports[name] and ends[0].port}
    return tuple(
        _of(host, [node for node in nodes if node.host.name == host.name], open_ports, reserved)
        for host in inventory.hosts
    )


def _of(
    host: Host, nodes: list[TopologyNode], open_ports: Mapping[str, int], reserved: Mapping[str, int]
) -> Preview:
    return Preview(
        host=host.name,
        parties=host.parties,
        reached=str(host.access),
        address=host.near_address if host.address or not host.interface else f"that of {host.interface}",
        wan_address=host.wan_address or (f"that of {host.wan_interface}" if host.wan_interface else ""),
        servers={node.name: open_ports[node.name] for node in nodes if node.role != "worker"},
        workers={node.name: node.device for node in nodes if node.role == "worker"},
        candidates=_ranges(host.ports),
        ranks={node.name: node.global_rank for node in nodes if node.global_rank is not None},
        groups={node.name: open_ports[node.name] for node in nodes if node.leads_group},
        reserved={node.name: reserved[node.name] for node in nodes if node.name in reserved},
    )


def _ranges(numbers: Iterable[int]) -> str:
    """Format ports as ranges: "9100-9103 9110"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


class _Chosen(Protocol):
    """A plan or an inventory."""

    @property
    def topology(self) -> str: ...

    @property
    def topology_reason(self) -> str: ...


def topology_line(chosen: _Chosen) -> str:
    """Return a line with the topology and, if geomx has chosen it, the reason."""
    return f"topology {chosen.topology}" + f": {chosen.topology_reason}" * bool(chosen.topology_reason)


def with_topology(inventory: Inventory) -> Inventory:
    """Return the inventory with a topology; unchanged if its user chose one.

    The choice depends on the rank scope, so geomx chooses again when that changes. If neither topology can be planned,
    the topology is central, and the caller reports its errors.
    """
    if not inventory.topology_is_automatic:
        return inventory
    training = [party.name for party in (inventory.central, *inventory.parties) if party.workers]
    if len(training) < 2:
        return in_central(inventory, f"only {training[0]} trains")
    spread = structs.replace(inventory, topology="spread")
    if obstacle := _obstacle(spread):
        return in_central(inventory, obstacle)
    local = all(host.is_here for host in inventory.hosts)
    where = ", all on this machine" if local else " and their hosts reach each other"
    return structs.replace(spread, topology_reason=f"{len(training)} parties train{where}")


def in_central(inventory: Inventory, reason: str) -> Inventory:
    """Return the inventory with topology central, which geomx has chosen for `reason`, a clause."""
    return structs.replace(inventory, topology="central", topology_reason=reason)


def _obstacle(spread: Inventory) -> str:
    """Return why no job can be planned on the inventory; "" if one can."""
    try:
        errors = host_errors(spread)
    except InvalidSettings as error:
        return error.message
    return _described(errors[0]) if errors else ""


def _described(error: HostError) -> str:
    if error.key == "reachable_from":
        return f"not all parties reach host {error.host}"
    if error.key == "ports":
        return f"{error.message}, with spread"
    return f"host {error.host}: {error.message}"
