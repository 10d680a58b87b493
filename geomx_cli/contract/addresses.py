"""Addresses: resolving names, finding this machine's own addresses, formatting endpoints."""

import ipaddress
import socket
from typing import Any

from geomx_cli.core.errors import InvalidSettings

__all__ = ["facing", "is_loopback", "is_private", "of_interface", "own", "resolve", "split", "tcp"]


def tcp(host: str, port: int | str) -> str:
    """The tcp:// endpoint of an address or name; port * for any port."""
    host = host.strip("[]")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def is_loopback(address: str) -> bool:
    """Whether an address is reachable from this machine only. A name other than localhost is assumed not to be."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def is_private(endpoint: str) -> bool:
    """Whether an endpoint can be dialled from this machine only. A name may resolve to any address, so it is not."""
    host, _ = split(endpoint)
    return endpoint.startswith("ipc:") or (host != "localhost" and is_loopback(host))


def split(endpoint: str) -> tuple[str, str]:
    """Host and port of a tcp:// endpoint."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), port


def resolve(host: str) -> list[str]:
    """The addresses of a host, preferred one first; an address resolves to itself. Raises InvalidSettings if none."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", None) or error)
        raise InvalidSettings(
            f"cannot find the address of {host!r}: {reason.lower()}",
            "give an address, or a name that this machine can look up",
        ) from None
    return list(dict.fromkeys(_text(item[4]) for item in found))


def own(host: str) -> list[str]:
    """The addresses of `host` that this machine has. Raises InvalidSettings if there are none."""
    addresses = resolve(host)
    found = [address for address in addresses if _is_own(address)]
    if not found:
        name = host if addresses == [host] else f"{host} ({', '.join(addresses)})"
        raise InvalidSettings(
            f"{name} is no address of this machine",
            "start this process on that machine, or give an address of this one",
        )
    return found


def facing(host: str, port: int) -> str:
    """The local address used to reach `host`. Raises InvalidSettings if there is no route."""
    for address in resolve(host):
        with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, port))  # connecting UDP sends nothing
            except OSError:
                continue
            return _text(probe.getsockname())
    raise InvalidSettings(
        f"this machine has no route to {host}", "check the network, or set DMLC_NODE_HOST or DMLC_INTERFACE"
    )


def of_interface(name: str) -> str:
    """The address of a network interface, IPv4 preferred. Raises InvalidSettings if there is none."""
    import psutil

    interfaces = psutil.net_if_addrs()
    if name not in interfaces:
        known = ", ".join(sorted(interfaces))
        raise InvalidSettings(f"DMLC_INTERFACE={name}: no such interface", f"this machine has {known}")
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in interfaces[name]:
            # link-local addresses cannot be dialled from other links
            if entry.family == family and "%" not in entry.address:
                return entry.address
    raise InvalidSettings(f"DMLC_INTERFACE={name} has no IP address", "choose another, or set DMLC_NODE_HOST")


def _is_own(address: str) -> bool:
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def _text(address: tuple[Any, ...]) -> str:
    return socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
