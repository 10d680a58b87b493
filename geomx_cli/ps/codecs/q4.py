"""q4: an eighth of the bytes of fp32, with error feedback.

In blocks of 256 elements with the largest absolute value m an element is a sign and a level L: 0 if its absolute value
is below 2^-6.5 m, else the number from 1 to 7 for which 2^(L - 7) m is logarithmically nearest. The loss is added to
the next contribution.
"""

from typing import TYPE_CHECKING

import numpy as np

from geomx_cli.ps.aggregation.codec import Codec, no_argument
from geomx_cli.ps.codecs import _kernels
from geomx_cli.ps.codecs._compiled import compiled
from geomx_cli.ps.codecs._kernels import BLOCK
from geomx_cli.ps.net.wire import BadMessage

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array

__all__ = ["codec"]

name = "q4"


def codec(argument: str) -> "Q4":
    """Takes no argument. Raises InvalidSettings."""
    no_argument(name, argument)
    return Q4()


class Q4(Codec):
    """The payload: m of each block as little-endian fp32, then two codes per byte, the first one in its low bits."""

    decay = 1.0
    results = "changes"
    ratio = 8.0

    def __init__(self) -> None:
        self._encode, self._decode = _kernels.q4_encode, _kernels.q4_decode

    def prepare(self) -> None:
        """See Codec."""
        self._encode, self._decode = compiled(_kernels.q4_encode), compiled(_kernels.q4_decode)

    def encode(self, array: "Array") -> memoryview:
        """See Codec."""
        count, size = -(-len(array) // BLOCK), -(-len(array) // 2)
        payload = np.empty(4 * count + size, np.uint8)
        peaks, codes = payload[: 4 * count].view("<f4"), payload[4 * count :]
        _kernels.encode_blocks(self._encode, array.astype(np.float32, copy=False), peaks, codes, 2)
        return payload.data

    def decode(self, payload: memoryview, length: int) -> "Array":
        """See Codec."""
        count, size = -(-length // BLOCK), -(-length // 2)
        if len(payload) != 4 * count + size:
            raise BadMessage(f"{len(payload)} bytes of q4 for {length} elements")
        peaks = np.frombuffer(payload, "<f4", count)
        if not (np.isfinite(peaks) & (peaks >= 0)).all():
            raise BadMessage("q4 with a scale that is no finite number from 0")
        packed = np.frombuffer(payload, np.uint8, size, 4 * count)
        whole = length // BLOCK
        array = np.empty(count * BLOCK, np.float32)
        self._decode(packed[: whole * BLOCK // 2], peaks[:whole], array[: whole * BLOCK])
        if count > whole:
            last = np.zeros(BLOCK // 2, np.uint8)
            last[: size - whole * BLOCK // 2] = packed[whole * BLOCK // 2 :]
            self._decode(last, peaks[whole:], array[whole * BLOCK :])
        return array[:length]
