"""fp16: half the bytes of fp32, without overflow or underflow.

A slice is multiplied by the power of two that brings its largest absolute value to between 2^14 and 2^15, and rounded
to nearest even. So every element within a factor of 2^28 of the largest keeps 11 significant bits, whatever its
magnitude. Smaller elements lose bits. Below 2^-39 of the largest they become 0. There is no residual: the rounding of a
round is independent of all others. Infinities and NaN are preserved.
"""

import math
from typing import TYPE_CHECKING

import numpy as np

from geomx_cli.ps.aggregation.codec import Codec, no_argument
from geomx_cli.ps.kernels import vectorised
from geomx_cli.ps.kernels.loops import compiled
from geomx_cli.ps.net.wire import BadMessage

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array

__all__ = ["codec"]

name = "fp16"
_EXPONENT = np.dtype("<i2")
_LIMIT = 126
"""Limits of the exponent: 2^126 and 2^-126 are normal numbers of fp32."""
_FAST = -14
"""The exponent from which on the kernels' factors are normal numbers."""
_INFINITY = 0x7C00


def codec(argument: str) -> "Fp16":
    """Takes no argument. Raises InvalidSettings."""
    no_argument(name, argument)
    return Fp16()


class Fp16(Codec):
    """The payload: the elements as little-endian fp16, then the exponent of the power of two as int16."""

    results = "values"
    ratio = 2.0
    keeps_weights = True

    def __init__(self) -> None:
        self._encode, self._decode = vectorised.fp16_encode, vectorised.fp16_decode

    def prepare(self) -> None:
        """See Codec."""
        self._encode, self._decode = compiled(vectorised.fp16_encode), compiled(vectorised.fp16_decode)

    def encode(self, array: "Array") -> memoryview:
        """See Codec."""
        exponent, finite = _exponent(array)
        payload = np.empty(2 * len(array) + _EXPONENT.itemsize, np.uint8)
        halves = payload[: 2 * len(array)].view("<f2")
        fast = array.dtype == np.float32 and finite and exponent >= _FAST
        if not (fast and self._encode(array, np.float32(2.0 ** (exponent - 112)), halves.view("<u2"))):
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
        halves = np.frombuffer(payload, "<i2", length)
        if exponent >= _FAST and (halves & 0x7FFF).max(initial=0) < _INFINITY:
            array = np.empty(length, np.float32)
            self._decode(halves, np.float32(2.0 ** (112 - exponent)), array)
            return array
        array = halves.view("<f2").astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):  # of NaN and infinities
            array *= np.float32(2.0**-exponent)
        return array


def _exponent(array: "Array") -> tuple[int, bool]:
    """The exponent of the power of two to multiply by, and whether all elements are finite."""
    if not len(array):
        return 0, True
    peak = max(float(array.max()), -float(array.min()))
    finite = math.isfinite(peak)
    largest = peak if finite else float(np.abs(array[np.isfinite(array)]).max(initial=0))
    return max(-_LIMIT, min(_LIMIT, 15 - math.frexp(largest)[1])) if largest else 0, finite
