"""fp16: half the bytes of fp32, without overflow or underflow.

A slice is multiplied by the power of two that brings its largest absolute value to between 2^14 and 2^15, and rounded
to nearest even. So every element within a factor of 2^28 of the largest keeps 11 significant bits, whatever its
magnitude; smaller ones lose bits, and below 2^-39 of the largest become 0. There is no residual: the rounding of a
round is independent of all others. Infinities and NaN are preserved.
"""

from typing import TYPE_CHECKING

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.net.wire import BadMessage

if TYPE_CHECKING:
    from geomx_cli.ps.net.payload import Array

__all__ = ["codec"]

name = "fp16"
_EXPONENT = np.dtype("<i2")
_LIMIT = 126
"""Of the exponent: 2^126 and 2^-126 are normal numbers of fp32."""


def codec(argument: str) -> "Fp16":
    """Takes no argument."""
    if argument:
        raise InvalidSettings(f"fp16:{argument}: fp16 takes no argument", "write fp16")
    return Fp16()


class Fp16:
    """The payload: the elements as little-endian fp16, then the exponent of the power of two as int16."""

    decay = 0.0
    momentum = 0.0
    results = "values"

    def encode(self, array: "Array") -> memoryview:
        """See Codec."""
        exponent = _exponent(array)
        payload = np.empty(2 * len(array) + _EXPONENT.itemsize, np.uint8)
        halves = payload[: 2 * len(array)].view("<f2")
        with np.errstate(over="ignore"):  # float64 values beyond the range of fp32
            np.multiply(array, array.dtype.type(2.0**exponent), out=halves, casting="same_kind")
        payload[2 * len(array) :].view(_EXPONENT)[0] = exponent
        return payload.data

    def decode(self, payload: memoryview, length: int) -> "Array":
        """See Codec."""
        if len(payload) != 2 * length + _EXPONENT.itemsize:
            raise BadMessage(f"{len(payload)} bytes of fp16 for {length} elements")
        exponent = int(np.frombuffer(payload[2 * length :], _EXPONENT)[0])
        if abs(exponent) > _LIMIT:
            raise BadMessage(f"fp16 with the exponent {exponent}")
        array = np.frombuffer(payload, "<f2", length).astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):  # of NaN and infinities
            array *= np.float32(2.0**-exponent)
        return array


def _exponent(array: "Array") -> int:
    """The exponent of the power of two to multiply by."""
    if not len(array):
        return 0
    peak = max(float(array.max()), -float(array.min()))
    if not np.isfinite(peak):
        finite = array[np.isfinite(array)]
        peak = float(np.abs(finite).max()) if len(finite) else 0.0
    return max(-_LIMIT, min(_LIMIT, 15 - int(np.frexp(peak)[1]))) if peak else 0
