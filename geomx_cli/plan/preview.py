"""What would run on each host of an inventory, for a user to look at before anything is asked of a machine."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from geomx_cli.inventory import Host, Inventory
from geomx_cli.plan import ports
from geomx_cli.plan.endpoints import lay_endpoints
from geomx_cli.plan.topology import Node, build_topology, links

__all__ = ["Preview", "preview"]


@dataclass(frozen=True)
class Preview:
    """One host. `reached` says how: "this machine", or "ssh" with user@address:port and the machines between.

    `servers` has the port of each of its schedulers and servers that others dial, if all of `candidates` (as ranges)
    are free, and 0 for one that is dialled from its own host only; `workers` has each worker's device, "" for a
    master worker that does not train.
    """

    host: str
    parties: tuple[str, ...]
    reached: str
    address: str
    wan_address: str
    servers: dict[str, int]
    workers: dict[str, str]
    candidates: str

    def to_json(self) -> dict[str, Any]:
        """As an object that `json` writes."""
        return asdict(self)


def preview(inventory: Inventory) -> tuple[Preview, ...]:
    """For each host in order. Raises InvalidSettings where roles or ports do not fit."""
    chosen = ports.choose(inventory, None)
    nodes = build_topology(chosen)
    endpoints = lay_endpoints(nodes, links(nodes), {host.name: "/" for host in inventory.hosts})
    open_ports = {
        name: next((end.port for end in ends if end.protocol == "tcp"), 0) for name, ends in endpoints.items()
    }
    return tuple(
        _of(host, [node for node in nodes if node.host.name == host.name], open_ports) for host in inventory.hosts
    )


def _of(host: Host, nodes: list[Node], open_ports: Mapping[str, int]) -> Preview:
    return Preview(
        host=host.name,
        parties=host.parties,
        reached=str(host.access),
        address=host.near_address if host.address or not host.interface else f"that of {host.interface}",
        wan_address=host.wan_address or (f"that of {host.wan_interface}" if host.wan_interface else ""),
        servers={node.name: open_ports[node.name] for node in nodes if node.role != "worker"},
        workers={node.name: node.device for node in nodes if node.role == "worker"},
        candidates=_ranges(host.ports),
    )


def _ranges(numbers: Iterable[int]) -> str:
    """Ports as a user writes them: "9100-9103 9110"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
