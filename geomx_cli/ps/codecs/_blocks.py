"""Codecs whose elements share a scale in blocks of 256: the payload is each block's scale, then the elements' codes."""

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from geomx_cli.ps.aggregation.codec import LARGEST, Codec
from geomx_cli.ps.kernels import vectorised
from geomx_cli.ps.kernels.loops import compiled
from geomx_cli.ps.kernels.vectorised import BLOCK, CACHED, Kernel
from geomx_cli.ps.net.wire import BadMessage

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array

__all__ = ["BlockCodec"]


class BlockCodec(Codec):
    """Scales are little-endian fp32.

    code: the dtype of codes.
    each: elements in one code.
    kernels: one encodes whole blocks, (elements, scales, codes), and one decodes them, (codes, scales, elements).
    """

    decay = 1.0
    results = "changes"
    name: ClassVar[str]
    code: ClassVar["np.dtype[Any]"]
    each: ClassVar[int]
    kernels: ClassVar[tuple[Kernel, Kernel]]

    def __init__(self) -> None:
        self._encode, self._decode = self.kernels

    def prepare(self) -> None:
        """See Codec."""
        self._encode, self._decode = map(compiled, self.kernels)
        self.accumulate = compiled(vectorised.accumulate)

    def encode(self, array: "Array") -> memoryview:
        """See Codec."""
        blocks = -(-len(array) // BLOCK)
        payload = np.empty(4 * blocks - (-len(array) // self.each), np.uint8)
        scales, codes = payload[: 4 * blocks].view("<f4"), payload[4 * blocks :].view(self.code)
        vectorised.encode_blocks(self._encode, array.astype(np.float32, copy=False), scales, codes, self.each)
        return payload.data

    def decode(self, payload: memoryview, length: int) -> "Array":
        """See Codec."""
        scales, codes = self._parts(payload, length)
        return vectorised.decode_blocks(self._decode, scales, codes, length, self.each)

    def extract(self, array: "Array", momentum: "Array | None" = None) -> memoryview:
        """See Codec. Decodes blocks that stay in the processor's cache."""
        assert momentum is None, "none of these codecs has momentum correction"
        payload = self.encode(array)
        scales, codes = self._parts(payload, len(array))
        for start in range(0, len(array), CACHED):
            piece = array[start : start + CACHED]
            piece -= vectorised.decode_blocks(
                self._decode, scales[start // BLOCK :], codes[start // self.each :], len(piece), self.each
            )
        return payload

    def _parts(self, payload: memoryview, length: int) -> "tuple[Array, Array]":
        blocks = -(-length // BLOCK)
        if len(payload) != 4 * blocks - (-length // self.each):
            raise BadMessage(f"{len(payload)} bytes of {self.name} for {length} elements")
        scales = np.frombuffer(payload, "<f4", blocks)
        if not ((scales >= 0) & (scales < LARGEST)).all():  # a larger one makes infinite elements
            raise BadMessage(f"{self.name} with a scale that is no number from 0 to 2^114")
        return scales, np.frombuffer(payload, self.code, offset=4 * blocks)
