"""TCP ports of this machine: which are free, and the holders of others."""

import errno
import os
import pwd
import socket
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

__all__ = ["ANOTHER", "Reservations", "bind_error", "bound", "free", "holders", "is_reserved"]

ANOTHER = "another geomx launch or doctor"
"""The holder of a port that another probe has reserved."""
_LISTENING = "0A"


class Reservations:
    """Ports that this process keeps from the probes of other launches, whoever's, until `clear` or its end: a launch
    stops listening on them before its job does.
    """

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}

    def hold(self, port: int) -> bool:
        """Reserve a port; return whether it is ours."""
        if port not in self._held:
            try:
                self._held[port] = _reservation(port)
            except OSError:
                return False
        return True

    def clear(self) -> None:
        """End all reservations."""
        while self._held:
            self._held.popitem()[1].close()


def is_reserved(port: int) -> bool:
    """Whether a probe has reserved a port."""
    try:
        _reservation(port).close()
    except OSError:
        return True
    return False


def _reservation(port: int) -> socket.socket:
    """Return what reserves a port: a name of which there is one in a network namespace, without a file."""
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0geomx-probed-port-{port}")
    except OSError:
        name.close()
        raise
    return name


def bound(address: str, port: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """Return a TCP socket (SOCK_DGRAM: UDP) bound like those of the job; resolves a host name. Raises OSError."""
    family, kind, protocol, _, where = socket.getaddrinfo(
        address or None, port, type=kind, flags=socket.AI_PASSIVE
    )[0]
    made = socket.socket(family, kind, protocol)
    try:
        if kind == socket.SOCK_STREAM:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind(where)
    except OSError:
        made.close()
        raise
    return made


def free(address: str, ports: Iterable[int]) -> tuple[list[int], str]:
    """Return those of `ports` that can be bound at `address`, and the reason if the address itself cannot be bound."""
    found: list[int] = []
    for port in ports:
        try:
            bound(address, port).close()
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                return [], bind_error(error)
            continue
        found.append(port)
    return found, ""


def bind_error(error: OSError) -> str:
    """Describe why a port cannot be bound, as a clause: "it is in use"."""
    if isinstance(error, socket.gaierror):
        return "the address is a name that this host does not know"
    known = {
        errno.EADDRINUSE: "it is in use",
        errno.EADDRNOTAVAIL: "the address is none of this host's",
        errno.EACCES: "only root may listen there",
    }
    return known.get(error.errno or 0, error.strerror or str(error))


def holders(ports: Collection[int]) -> dict[int, str]:
    """Return who listens on each of `ports`, on any address: "python3 (pid 4711)", else its account, or ""."""
    sockets = {inode: (port, owner) for inode, port, owner in _listening() if port in ports}
    found = dict.fromkeys(ports, "")
    for process in Path("/proc").iterdir() if sockets else ():
        if process.name.isdigit():
            for inode in sockets.keys() & set(_sockets_of(process)):
                found[sockets[inode][0]] = f"{_name(process)} (pid {process.name})"
    for port, owner in sockets.values():
        found[port] = found[port] or f"a process of {_account(owner)}"
    return found


def _account(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _listening() -> Iterator[tuple[str, int, int]]:
    """Yield inode, port and owner of each listening socket; see proc_net_tcp in the kernel's documentation."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/self/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in (line.split() for line in lines):
            if fields[3] == _LISTENING:
                yield fields[9], int(fields[1].rpartition(":")[2], 16), int(fields[7])


def _sockets_of(process: Path) -> Iterator[str]:
    try:
        with os.scandir(process / "fd") as descriptors:
            for descriptor in descriptors:
                target = os.readlink(descriptor.path)  # noqa: PTH115
                if target.startswith("socket:["):
                    yield target[8:-1]
    except OSError:
        return  # no permission, or the process has ended


def _name(process: Path) -> str:
    try:
        return (process / "comm").read_text(errors="replace").strip() or "a process"
    except OSError:
        return "a process"
