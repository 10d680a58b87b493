"""q4: an eighth of the bytes of fp32, with error feedback.

In blocks of 256 elements with the largest absolute value m an element is a sign and a level L: 0 if its absolute value
is below 2^-6.5 m, else the number from 1 to 7 for which 2^(L - 7) m is logarithmically nearest. The loss is added to
the next contribution.
"""

from typing import TYPE_CHECKING

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.codecs.int8 import in_blocks
from geomx_cli.ps.net.wire import BadMessage

if TYPE_CHECKING:
    from geomx_cli.ps.net.payload import Array

__all__ = ["codec"]

name = "q4"
_BLOCK = 256
_BOUNDS = (2.0 ** (np.arange(7) - 6.5)).astype(np.float32)
"""Relative to m: from which magnitude on an element has the level 1, 2, ... 7."""
_VALUES = np.concatenate([[0], 2.0 ** np.arange(-6, 1), [0], -(2.0 ** np.arange(-6, 1))]).astype(np.float32)
"""What a code stands for, relative to m: the level, and 8 for a negative sign."""


def codec(argument: str) -> "Q4":
    """Takes no argument."""
    if argument:
        raise InvalidSettings(f"q4:{argument}: q4 takes no argument", "write q4")
    return Q4()


class Q4:
    """The payload: m of each block as little-endian fp32, then two codes per byte, the first one in its low bits."""

    decay = 1.0
    momentum = 0.0
    results = "changes"

    def encode(self, array: "Array") -> memoryview:
        """See Codec."""
        blocks = in_blocks(array, _BLOCK)
        peaks = np.maximum(blocks.max(axis=1), -blocks.min(axis=1))
        magnitude = np.abs(blocks)
        magnitude /= np.where(peaks == 0, 1, peaks)[:, None]
        # The bounds between levels are at half powers of two, so the exponent of magnitude * sqrt(2) gives the level.
        exponent = (magnitude * np.float32(2**0.5)).view(np.int32) >> 23
        codes = np.clip(exponent - 127 + 7, 0, 7).astype(np.uint8)
        codes |= (blocks < 0).view(np.uint8) * np.uint8(8)
        codes = codes.reshape(-1)[: len(array) + len(array) % 2]
        packed = codes[::2] | (codes[1::2] << 4)
        return memoryview(peaks.astype("<f4").tobytes() + packed.tobytes())

    def decode(self, payload: memoryview, length: int) -> "Array":
        """See Codec."""
        count, size = -(-length // _BLOCK), -(-length // 2)
        if len(payload) != 4 * count + size:
            raise BadMessage(f"{len(payload)} bytes of q4 for {length} elements")
        peaks = np.frombuffer(payload, "<f4", count)
        if not (np.isfinite(peaks) & (peaks >= 0)).all():
            raise BadMessage("q4 with a scale that is no finite number from 0")
        packed = np.frombuffer(payload, np.uint8, size, 4 * count)
        codes = np.empty(2 * size, np.uint8)
        codes[::2], codes[1::2] = packed & 15, packed >> 4
        array: Array = _VALUES[codes][:length]
        array *= np.repeat(peaks, _BLOCK)[:length]
        return array
