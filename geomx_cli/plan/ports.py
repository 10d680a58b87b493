"""Which ports the processes of a job listen on."""

import random
import socket
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import Value
from geomx_cli.inventory import Host, HostError, Inventory
from geomx_cli.plan.endpoints import dialled, takes_port
from geomx_cli.plan.placement import placement_errors
from geomx_cli.plan.topology import build_topology, links

__all__ = ["choose", "free_ports", "host_errors", "ports_needed"]


def choose(inventory: Inventory, free: Mapping[str, Collection[int]] | None) -> Inventory:
    """The inventory with exactly the ports that each host's schedulers and servers take, out of its candidates.

    The first candidates that will do, distinct among hosts that are known by one address. `free` tells for each
    host's name which of its candidates nobody listens on; None takes all to be free. A pure function. Raises
    InvalidSettings when a host has too few.
    """
    chosen = _distribute(inventory, free)
    if isinstance(chosen, HostError):
        raise InvalidSettings(f"host {chosen.host} {chosen.message}", chosen.hint)
    return inventory.with_hosts(
        host.model_copy(update={"ports": tuple(sorted(chosen[host.name], key=host.ports.index))})
        for host in inventory.hosts
    )


def host_errors(inventory: Inventory) -> tuple[HostError, ...]:
    """Why no job can be planned on the inventory: every role that cannot be placed, or where there is none the first
    host with too few ports.
    """
    if wrong := placement_errors(inventory):
        return wrong
    chosen = _distribute(inventory, None)
    return (chosen,) if isinstance(chosen, HostError) else ()


def _distribute(
    inventory: Inventory, free: Mapping[str, Collection[int]] | None
) -> dict[str, list[int]] | HostError:
    nodes = build_topology(inventory)
    towards = dialled(links(nodes))
    need = Counter(node.host.name for node in nodes if takes_port(node, towards.get(node.name, ())))
    offers = {
        host.name: [port for port in host.ports if free is None or port in free[host.name]]
        for host in inventory.hosts
    }
    chosen: dict[str, list[int]] = {host.name: [] for host in inventory.hosts}
    for group in _neighbours(inventory.hosts):
        holders: dict[int, str] = {}
        for host in group:
            for _ in range(need[host.name]):
                if not _give(host.name, offers, holders, set()):
                    return _too_few(host, group, need, offers[host.name])
        for port, name in holders.items():
            chosen[name].append(port)
    return chosen


def _neighbours(hosts: Sequence[Host]) -> list[list[Host]]:
    """Hosts in groups; those known by one address are in one group."""
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


def _give(name: str, offers: Mapping[str, Sequence[int]], holders: dict[int, str], seen: set[int]) -> bool:
    """Give one more port to `name`, moving others to their further candidates where that helps."""
    for port in offers[name]:
        if port not in holders:
            holders[port] = name
            return True
    for port in offers[name]:
        holder = holders[port]
        if holder != name and port not in seen:
            seen.add(port)
            if _give(holder, offers, holders, seen):
                holders[port] = name
                return True
    return False


def _too_few(host: Host, group: Sequence[Host], need: Counter[str], offers: Sequence[int]) -> HostError:
    others = [other.name for other in group if other is not host and need[other.name]]
    shared = f", which it shares with {', '.join(others)} at {host.near_address}" if others else ""
    busy = len(host.ports) - len(offers)
    taken = f", {busy} of them taken by other programs" if busy else ""
    return HostError(
        host.name,
        "ports",
        f"needs {need[host.name]} ports for its schedulers and servers and has {len(host.ports)}{taken}{shared}",
        f'give it more in the inventory, as ports = "9100-{9100 + 2 * need.total()}"',
    )


def ports_needed(options: Mapping[str, Value]) -> int:
    """How many ports `this_machine` takes: the same number for each host, enough for any of them."""
    parties, workers = int(options["parties"]), int(options["workers"])
    of_plane = parties * workers if options["topology"] == "flat" else workers
    listeners = {listener for _, listener in plugins.peers(str(options["delivery"]), of_plane)}
    each = 2 + int(options["global_servers"]) + int(options["local_servers"]) + len(listeners)
    return (parties + 1) * each


def free_ports(count: int) -> list[int]:
    """`count` TCP ports of 127.0.0.1 on which nobody listens now.

    They lie below the range that Linux gives to outgoing connections by default, so that none takes one
    before the job does, and no other process gets one of them from this function while this one lives.
    Another program that listens may still be faster; its bind, or ours, then fails with a message. Raises
    InvalidSettings when there are not so many.
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
                _reserve(port)
            except OSError:
                continue
        found.append(port)
    raise InvalidSettings(f"there are not {count} free ports on this machine", "use fewer parties or servers")


def _reserve(port: int) -> None:
    """Hold the port's name among geomx's processes until this one ends. Raises OSError where another holds it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as name:
        name.bind(f"\0geomx-port-{port}")
        name.detach()  # open for as long as this process lives: the job binds its ports some time after
