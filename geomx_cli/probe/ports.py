"""TCP ports of this machine: which are free, and the holders of others."""

import errno
import ipaddress
import os
import pwd
import re
import socket
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["ANOTHER", "PROBED", "Reservation", "Reservations", "bind_error", "bound", "free", "holders", "reserved"]

ANOTHER = "another geomx launch or doctor"
"""The holder of a port that another launch's probe has reserved."""
PROBED = "probed"
_LISTENING = "0A"
_EVERYWHERE = "*"


class Reservation(NamedTuple):
    """A port that a geomx process keeps from others, at a `place`: an address, or "*" for all of them."""

    port: int
    place: str
    owner: str

    def is_at(self, address: str) -> bool:
        """Whether the port cannot be bound at `address` together with this."""
        return _EVERYWHERE in (self.place, _place(address)) or self.place == _place(address)


class Reservations:
    """Ports that this process reserves, against probes of any account, until it releases them or ends. A launch needs
    reservations, because it stops listening before its job listens.

    A reservation is the name of an abstract unix socket. /proc shows the sockets of a network namespace to all
    accounts, and no file remains.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._held: dict[Reservation, socket.socket] = {}

    def hold(self, address: str, port: int, owner: str) -> bool:
        """Reserve a port at an address; return False if another owner has it. Two calls at the same time may both fail,
        but cannot both succeed. owner: hexadecimal.
        """
        wanted = Reservation(port, _place(address), owner)
        if wanted in self._held:
            return True
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0geomx-{self._kind}-port/{port}/{wanted.place}/{owner}")
        except OSError:  # another probe of this launch has it: whichever binds the port itself gets it
            name.close()
            return True
        # Look for other reservations only when our name exists, so that of two reservations at least one sees the
        # other.
        if any(one.port == port and one.owner != owner and one.is_at(address) for one in reserved(self._kind)):
            name.close()
            return False
        self._held[wanted] = name
        return True

    def release(self, ports: Iterable[int] | None = None) -> None:
        """End the reservations of these ports, by default all."""
        ended = None if ports is None else set(ports)
        for each in [each for each in self._held if ended is None or each.port in ended]:
            self._held.pop(each).close()


def reserved(kind: str) -> list[Reservation]:
    """Return the reservations of all processes."""
    try:
        names = Path("/proc/self/net/unix").read_text(errors="replace")
    except OSError:
        return []
    found = re.findall(rf" @geomx-{kind}-port/([0-9]{{1,5}})/([0-9a-fA-F.:*]+)/([0-9a-f]+)$", names, re.MULTILINE)
    return [Reservation(int(port), place, owner) for port, place, owner in found]


def _place(address: str) -> str:
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return _EVERYWHERE  # a name, which may have several
    return _EVERYWHERE if known.is_unspecified else str(known)


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
