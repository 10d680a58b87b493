"""Addresses of network interfaces, through rtnetlink(7)."""

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator

__all__ = ["addresses"]

_GET_ADDRESSES, _DONE, _ERROR = 22, 3, 2
_REQUEST_DUMP = 0x301
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ADDRESS = struct.Struct("=BBBBI")  # family, prefix, flags, scope, interface
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_LABEL, _LOCAL, _ANY_ADDRESS = 3, 2, 1
_UNFIT = 0x08 | 0x20 | 0x40  # duplicate, deprecated, or tentative
_LIMIT = 2.0
_MOST = 256


def addresses() -> dict[str, list[str]]:
    """Return IPv4 and IPv6 addresses by interface, in the kernel's order, without IPv6 link-local ones.

    At most 256 interfaces with 256 addresses each. Raises OSError if the kernel does not respond.
    """
    found: dict[str, list[str]] = {}
    for name, address in _all():
        if len(found) < _MOST or name in found:
            own = found.setdefault(name, [])
            if address not in own and len(own) < _MOST:
                own.append(address)
    return found


def _all() -> Iterator[tuple[str, str]]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as link:
        link.settimeout(_LIMIT)
        body = _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        link.send(_HEADER.pack(_HEADER.size + len(body), _GET_ADDRESSES, _REQUEST_DUMP, 1, 0) + body)
        while True:
            data = link.recv(1 << 18)
            while len(data) >= _HEADER.size:
                length, kind, *_ = _HEADER.unpack_from(data)
                if kind == _DONE:
                    return
                if kind == _ERROR or length < _HEADER.size:
                    raise OSError("the kernel does not tell the addresses of the network interfaces")
                yield from _one(data[_HEADER.size : length])
                data = data[_aligned(length) :]


def _one(message: bytes) -> Iterator[tuple[str, str]]:
    _, _, flags, _, index = _ADDRESS.unpack_from(message)
    attributes = dict(_attributes(message[_ADDRESS.size :]))
    raw = attributes.get(_LOCAL) or attributes.get(_ANY_ADDRESS)
    if raw is None or flags & _UNFIT:
        return
    address = ipaddress.ip_address(raw)
    if address.version == 6 and address.is_link_local:
        return
    label = attributes.get(_LABEL, b"").rstrip(b"\0")
    try:
        yield os.fsdecode(label) if label else socket.if_indextoname(index), str(address)
    except OSError:
        return  # the interface was removed meanwhile


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        if length < _ATTRIBUTE.size:
            return
        yield kind, data[_ATTRIBUTE.size : length]
        data = data[_aligned(length) :]


def _aligned(length: int) -> int:
    return (length + 3) & ~3
