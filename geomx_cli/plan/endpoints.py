"""Endpoints: the addresses that processes bind, and the addresses that others dial. Pure functions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from geomx_cli.contract.addresses import tcp
from geomx_cli.core.conventions import file_name
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.inventory import Host, is_ip
from geomx_cli.plan.topology import TopologyLink, TopologyNode, group_links

__all__ = ["Endpoint", "dialled", "for_datagrams", "lay_endpoints", "takes_port"]

# The path of a unix socket may have 107 bytes; 8 are reserved for suffixes added by libraries.
_LONGEST_PATH = 99


@dataclass(frozen=True)
class Endpoint:
    """A listening endpoint.

    bind: the bound address.
    near: the address that processes of its party dial.
    advertised: the address that other parties dial. It differs from `near` only if both are used and the host has a
        `wan_address`.
    purpose: "membership" for a scheduler; "slices" for a server or worker; "group" for the worker that leads its
        party's process group (`--reduce torch`); "datagrams" for a global server that receives some. Datagrams arrive
        by UDP at the port number of the server's slices. A global server has one endpoint for both of its planes,
        attributed to the global one.
    port: assigned even if the process listens on a unix socket only, because the DMLC variables identify a scheduler by
        its port.
    """

    process: str
    plane: Literal["local", "global"]
    purpose: Literal["membership", "slices", "group", "datagrams"]
    protocol: Literal["tcp", "ipc", "udp"]
    bind: str
    near: str
    advertised: str
    port: int


def dialled(wires: Iterable[TopologyLink]) -> dict[str, list[TopologyLink]]:
    """Group links by the name of the listener."""
    found: dict[str, list[TopologyLink]] = {}
    for wire in wires:
        found.setdefault(wire.listener.name, []).append(wire)
    return found


def takes_port(node: TopologyNode, wires: Iterable[TopologyLink]) -> bool:
    """Whether a process with these incoming links needs a port. Schedulers, processes dialled from other hosts, and
    leaders of a process group need one.
    """
    return node.role.endswith("scheduler") or node.leads_group or any(not wire.near for wire in wires)


def lay_endpoints(
    nodes: Sequence[TopologyNode], wires: Sequence[TopologyLink], socket_dirs: Mapping[str, str]
) -> Mapping[str, Sequence[Endpoint]]:
    """Return the endpoints of each listening process, by name. `socket_dirs`: each host's folder for unix sockets.

    Processes dialled from their own host get a unix socket, and processes dialled from other hosts a TCP port. Ports
    are taken from the hosts' lists in the order of `nodes`. Raises InvalidSettings if a host has too few ports, if two
    processes of one machine get the same port, or if a socket path is too long.
    """
    ports = {node.host.name: iter(node.host.ports) for node in nodes}
    found: dict[str, Sequence[Endpoint]] = {}
    taken: set[tuple[tuple[str, str], int]] = set()
    towards, groups = dialled(wires), dialled(group_links(nodes))
    for node in nodes:
        own = towards.get(node.name, [])
        if node.role == "worker" and not own and not node.leads_group:
            continue
        port = _next_port(node.host, ports[node.host.name]) if takes_port(node, own) else 0
        ends = {(name, port) for name in node.host.known_as if port}
        if not taken.isdisjoint(ends):
            raise InvalidSettings(
                f"port {port} of {node.host.near_address} is given to two processes, one of them {node.name}",
                f"give host {node.host.name} other ports in the inventory",
            )
        taken |= ends
        found[node.name] = tuple(_of(node, own, port, socket_dirs[node.host.name]))
        if node.leads_group:
            found[node.name] = (*found[node.name], _of_group(node, groups[node.name], port))
    return found


def for_datagrams(ends: Iterable[Endpoint]) -> Iterator[Endpoint]:
    """Yield the endpoints at which a process with these endpoints receives datagrams. If no other host dials the
    process, it chooses a port of the loopback interface at its start.
    """
    for end in ends:
        if end.protocol == "tcp" and end.purpose == "slices":
            bind, near, advertised = (each.replace("tcp:", "udp:", 1) for each in (end.bind, end.near, end.advertised))
            yield replace(end, purpose="datagrams", protocol="udp", bind=bind, near=near, advertised=advertised)


def _of_group(node: TopologyNode, wires: Sequence[TopologyLink], port: int) -> Endpoint:
    """The endpoint at which a party's process group forms. Other machines cannot reach it if none of them needs it."""
    if all(wire.near for wire in wires):
        end = tcp("127.0.0.1", port)
        return Endpoint(node.name, "local", "group", "tcp", end, end, end, port)
    address = node.host.near_address
    bind, end = tcp(node.host.listen or _bind_address(address, {address}), port), tcp(address, port)
    return Endpoint(node.name, "local", "group", "tcp", bind, end, end, port)


def _of(node: TopologyNode, wires: Sequence[TopologyLink], port: int, socket_dir: str) -> Iterator[Endpoint]:
    plane: Literal["local", "global"] = "global" if node.role.startswith("global_") else "local"
    purpose: Literal["membership", "slices"] = "membership" if node.role.endswith("scheduler") else "slices"
    if any(wire.near for wire in wires):
        path = f"ipc://{_socket(node, socket_dir)}"
        yield Endpoint(node.name, plane, purpose, "ipc", path, path, path, port)
    dialled_as = {node.host.address_for(wire.dialler.host) for wire in wires if not wire.near}
    if dialled_as:
        address = node.host.near_address
        seen = next(iter(dialled_as - {address}), address)
        near = address if address in dialled_as else seen
        bind = tcp(node.host.listen or _bind_address(address, dialled_as), port)
        yield Endpoint(node.name, plane, purpose, "tcp", bind, tcp(near, port), tcp(seen, port), port)


def _bind_address(address: str, dialled_as: set[str]) -> str:
    """Return the address to bind: the host's own, or all addresses if it is dialled by a name or by another address."""
    if dialled_as == {address} and (is_ip(address) or address == "localhost"):
        return address
    # "::" accepts both IP versions.
    return "::" if any(":" in known for known in (address, *dialled_as)) else "0.0.0.0"


def _socket(node: TopologyNode, socket_dir: str) -> str:
    path = f"{socket_dir}/{file_name(node.name)}.sock"
    if not socket_dir.startswith("/") or len(path.split()) > 1:
        raise InvalidSettings(
            f"{socket_dir!r} cannot be the directory of unix sockets",
            "use an absolute path without blanks (TMPDIR)",
        )
    if len(path.encode()) > _LONGEST_PATH:
        raise InvalidSettings(
            f"the path of the unix socket {path} is longer than {_LONGEST_PATH} bytes",
            "use a shorter directory for sockets (TMPDIR), or a shorter name for the party",
        )
    return path


def _next_port(host: Host, ports: Iterator[int]) -> int:
    try:
        return next(ports)
    except StopIteration:
        raise InvalidSettings(
            f"host {host.name} has {len(host.ports)} ports, fewer than it has schedulers and servers",
            "give it more ports in the inventory",
        ) from None
