"""Blocks of a slice (DGT): how much each contributes, their order, and the messages that contain them.

Wang et al., "Differential gradient transmission", FGCS 121 (2021): the contribution of a block is a moving average of
its mean absolute gradient. Blocks are sorted by contribution, and the first `k` of them are important. The last block
of a slice is important too. Important blocks are sent in one message, the other blocks in another message or in
datagrams.

A part is a PART message with the header of the contribution. Its payload has a preamble (struct PREAMBLE: flags, bytes
of a block, bytes of the blocks that are neither in this part nor silent). A bit for each block follows, lowest first:
it tells whether the part contains the block. Then follow these blocks, in order of their place. Blocks in no part are
zero.
"""

import math
import struct
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from geomx_cli.ps.aggregation.codec import LARGEST
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.net.payload import dtype_of
from geomx_cli.ps.net.wire import BadMessage, Form, Header, Kind

__all__ = [
    "BEHIND", "FRAGMENT", "IMPORTANT", "SILENT", "Assembly", "Block", "Fragment", "Ranking", "as_contribution",
    "bytes_in", "channels", "decode_fragment", "dequantise", "encode_fragment", "encode_part", "encode_quantised",
    "part_header", "quantise",
]  # fmt: skip

IMPORTANT, SILENT = 0, 255
"""Channels: of important blocks, and of blocks that have no bit set and are not sent."""
LEVELS = 16
BEHIND = 1 << 30
"""How far the priority of other blocks is below the important blocks' priority. They follow all slices' important ones.
"""

PREAMBLE = struct.Struct("<BII")
FIRST, QUANTISED, BY_DATAGRAM = 1, 2, 4


def channels(count: int, k: float, unreliable: int) -> Array:
    """The channel of each of `count` blocks in descending order of contribution. The last block of the slice comes
    last.

    The first round(k * count), rounded half up, and the last are IMPORTANT. The rest are divided evenly over the
    channels 1 to `unreliable`.
    """
    important = min(math.floor(k * count + 0.5), count - 1)
    found = np.zeros(count, np.uint8)
    rest = np.arange(count - 1 - important)
    found[important : count - 1] = 1 + rest * unreliable // max(1, len(rest))
    return found


@dataclass(slots=True)
class Ranking:
    """The contributions of one slice's blocks.

    average: of each block; None before the first round.
    """

    average: Array | None = None

    def update(self, array: Array, size: int, alpha: float) -> bool:
        """Include a round's gradient, in blocks of `size` elements: C <- alpha C + (1 - alpha) mean|g|.

        Returns False, and keeps the contributions, if some are not finite.
        """
        starts = np.arange(0, len(array), size)
        lengths = np.minimum(size, len(array) - starts)
        with np.errstate(over="ignore", invalid="ignore"):
            magnitude = np.abs(array, dtype=np.promote_types(array.dtype, np.float32))
            mean = np.add.reduceat(magnitude, starts, dtype=np.float64) / lengths
        if not np.isfinite(mean).all():
            return False
        before = np.zeros(len(mean)) if self.average is None or len(self.average) != len(mean) else self.average
        self.average = alpha * before + (1 - alpha) * mean
        return True

    def channels(self, k: float, unreliable: int, zero: Array) -> tuple[Array, Array]:
        """The channel of each block, and the blocks that are sent, most important first, the last block last.

        zero: which blocks have no bit set. Blocks without a contribution are SILENT, except the last block.
        """
        assert self.average is not None
        count = len(self.average)
        order = np.argsort(-self.average[:-1], kind="stable")
        order = order[~((self.average[order] == 0) & zero[order])]
        order = np.append(order, count - 1)
        found = np.full(count, SILENT, np.uint8)
        found[order] = channels(len(order), k, unreliable)
        return found, order


