"""Contributions in parts: the important blocks of a slice in one message, the rest in another or in datagrams.

A part is a PART message with the header of the contribution. Its payload: a preamble (struct PREAMBLE: flags, bytes of
a block, bytes of the blocks that are in neither this part nor silent), a bit for each block that it contains, lowest
first, and these blocks in order of their place. Blocks that come in no part are zero.
"""

import struct
import time
from dataclasses import dataclass, field

import msgspec
import numpy as np

from geomx_cli.ps.aggregation.codec import LARGEST
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.delivery._blocks import dequantise
from geomx_cli.ps.net.payload import dtype_of
from geomx_cli.ps.net.wire import BadMessage, Form, Header, Kind

__all__ = ["BEHIND", "Assembly", "as_contribution", "bytes_in", "encode_part", "encode_quantised", "part_header"]

BEHIND = 1 << 30
"""How far the priority of the other blocks is below that of the important ones: they go behind those of all slices."""

PREAMBLE = struct.Struct("<BII")
FIRST, QUANTISED, BY_DATAGRAM = 1, 2, 4


def part_header(header: Header, behind: int = 0) -> Header:
    """The header of a part of this contribution, with a lower priority by `behind`."""
    priority = max(-(2**31), header.priority - behind)
    return msgspec.structs.replace(header, kind=Kind.PART, priority=priority)


def encode_part(
    data: Array, has: Array, size: int, rest: int = 0, *, first: bool, by_datagram: bool = False
) -> bytes:
    """A part with those blocks of `size` bytes of `data` (the slice as uint8) that `has` marks. rest: bytes of blocks
    that come later.
    """
    flags = FIRST * first | BY_DATAGRAM * by_datagram
    bitmap: bytes = np.packbits(has, bitorder="little").tobytes()
    return PREAMBLE.pack(flags, size, rest) + bitmap + gather(data, has, size)


def encode_quantised(bounds: Array, codes: Array, has: Array, size: int) -> bytes:
    """A part with quantised blocks (_blocks.quantise): those that `has` marks, in order."""
    bitmap: bytes = np.packbits(has, bitorder="little").tobytes()
    return PREAMBLE.pack(QUANTISED, size, 0) + bitmap + bounds.tobytes() + codes.tobytes()


def gather(data: Array, has: Array, size: int) -> bytes:
    """The bytes of the blocks of `size` bytes that `has` marks, in order. The last block may be shorter."""
    full = len(data) // size
    rows: bytes = data[: full * size].reshape(full, size)[has[:full]].tobytes()
    return rows + (data[full * size :].tobytes() if full < len(has) and has[-1] else b"")


def scatter(data: Array, has: Array, size: int, content: Array) -> None:
    """Write `content`, as many bytes as these blocks have, to the blocks."""
    full = len(data) // size
    count = int(has[:full].sum()) * size
    data[: full * size].reshape(full, size)[has[:full]] = content[:count].reshape(-1, size)
    if count < len(content):
        data[full * size :] = content[count:]


def bytes_in(total: int, has: Array, size: int) -> int:
    """How many of `total` bytes are in the blocks that `has` marks."""
    return int(has.sum()) * size - (-total % size if has[-1] else 0)


def as_contribution(header: Header, array: Array) -> tuple[Header, memoryview]:
    """The EXCHANGE that the parts with this header are of, with these elements."""
    header.kind, header.wide = Kind.EXCHANGE, array.dtype.itemsize > dtype_of(header, wide=False).itemsize
    return header, memoryview(array.data).cast("B")


@dataclass(slots=True)
class Assembly:
    """A contribution that arrives in parts. credit: payload bytes of its messages that were not returned. due: when its
    wait for datagrams is over, time.monotonic seconds; None before its first part. data_at: when the newest datagram
    arrived, 0 for none.
    """

    header: Header
    data: Array = field(init=False)
    credit: int = 0
    due: float | None = None
    data_at: float = 0.0
    by_datagram: bool = False
    _rest: int = 0
    _got: int = 0

    def __post_init__(self) -> None:
        self.data = np.zeros(self.header.length * self.dtype.itemsize, np.uint8)

    @property
    def dtype(self) -> "np.dtype[np.generic]":
        """Of the elements that are sent."""
        return dtype_of(self.header)

    @property
    def missing(self) -> int:
        """Bytes that are still to come, as far as known."""
        return max(0, self._rest - self._got)

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return self.due is not None and not self.missing

    def take(self, header: Header, payload: memoryview, due: float) -> bool:
        """Take a part; returns whether it is the first. Raises BadMessage if it is invalid, or of another shape than
        others.
        """
        if (header.length, header.dtype, header.wide) != (self.header.length, self.header.dtype, self.header.wide):
            raise BadMessage("parts of one contribution that differ in shape")
        if len(payload) < PREAMBLE.size or header.form != Form.FULL or self.dtype.kind != "f":
            raise BadMessage("a part of a contribution without its preamble, or of no dense elements")
        flags, size, rest = PREAMBLE.unpack_from(payload)
        total = len(self.data)
        if not size or size % self.dtype.itemsize or rest > total:
            raise BadMessage(f"a part of blocks of {size} bytes with {rest} to come, in a slice of {total}")
        count = -(-total // size)
        bitmap, rest_of_it = payload[PREAMBLE.size :][: -(-count // 8)], payload[PREAMBLE.size + -(-count // 8) :]
        has = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")[:count].astype(bool)
        if len(has) < count or (flags & FIRST and self.due is not None):
            raise BadMessage("a part of a contribution without all bits of its blocks, or twice")
        length = bytes_in(total, has, size)
        content = _decoded(rest_of_it, has, size, length, self.dtype, quantised=bool(flags & QUANTISED))
        scatter(self.data, has, size, content)
        if flags & FIRST:
            self.header, self.due, self._rest, self.by_datagram = header, due, rest, bool(flags & BY_DATAGRAM)
        else:
            self._got += length
        return bool(flags & FIRST)

    def place(self, offset: int, data: bytes) -> None:
        """Take bytes of a datagram. Raises BadMessage if they lie outside the slice."""
        if offset + len(data) > len(self.data):
            raise BadMessage("a datagram of bytes outside the slice")
        self.data[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        self._got += len(data)
        self.data_at = time.monotonic()


def _decoded(
    content: memoryview, has: Array, size: int, length: int, dtype: "np.dtype[np.generic]", *, quantised: bool
) -> Array:
    """The bytes of a part's blocks. Raises BadMessage for a wrong number."""
    if not quantised:
        if len(content) != length:
            raise BadMessage(f"{len(content)} bytes of blocks where {length} belong")
        return np.frombuffer(content, np.uint8)
    count, elements = int(has.sum()), size // dtype.itemsize
    if length != count * size or elements % 2 or len(content) != count * (8 + elements // 2):
        raise BadMessage(f"{len(content)} bytes of {count} quantised blocks of {size} bytes")
    bounds = np.frombuffer(content[: 8 * count], "<f4").reshape(count, 2)
    most = min(LARGEST, float(np.finfo(dtype).max))  # type: ignore[arg-type]
    if not (np.abs(bounds) <= most).all():  # nor NaN
        raise BadMessage("quantised blocks with bounds that are no numbers of their elements")
    codes = np.frombuffer(content[8 * count :], np.uint8).reshape(count, elements // 2)
    return dequantise(bounds, codes).astype(dtype, copy=False).reshape(-1).view(np.uint8)
