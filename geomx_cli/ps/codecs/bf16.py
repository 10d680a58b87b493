"""bf16: half the bytes of fp32, with its range and 8 significant bits.

Every element is rounded to nearest even; there is no residual. fp16 is more accurate for gradients.
"""

from typing import TYPE_CHECKING

import numpy as np

from geomx_cli.ps.aggregation.codec import Codec, no_argument
from geomx_cli.ps.kernels import vectorised
from geomx_cli.ps.kernels.loops import compiled
from geomx_cli.ps.net.wire import BadMessage

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array

__all__ = ["codec"]

name = "bf16"


def codec(argument: str) -> "Bf16":
    """Takes no argument. Raises InvalidSettings."""
    no_argument(name, argument)
    return Bf16()


class Bf16(Codec):
    """The payload: the upper halves of the elements as fp32, little-endian."""

    results = "values"
    ratio = 2.0
    keeps_weights = True

    def __init__(self) -> None:
        self._encode = vectorised.bf16_encode

    def prepare(self) -> None:
        """See Codec."""
        self._encode = compiled(vectorised.bf16_encode)

    def encode(self, array: "Array") -> memoryview:
        """See Codec."""
        with np.errstate(over="ignore"):
            single = array.astype("<f4", copy=False)
        halves = np.empty(len(single), "<u2")
        self._encode(single, halves)
        if np.isnan(single.max(initial=0)):  # rounding may have turned NaN into another value
            halves[np.isnan(single)] = 0x7FC0
        return memoryview(halves.data).cast("B")

    def decode(self, payload: memoryview, length: int) -> "Array":
        """See Codec."""
        if len(payload) != 2 * length:
            raise BadMessage(f"{len(payload)} bytes of bf16 for {length} elements")
        bits = np.frombuffer(payload, "<u2").astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
