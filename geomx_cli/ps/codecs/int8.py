"""int8: a quarter of the bytes of fp32, with error feedback.

In blocks of 256 elements the largest absolute value m becomes 127: with s = m / 127 an element x is sent as
round(x / s), to nearest even, and decoded as that number times s, all computed in fp32. The loss is added to the next
contribution.
"""

from typing import TYPE_CHECKING

import numpy as np

from geomx_cli.ps.aggregation.codec import LARGEST, Codec, no_argument
from geomx_cli.ps.codecs import _kernels
from geomx_cli.ps.codecs._compiled import compiled
from geomx_cli.ps.codecs._kernels import BLOCK
from geomx_cli.ps.net.wire import BadMessage

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array

__all__ = ["codec"]

name = "int8"


def codec(argument: str) -> "Int8":
    """Takes no argument. Raises InvalidSettings."""
    no_argument(name, argument)
    return Int8()


class Int8(Codec):
    """The payload: m / 127 of each block as little-endian fp32, then the elements as int8."""

    decay = 1.0
    results = "changes"
    ratio = 4.0
    keeps_weights = True

    def __init__(self) -> None:
        self._encode = _kernels.int8_encode

    def prepare(self) -> None:
        """See Codec."""
        self._encode = compiled(_kernels.int8_encode)

    def encode(self, array: "Array") -> memoryview:
        """See Codec."""
        count = -(-len(array) // BLOCK)
        payload = np.empty(4 * count + len(array), np.uint8)
        steps, codes = payload[: 4 * count].view("<f4"), payload[4 * count :].view(np.int8)
        _kernels.encode_blocks(self._encode, array.astype(np.float32, copy=False), steps, codes, 1)
        return payload.data

    def decode(self, payload: memoryview, length: int) -> "Array":
        """See Codec."""
        count = -(-length // BLOCK)
        if len(payload) != 4 * count + length:
            raise BadMessage(f"{len(payload)} bytes of int8 for {length} elements")
        steps = np.frombuffer(payload, "<f4", count)
        if not ((steps >= 0) & (steps < LARGEST)).all():  # a larger one makes infinite elements
            raise BadMessage("int8 with a scale that is no number from 0 to 2^120")
        array = np.frombuffer(payload, np.int8, length, 4 * count).astype(np.float32)
        whole = length - length % BLOCK
        array[:whole].reshape(-1, BLOCK)[:] *= steps[: whole // BLOCK, None]
        array[whole:] *= steps[-1] if count else 1
        return array
