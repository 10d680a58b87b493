"""2bit:T: two bits per element upwards, with error feedback, like MXNet 1.9.1; results are not encoded.

r = r + g. An element is decoded as T if r >= T, as -T if r <= -T, otherwise as 0. The decoded value is subtracted from
r, which is kept.
"""

from typing import TYPE_CHECKING

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.units import plain_number
from geomx_cli.ps.aggregation.codec import Codec
from geomx_cli.ps.net.wire import BadMessage

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array

__all__ = ["codec", "threshold_of"]

name = "2bit"


def codec(argument: str) -> "TwoBit":
    """The threshold, by default 0.5. Raises InvalidSettings."""
    return TwoBit(threshold_of(argument, name))


def threshold_of(argument: str, what: str) -> "np.float32":
    """Parse a threshold argument. Raises InvalidSettings."""
    try:
        with np.errstate(over="ignore"):  # refused below
            threshold = np.float32(plain_number(argument) or 0.5)
    except ValueError:
        threshold = np.float32(0)
    if not 0 < threshold < np.inf:
        raise InvalidSettings(f"{what}:{argument}: {argument!r} is no threshold", f"write {what}:0.5")
    return threshold


class TwoBit(Codec):
    """The payload: four elements per byte, the first one in its lowest bits; 1 is T, 2 is -T."""

    decay = 1.0
    results = "exact"

    def __init__(self, threshold: "np.float32") -> None:
        levels = np.array([0, threshold, -threshold, 0], np.float32)
        codes = np.arange(256)[:, None] >> np.array([0, 2, 4, 6]) & 3
        self._fours = levels[codes].view(np.complex128).reshape(-1)  # the four elements that a byte stands for
        self._threshold = threshold

    def encode(self, array: "Array") -> memoryview:
        """See Codec."""
        codes = np.zeros(-(-len(array) // 4) * 4, np.uint8)
        negative = codes[: len(array)]
        np.less_equal(array, -self._threshold, out=negative.view(np.bool_))
        negative += negative
        negative |= (array >= self._threshold).view(np.uint8)
        fours = codes.view("<u4")
        pairs = fours | fours >> 6
        return memoryview((pairs | pairs >> 12).astype(np.uint8).data)

    def decode(self, payload: memoryview, length: int) -> "Array":
        """See Codec."""
        if len(payload) != -(-length // 4):
            raise BadMessage(f"{len(payload)} bytes of 2bit for {length} elements")
        packed = np.frombuffer(payload, np.uint8)
        if (packed & packed >> 1 & 0b01010101).any():
            raise BadMessage("2bit with a code of 3")
        found: Array = self._fours[packed].view(np.float32)[:length]
        return found
