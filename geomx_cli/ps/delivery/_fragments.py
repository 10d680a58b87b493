"""What datagrams contain, a fragment of a block of one contribution and padding, and what peers say about them (DGT).
"""

import struct
from typing import Annotated, NamedTuple, NotRequired, TypedDict

import msgspec

from geomx_cli.ps.cluster.bodies import Count, Topic
from geomx_cli.ps.net.wire import MAX_REPORTED, BadMessage

__all__ = ["FRAGMENT", "TOPICS", "Fragment", "decode_fragment", "encode_fragment"]

FRAGMENT = struct.Struct("<IIQIH")


class _Open(TypedDict):
    salt: bytes


class _Opened(_Open):
    session: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    port: Annotated[int, msgspec.Meta(ge=1, lt=65_536)]


class _Report(TypedDict):
    """sent: key, slice and round of contributions whose blocks have all been sent, in datagrams below these `counters`
    of each channel. received: bytes so far, `at` seconds of the receiver's clock, and the longest datagram.
    """

    sent: NotRequired[Annotated[list[tuple[Count, Count, Count]], msgspec.Meta(max_length=MAX_REPORTED)]]
    counters: NotRequired[Annotated[list[Count], msgspec.Meta(max_length=64)]]
    received: NotRequired[Count]
    at: NotRequired[float]
    longest: NotRequired[Count]


TOPICS = {"datagrams_open": Topic(_Open, _Opened), "datagrams": Topic(_Report, notifies=True)}


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
