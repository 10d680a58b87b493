"""1bit[:T][,warmup=N]: one bit per element and two values per block, with error feedback.

In blocks of 1024 elements, the elements above T (by default 0) are sent as their mean, and the other elements as
theirs. This gives the least square error that one bit allows (Seide, Fu, Droppo, Li and Yu, "1-bit stochastic gradient
descent", Interspeech 2014). Means are computed in float64 and sent in fp32. The loss is added to the next contribution.

warmup: in the first N rounds of a tensor its elements are encoded by the codec q4, as 1-bit Adam (arXiv:2102.02888)
begins without compression: at this time training is least stable, and one bit per element adds the largest error.
"""

from typing import TYPE_CHECKING

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.units import plain_number
from geomx_cli.ps.aggregation.codec import Codec, with_numbers
from geomx_cli.ps.codecs.q4 import Q4
from geomx_cli.ps.kernels import vectorised
from geomx_cli.ps.kernels.loops import compiled
from geomx_cli.ps.kernels.vectorised import LARGE_BLOCK as BLOCK
from geomx_cli.ps.net.wire import BadMessage

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array

__all__ = ["codec"]

name = "1bit"


def codec(argument: str) -> "OneBit":
    """The threshold, by default 0, and the rounds of warm-up, see with_numbers. Raises InvalidSettings."""
    first, numbers = with_numbers(name, argument, warmup=0)
    try:
        with np.errstate(over="ignore"):  # refused below
            threshold = np.float32(plain_number(first) or 0)
    except ValueError:
        threshold = np.float32(np.nan)
    if not np.isfinite(threshold):
        raise InvalidSettings(f"1bit:{argument}: {first!r} is no threshold", "write 1bit:0")
    return OneBit(threshold, numbers["warmup"])


class OneBit(Codec):
    """The payload has, for each block, the mean of the elements not above T and the mean of the elements above T, as
    little-endian fp32. Then follow eight elements per byte, the first in the highest bit; the bit is 1 for an element
    above T.
    """

    decay = 1.0
    bears_momentum = False
    results = "changes"
    ratio = 30.0

    def __init__(self, threshold: "np.float32", warmup: int) -> None:
        self._threshold = threshold
        self._warmup = warmup
        self._first = Q4()
        self._means = vectorised.one_bit_means

    def prepare(self) -> None:
        """See Codec."""
        self._means = compiled(vectorised.one_bit_means)
        self.accumulate = compiled(vectorised.accumulate)
        if self._warmup:
            self._first.prepare()

    def at(self, size: int, round_: int) -> Codec:
        """See Codec."""
        return self if round_ > self._warmup else self._first

    def encode(self, array: "Array") -> memoryview:
        """See Codec."""
        blocks = -(-len(array) // BLOCK)
        payload = np.empty(8 * blocks + -(-len(array) // 8), np.uint8)
        means = payload[: 8 * blocks].view("<f4")
        above = array > self._threshold
        payload[8 * blocks :] = np.packbits(above)
        values = array.astype(np.float32, copy=False)
        whole = len(array) - len(array) % BLOCK
        self._means(values[:whole], above[:whole], whole, means[: 2 * (whole // BLOCK)])
        if whole < len(array):
            last, high = np.zeros(BLOCK, np.float32), np.zeros(BLOCK, np.bool_)
            last[: len(array) - whole], high[: len(array) - whole] = values[whole:], above[whole:]
            self._means(last, high, len(array) - whole, means[-2:])
        return payload.data

    def decode(self, payload: memoryview, length: int) -> "Array":
        """See Codec."""
        blocks = -(-length // BLOCK)
        if len(payload) != 8 * blocks + -(-length // 8):
            raise BadMessage(f"{len(payload)} bytes of 1bit for {length} elements")
        means = np.frombuffer(payload, "<f4", 2 * blocks)
        if not np.isfinite(means).all():
            raise BadMessage("1bit with a value that is not finite")
        array = np.empty(length, np.float32)
        vectorised.one_bit_decode(np.frombuffer(payload, np.uint8, offset=8 * blocks), means, array)
        return array
