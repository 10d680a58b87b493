"""Sparse codecs: selecting the largest elements and encoding their indices."""

from typing import TYPE_CHECKING, Any

import numpy as np

from geomx_cli.ps.net.wire import BadMessage

if TYPE_CHECKING:
    from geomx_cli.ps.net.payload import Array

__all__ = ["decode_indices", "encode_indices", "largest"]

_SAMPLES = 16_384
"""Elements whose magnitudes give a first bound, so that not all have to be ordered."""


def largest(array: "Array", count: int) -> "Array":
    """The indices of the `count` elements of largest magnitude, ascending; ties go to the first."""
    if count >= len(array):
        return np.arange(len(array))
    magnitude = np.abs(array)
    step = len(array) // _SAMPLES
    if step > 1:
        sample = magnitude[::step]
        wanted = int(len(sample) * count / len(array) * 1.25) + 32
        if wanted < len(sample):
            bound = np.partition(sample, len(sample) - wanted)[len(sample) - wanted]
            found = np.flatnonzero(magnitude >= bound)
            if len(found) >= count:
                return np.asarray(found[_largest(magnitude[found], count)])
    return _largest(magnitude, count)


def _largest(magnitude: "Array", count: int) -> "Array":
    bound = np.partition(magnitude, len(magnitude) - count)[len(magnitude) - count]
    taken = magnitude > bound
    taken[np.flatnonzero(magnitude == bound)[: count - np.count_nonzero(taken)]] = True
    return np.flatnonzero(taken)


def encode_indices(indices: "Array", length: int) -> "Array":
    """Encode ascending indices as the gaps between them, in uint8, or uint16 if the mean gap is long.

    A gap of at least the maximum takes several numbers: each maximum adds itself, the first smaller number ends the
    gap.
    """
    dtype = _dtype(len(indices), length)
    limit = int(np.iinfo(dtype).max)
    gaps = np.diff(indices, prepend=-1) - 1
    long = gaps // limit
    ends = np.cumsum(long + 1) - 1
    encoded = np.full(int(ends[-1]) + 1 if len(ends) else 0, limit, dtype)
    encoded[ends] = gaps - long * limit
    return encoded


def decode_indices(payload: memoryview, count: int, length: int) -> "tuple[Array, memoryview]":
    """Decode the first `count` indices of a payload, all below `length`; returns them and the rest. Raises BadMessage.
    """
    dtype = _dtype(count, length)
    limit = int(np.iinfo(dtype).max)
    encoded = np.frombuffer(payload[: len(payload) // dtype.itemsize * dtype.itemsize], dtype)
    encoded = encoded[: count + length // limit + 1]
    ends = np.flatnonzero(encoded != limit)[:count]
    if len(ends) < count:
        raise BadMessage(f"{len(ends)} indices where there should be {count}")
    if not count:
        return ends, payload
    last = int(ends[-1]) + 1
    indices = np.cumsum(encoded[:last], dtype=np.int64)[ends] + np.arange(count)
    if indices[-1] >= length:
        raise BadMessage(f"index {indices[-1]} in a slice of {length} elements")
    return indices, payload[last * dtype.itemsize :]


def _dtype(count: int, length: int) -> "np.dtype[Any]":
    return np.dtype("<u2") if length > 300 * max(count, 1) else np.dtype("u1")
