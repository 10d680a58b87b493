"""Named arrays as one run of bytes, sent in pieces and validated before use.

The format is the length of an index (8 bytes, little endian), the index (msgpack: name, dtype and size of each array),
and the arrays' contents, concatenated.
"""

import bisect
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Array

__all__ = ["PIECE", "SerializedArrays", "deserialize", "digest"]

PIECE = 2 * 2**20
"""Bytes in a piece: a long one would keep whatever else two processes say waiting."""

_DTYPES = ("<i8", "<f4", "<f8")
_PREFIX = 8
_ENTRY = 96  # bytes of an array in the index, at most: names are short
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[tuple[str, str, int]])


class SerializedArrays:
    """1-D arrays of int64, float32 or float64, `size` bytes in all. The arrays must not change while in use."""

    def __init__(self, named: Mapping[str, Array]) -> None:
        arrays = [np.ascontiguousarray(array) for array in named.values()]
        index = _encoder.encode([(n, a.dtype.str, a.size) for n, a in zip(named, arrays, strict=True)])
        parts: list[Any] = [len(index).to_bytes(_PREFIX, "little"), index, *(array.data for array in arrays)]
        self._parts = [memoryview(part).cast("B") for part in parts]
        self._starts = list(itertools.accumulate(map(len, self._parts), initial=0))
        self.size = self._starts[-1]

    def piece(self, start: int) -> bytes:
        """The bytes from `start` on, at most PIECE."""
        found, end = bytearray(), min(start + PIECE, self.size)
        at = start
        while at < end:
            number = bisect.bisect_right(self._starts, at) - 1
            part = self._parts[number][at - self._starts[number] :][: end - at]
            found += part
            at += len(part)
        return bytes(found)

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """The offset and bytes of each piece."""
        for start in range(0, self.size, PIECE):
            yield start, self.piece(start)

    def digest(self) -> str:
        """The SHA-256 of the whole archive, as `digest` computes it."""
        found = hashlib.sha256()
        for part in self._parts:
            found.update(part)
        return found.hexdigest()


def digest(run: bytes | bytearray) -> str:
    """The SHA-256 of a whole archive."""
    return hashlib.sha256(run).hexdigest()


def deserialize(run: bytes | bytearray, most: int | None = None) -> dict[str, Array]:
    """The arrays of a whole archive, sharing its memory. Raises InvalidSettings if it is malformed, or of more than
    `most` arrays.
    """
    end = _PREFIX + int.from_bytes(run[:_PREFIX], "little")
    if most is not None and end - _PREFIX > most * _ENTRY + _PREFIX:
        raise InvalidSettings(f"state with an index of {end - _PREFIX} bytes: there are at most {most} arrays")
    try:
        index = _decoder.decode(memoryview(run)[_PREFIX:end])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"state that cannot be read: {error}") from None
    if not all(dtype in _DTYPES and size >= 0 for _, dtype, size in index):
        raise InvalidSettings("state with arrays of other dtypes than int64, float32 and float64")
    sizes = [np.dtype(dtype).itemsize * size for _, dtype, size in index]
    if end + sum(sizes) != len(run):
        raise InvalidSettings(f"state of {len(run)} bytes, which its index does not describe")
    named, offset = {}, end
    for (name, dtype, size), length in zip(index, sizes, strict=True):
        named[name] = np.frombuffer(run, dtype, size, offset)
        offset += length
    return named