def quantise(blocks: Array) -> tuple[Array, Array]:
    """Encode each row in 4 bits per element. Returns the bounds of the row's 16 bins (float32, in two columns) and the
    codes, two in a byte, the first in the low bits. The bins lie between min(0, smallest) and max(0, largest). Rows
    have even length.
    """
    bounds = np.empty((len(blocks), 2), "<f4")
    bounds[:, 0] = np.minimum(blocks.min(axis=1), 0)
    bounds[:, 1] = np.maximum(blocks.max(axis=1), 0)
    low, step = _bins(bounds)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(step > 0, (blocks - low) / step, 0)
    codes = np.clip(np.floor(codes), 0, LEVELS - 1).astype(np.uint8)
    return bounds, codes[:, ::2] | codes[:, 1::2] << 4


def dequantise(bounds: Array, codes: Array) -> Array:
    """The rows that `quantise` encoded, float32: the centres of their bins."""
    low, step = _bins(bounds)
    unpacked = np.empty((len(codes), 2 * codes.shape[1]), np.float32)
    unpacked[:, ::2] = codes & 15
    unpacked[:, 1::2] = codes >> 4
    found: Array = low + (unpacked + np.float32(0.5)) * step
    return found


def _bins(bounds: Array) -> tuple[Array, Array]:
    """The lower bound and the width of the bins, as columns."""
    low, high = bounds[:, :1], bounds[:, 1:]
    return low, (high - low) / np.float32(LEVELS)


def part_header(header: Header, behind: int = 0) -> Header:
    """The header of a part of this contribution, with a lower priority by `behind`."""
    priority = max(-(2**31), header.priority - behind)
    return msgspec.structs.replace(header, kind=Kind.PART, priority=priority)


def encode_part(
    data: Array, has: Array, size: int, rest: int = 0, *, first: bool, by_datagram: bool = False
) -> bytes:
    """A part with the blocks that `has` marks, of `size` bytes each, from `data` (the slice as uint8).

    rest: bytes of blocks that come later.
    """
    flags = FIRST * first | BY_DATAGRAM * by_datagram
    bitmap: bytes = np.packbits(has, bitorder="little").tobytes()
    return PREAMBLE.pack(flags, size, rest) + bitmap + gather(data, has, size)


def encode_quantised(bounds: Array, codes: Array, has: Array, size: int) -> bytes:
    """A part with quantised blocks (see `quantise`): the blocks that `has` marks, in order."""
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
    """The EXCHANGE to which the parts with this header belong, with these elements."""
    header.kind, header.wide = Kind.EXCHANGE, array.dtype.itemsize > dtype_of(header, wide=False).itemsize
    return header, memoryview(array.data).cast("B")


@dataclass(slots=True)
class Assembly:
    """A contribution that arrives in parts. Times in time.monotonic seconds.

    header: of the part that arrived first.
    data: the slice as bytes; zero where nothing has arrived.
    credit: payload bytes of its messages whose credit was not returned yet.
    due: when its wait for datagrams ends; None before its first part.
    data_at: when the newest datagram arrived; 0 for none.
    by_datagram: whether the other blocks are sent as datagrams.
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
        """The dtype of the elements as sent."""
        return dtype_of(self.header)

    @property
    def missing(self) -> int:
        """Bytes that are still to come, as far as known."""
        return max(0, self._rest - self._got)

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return self.due is not None and not self.missing

    def add_part(self, header: Header, payload: memoryview, due: float) -> bool:
        """Add a part. Returns whether it is the first. Raises BadMessage if it is invalid, or its shape differs from
        other parts.
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

    def add_bytes(self, offset: int, data: bytes) -> None:
        """Add the bytes of a datagram. Raises BadMessage if they lie outside the slice."""
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


# What datagrams contain: a fragment of a block of one contribution, and padding.

FRAGMENT = struct.Struct("<IIQIH")


class Block(NamedTuple):
    """Bytes of a slice that are sent as datagrams.

    channel: 1 or more; see `channels`.
    offset: in bytes.
    """

    channel: int
    offset: int
    data: bytes


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
