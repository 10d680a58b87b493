"""What datagrams contain: a fragment of a block of one contribution, and padding (DGT)."""

import struct
from typing import NamedTuple

from geomx_cli.ps.net.wire import BadMessage

__all__ = ["FRAGMENT", "Fragment", "decode_fragment", "encode_fragment"]

FRAGMENT = struct.Struct("<IIQIH")


class Fragment(NamedTuple):
    """Bytes of a slice (`part` of its tensor) in a round; `offset` is in bytes. Without bytes it probes the path."""

    key: int = 0
    part: int = 0
    round: int = 0
    offset: int = 0
    data: bytes = b""


def encode_fragment(fragment: Fragment, length: int) -> bytes:
    """A fragment, padded to `length` bytes of data."""
    key, part, round_, offset, data = fragment
    return FRAGMENT.pack(key, part, round_, offset, len(data)) + data.ljust(length, b"\0")


def decode_fragment(content: bytes) -> Fragment:
    """Raises BadMessage."""
    if len(content) < FRAGMENT.size:
        raise BadMessage("a datagram without a fragment")
    key, part, round_, offset, length = FRAGMENT.unpack_from(content)
    data = content[FRAGMENT.size : FRAGMENT.size + length]
    if len(data) < length:
        raise BadMessage("a datagram that is shorter than its fragment")
    return Fragment(key, part, round_, offset, data)
