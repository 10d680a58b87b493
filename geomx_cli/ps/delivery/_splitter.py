"""Divides contributions into important and other blocks (DGT)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from geomx_cli.ps.aggregation.codec import exact_dtype
from geomx_cli.ps.aggregation.compression import can_encode
from geomx_cli.ps.arrays import Array, Arrays
from geomx_cli.ps.delivery._blocks import IMPORTANT, SILENT, Ranking, dequantise, quantise
from geomx_cli.ps.delivery._parts import bytes_in, encode_part, encode_quantised
from geomx_cli.ps.net.payload import dtype_of
from geomx_cli.ps.net.wire import Form, Header

if TYPE_CHECKING:
    from geomx_cli.ps.cluster.config import NodeSettings

__all__ = ["BY_DATAGRAM", "QUANTISED", "REORDERED", "Block", "Parts", "Splitter"]

BY_DATAGRAM, REORDERED, QUANTISED = 1, 2, 3
"""Values of --dgt: what becomes of blocks that are not important."""


class Block(NamedTuple):
    """Bytes of a slice that are sent as datagrams of a channel, 1 or more; offset in bytes."""

    channel: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Parts:
    """A contribution: `whole`, as repeats send it, and in parts, of which there are none if it is not divided.
    important: the payload of the first part. others: that of the second, or else the blocks for datagrams, those that
    contribute most first.
    """

    whole: memoryview | None
    important: bytes = b""
    others: bytes = b""
    blocks: tuple[Block, ...] = ()


class Splitter:
    """Divides the contributions of one local server. Used by the loop's thread only.

    k: the part of the blocks that is important.
    kept: returns the arrays kept with a header's slice: the "average" contribution of each block, and the "residual",
    which is what quantisation has lost.
    """

    def __init__(self, settings: "NodeSettings", kept: Callable[[Header], Arrays]) -> None:
        self._kept = kept
        self.mode = int(settings.number("dgt"))
        self.k = self._first_k = settings.number("dgt_k")
        self._least_k = settings.number("dgt_k_min")
        self._size = int(settings.number("dgt_block"))
        self._alpha = settings.number("dgt_alpha")
        self._channels = int(settings.number("dgt_channels"))

    def follow(self, losses: Iterable[tuple[float, float]]) -> None:
        """Set k to k_0 * loss / first loss, at least k_min, for the means of these pairs of the first and the present
        loss of each worker.
        """
        first, present = (sum(column) for column in zip(*losses, strict=True))
        ratio = present / first if first > 0 else 1.0
        self.k = min(1.0, max(self._least_k, self._first_k * ratio))

    def split(self, header: Header, payload: memoryview | None, unsent: Iterable[Block] = ()) -> Parts:
        """Divide a contribution. It stays whole if it has no elements, rows or encoded ones, a single block, only
        important blocks, or elements that are not finite.

        unsent: blocks of an earlier round of this slice that were not sent; they are added.
        """
        if payload is None or header.form != Form.FULL or dtype_of(header).kind != "f":
            return Parts(payload)
        kept, dtype = self._kept(header), dtype_of(header)
        exact = np.frombuffer(payload, dtype)
        for block in unsent:
            exact = _plus(exact, block)
        if (residual := kept.pop("residual", None)) is not None:
            exact = exact + residual
        array = exact.astype(dtype, copy=False)
        size, data, ranking = self._size, array.view(np.uint8), Ranking(kept.get("average"))
        if len(data) <= size or not ranking.update(array, size // dtype.itemsize, self._alpha):
            return Parts(memoryview(data.data))
        assert ranking.average is not None
        kept["average"] = ranking.average
        channel, order = ranking.channels(self.k, self._channels, _zeros(ranking.average, data, size))
        important, others = channel == IMPORTANT, (channel != IMPORTANT) & (channel != SILENT)
        if not others.any() or (self.mode == QUANTISED and not can_encode(exact)):
            return Parts(memoryview(data.data))
        rest = bytes_in(len(data), others, size)
        first = encode_part(data, important, size, rest, first=True, by_datagram=self.mode == BY_DATAGRAM)
        if self.mode == REORDERED:
            return Parts(memoryview(data.data), first, encode_part(data, others, size, first=False))
        if self.mode == BY_DATAGRAM:
            sent = order[others[order]]
            blocks = (Block(int(channel[at]), at * size, data[at * size : (at + 1) * size].tobytes()) for at in sent)
            return Parts(memoryview(data.data), first, blocks=tuple(blocks))
        # A repeat, which is whole, has the same quantised elements, so the residual fits it too.
        array = array.copy()
        rows = array[: len(data) // size * (size // dtype.itemsize)].reshape(-1, size // dtype.itemsize)
        where = others[: len(rows)]
        bounds, codes = quantise(rows[where])
        rows[where] = dequantise(bounds, codes).astype(dtype, copy=False)
        kept["residual"] = exact.astype(exact_dtype(header.dtype), copy=False) - array
        whole = memoryview(array.data).cast("B")
        return Parts(whole, first, encode_quantised(bounds, codes, others, size))


def _plus(array: Array, block: Block) -> Array:
    """The array with the elements of a block added."""
    array = array.copy()
    data = np.frombuffer(block.data, array.dtype)
    start = block.offset // array.dtype.itemsize
    array[start : start + len(data)] += data
    return array


def _zeros(average: Array, data: Array, size: int) -> Array:
    """Which blocks have no bit set, of those without a contribution."""
    found = np.zeros(len(average), bool)
    for at in np.flatnonzero(average == 0):
        found[at] = not data[at * size : (at + 1) * size].any()
    return found
