"""1bit:T: one bit per element upwards, with error feedback; results are not encoded.

r = r + g; an element is decoded as 1 if r > T, else as -1, and the decoded value is subtracted from r, which is kept
(MXNet 2's formula; Seide et al., Interspeech 2014). T defaults to 0.
"""

from typing import TYPE_CHECKING

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.aggregation.codec import Codec
from geomx_cli.ps.net.wire import BadMessage

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array

__all__ = ["codec"]

name = "1bit"


def codec(argument: str) -> "OneBit":
    """The threshold, by default 0. Raises InvalidSettings."""
    try:
        with np.errstate(over="ignore"):  # refused below
            threshold = np.float32(argument or 0)
    except ValueError:
        threshold = np.float32(np.nan)
    if not np.isfinite(threshold):
        raise InvalidSettings(f"1bit:{argument}: {argument!r} is no threshold", "write 1bit:0")
    return OneBit(threshold)


class OneBit(Codec):
    """The payload: eight elements per byte, the first one in its highest bit; 1 is 1, 0 is -1."""

    decay = 1.0
    results = "exact"

    def __init__(self, threshold: "np.float32") -> None:
        self._threshold = threshold

    def encode(self, array: "Array") -> memoryview:
        """See Codec."""
        return memoryview(np.packbits(array > self._threshold).data)

    def decode(self, payload: memoryview, length: int) -> "Array":
        """See Codec."""
        if len(payload) != -(-length // 8):
            raise BadMessage(f"{len(payload)} bytes of 1bit for {length} elements")
        bits = np.unpackbits(np.frombuffer(payload, np.uint8), count=length)
        array = bits.astype(np.float32)
        array *= 2
        array -= 1
        return array
