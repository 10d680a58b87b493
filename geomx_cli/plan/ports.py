"""The ports on which a job's processes listen: a pure function of the inventory and of the free ports."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from geomx_cli.core import deliveries
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import Value
from geomx_cli.core.units import counted
from geomx_cli.inventory import Host, HostError, Inventory
from geomx_cli.plan.endpoints import dialled, takes_port
from geomx_cli.plan.topology import build_topology, links, placement_errors, reachability_errors

__all__ = ["choose", "host_errors", "ports_needed"]


def choose(inventory: Inventory, free: Mapping[str, Collection[int]] | None) -> Inventory:
    """Return the inventory with each host's ports reduced to those its schedulers and servers need.

    The first suitable candidates are used. Hosts that share an address get different ports. Pure function. Raises
    InvalidSettings if a host has too few.

    free: for each host name, the candidates that are not in use. None assumes that all are free.
    """
    chosen = _distribute(inventory, free)
    if isinstance(chosen, HostError):
        raise InvalidSettings(f"host {chosen.host} {chosen.message}", chosen.hint)
    return inventory.with_hosts(
        structs.replace(host, ports=tuple(sorted(chosen[host.name], key=host.ports.index)))
        for host in inventory.hosts
    )


def host_errors(inventory: Inventory) -> tuple[HostError, ...]:
    """Return why no job can be planned on the inventory: all placement errors. If there are none, the hosts that others
    have to dial and cannot. If there are none of these, the first host with too few ports.
    """
    if wrong := placement_errors(inventory) or tuple(reachability_errors(links(build_topology(inventory)))):
        return wrong
    chosen = _distribute(inventory, None)
    return (replace(chosen, message=f"host {chosen.host} {chosen.message}"),) if isinstance(chosen, HostError) else ()


def _distribute(
    inventory: Inventory, free: Mapping[str, Collection[int]] | None
) -> dict[str, list[int]] | HostError:
    nodes = build_topology(inventory)
    towards = dialled(links(nodes))
    takers: dict[str, list[str]] = {host.name: [] for host in inventory.hosts}
    for node in nodes:
        if takes_port(node, towards.get(node.name, ())):
            takers[node.host.name].append(node.name)
    offers = {
        host.name: [port for port in host.ports if free is None or port in free[host.name]]
        for host in inventory.hosts
    }
    chosen: dict[str, list[int]] = {}
    for group in _neighbours(inventory.hosts):
        held = set[int]()
        # Greedy: of hosts at one address, those with the fewest ports to spare choose first.
        for host in sorted(group, key=lambda host: len(offers[host.name]) - len(takers[host.name])):
            found = [port for port in offers[host.name] if port not in held][: len(takers[host.name])]
            if len(found) < len(takers[host.name]):
                return _too_few(host, group, takers, offers[host.name])
            chosen[host.name] = found
            held.update(found)
    return chosen


def _neighbours(hosts: Sequence[Host]) -> list[list[Host]]:
    """Group the hosts that share an address, transitively."""
    groups: dict[str, list[Host]] = {host.name: [host] for host in hosts}
    first: dict[tuple[str, str], str] = {}
    for host in hosts:
        for name in host.known_as:
            other = first.setdefault(name, host.name)
            mine, theirs = groups[host.name], groups[other]
            if mine is not theirs:
                theirs += mine
                groups |= {member.name: theirs for member in mine}
    return list({id(group): group for group in groups.values()}.values())


def _too_few(
    host: Host, group: Sequence[Host], takers: Mapping[str, Sequence[str]], offers: Sequence[int]
) -> HostError:
    others = [other.name for other in group if other is not host and takers[other.name]]
    shared = f", which it shares with {', '.join(others)} at {host.near_address}" if others else ""
    busy = len(host.ports) - len(offers)
    taken = f", {busy} of them taken by other programs" if busy else ""
    most = sum(len(takers[one.name]) for one in group) + busy
    return HostError(
        host.name,
        "ports",
        f"needs {counted(len(takers[host.name]), 'port')} for its schedulers and servers "
        f"({', '.join(takers[host.name])}) and has {len(host.ports)}{taken}{shared}",
        f'give it more in the inventory, as ports = "9100-{9099 + most}"',
    )


def ports_needed(options: Mapping[str, Value]) -> int:
    """Return the number of ports that `this_machine` requires: equal for all hosts, and sufficient for each of them."""
    parties, workers = int(options["parties"]), int(options["workers"])
    of_plane = parties * workers if options["topology"] == "flat" else workers
    listeners = {listener for _, listener in deliveries.peers(deliveries.chosen(options), of_plane, options)}
    groups = int(options["reduce"] == "torch")
    each = 2 + int(options["global_servers"]) + int(options["local_servers"]) + len(listeners) + groups
    return (parties + 1) * each
