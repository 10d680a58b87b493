"""topk:RATIO[,VALUES]: only the largest elements, with error feedback (Stich et al., arXiv:1809.07599).

Of n elements the ceil(RATIO n) of largest magnitude are sent, their indices as gaps of one or two bytes, their values
by the codec VALUES (fp16, the default, bf16, int8, q4) or unencoded (fp32). All others are added to the next
contribution.
"""

import math
from typing import TYPE_CHECKING

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.codecs import bf16, fp16, int8, q4
from geomx_cli.ps.codecs._sparse import decode_indices, encode_indices, largest
from geomx_cli.ps.net.wire import BadMessage

if TYPE_CHECKING:
    from geomx_cli.ps.aggregation.compression import Codec
    from geomx_cli.ps.net.payload import Array

__all__ = ["TopK", "codec"]

name = "topk"
_COUNT = np.dtype("<u4")
_VALUES = {"fp16": fp16, "bf16": bf16, "int8": int8, "q4": q4, "fp32": None}


def codec(argument: str) -> "TopK":
    """RATIO[,VALUES]; a plus may replace the comma."""
    return TopK(argument, "topk")


class TopK:
    """The payload: the number of elements as uint32, the indices, the values."""

    decay = 1.0
    momentum = 0.0
    results = "changes"

    def __init__(self, argument: str, what: str) -> None:
        ratio, _, values = argument.replace("+", ",").partition(",")
        try:
            self._ratio = float(ratio)
        except ValueError:
            self._ratio = 0.0
        if not 0 < self._ratio <= 1:
            raise InvalidSettings(f"{what}:{argument}: {ratio!r} is no ratio", f"write {what}:0.01 for 1 %")
        if (values or "fp16") not in _VALUES:
            raise InvalidSettings(f"{what}:{argument}: no values of {values!r}", f"choose from {', '.join(_VALUES)}")
        made = _VALUES[values or "fp16"]
        self._values: Codec | None = None if made is None else made.codec("")

    def encode(self, array: "Array") -> memoryview:
        """See Codec."""
        chosen = largest(array, math.ceil(len(array) * self._ratio))
        values = array[chosen].astype(np.float32, copy=False)
        encoded = values.astype("<f4").tobytes() if self._values is None else self._values.encode(values)
        head = np.array([len(chosen)], _COUNT).tobytes()
        return memoryview(head + encode_indices(chosen, len(array)).tobytes() + bytes(encoded))

    def decode(self, payload: memoryview, length: int) -> "Array":
        """See Codec."""
        if len(payload) < _COUNT.itemsize:
            raise BadMessage(f"{len(payload)} bytes of {length} sparse elements")
        count = int(np.frombuffer(payload, _COUNT, 1)[0])
        if count > length:
            raise BadMessage(f"{count} of {length} elements")
        indices, rest = decode_indices(payload[_COUNT.itemsize :], count, length)
        array = np.zeros(length, np.float32)
        if self._values is not None:
            array[indices] = self._values.decode(rest, count)
        elif len(rest) != 4 * count:
            raise BadMessage(f"{len(rest)} bytes of {count} values")
        else:
            array[indices] = np.frombuffer(rest, "<f4")
        return array
