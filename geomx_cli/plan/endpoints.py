"""Endpoints: where the processes of a job listen and what others dial. Pure functions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.process_name import file_name
from geomx_cli.inventory import Host, is_ip
from geomx_cli.plan.topology import Link, Node
from geomx_cli.ps.net.addresses import tcp

__all__ = ["Endpoint", "dialled", "lay_endpoints", "takes_port"]

# A unix socket's path may have 107 bytes; 8 are left for what a library adds.
_LONGEST_PATH = 99


@dataclass(frozen=True)
class Endpoint:
    """Where one process listens: `bind` is what it binds, `near` what those of its own party dial, and `advertised`
    what the others do; the two differ only where both are wanted and the host has a `wan_address`.

    `purpose` is membership for a scheduler, and slices for a server or worker. A global server listens once for both of
    its planes, and counts as of the global one. `port` belongs to the process even where it listens on a unix
    socket only: the DMLC variables name a scheduler by its port.
    """

    process: str
    plane: Literal["local", "global"]
    purpose: Literal["membership", "slices"]
    protocol: Literal["tcp", "ipc"]
    bind: str
    near: str
    advertised: str
    port: int


def dialled(wires: Iterable[Link]) -> dict[str, list[Link]]:
    """The links to each process that is dialled, by its name."""
    found: dict[str, list[Link]] = {}
    for wire in wires:
        found.setdefault(wire.listener.name, []).append(wire)
    return found


def takes_port(node: Node, wires: Iterable[Link]) -> bool:
    """Whether a process that is dialled by `wires` has a port: every scheduler, and who is dialled from afar."""
    return node.role.endswith("scheduler") or any(not wire.near for wire in wires)


def lay_endpoints(
    nodes: Sequence[Node], wires: Sequence[Link], socket_dirs: Mapping[str, str]
) -> Mapping[str, Sequence[Endpoint]]:
    """The endpoints of each process that listens, by name. `socket_dirs`: where each host has its unix sockets.

    A unix socket if somebody on its host dials it, TCP if somebody elsewhere does. Ports are taken from the
    hosts' lists in the order of `nodes`. Raises InvalidSettings when a host has too few, when two processes of
    one machine get the same, or a socket's path is too long.
    """
    ports = {node.host.name: iter(node.host.ports) for node in nodes}
    found: dict[str, Sequence[Endpoint]] = {}
    taken: set[tuple[tuple[str, str], int]] = set()
    towards = dialled(wires)
    for node in nodes:
        own = towards.get(node.name, [])
        if node.role == "worker" and not own:
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
    return found


def _of(node: Node, wires: Sequence[Link], port: int, socket_dir: str) -> Iterator[Endpoint]:
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
        bind = tcp(node.host.listen or _listening(address, dialled_as), port)
        yield Endpoint(node.name, plane, purpose, "tcp", bind, tcp(near, port), tcp(seen, port), port)


def _listening(address: str, dialled_as: set[str]) -> str:
    """What to bind: the host's own address, or all that it has if others know it by another or by a name."""
    if dialled_as == {address} and (is_ip(address) or address == "localhost"):
        return address
    # Both versions of IP can be dialled at "::".
    return "::" if any(":" in known for known in (address, *dialled_as)) else "0.0.0.0"


def _socket(node: Node, socket_dir: str) -> str:
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
