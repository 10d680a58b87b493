"""Sparse codecs: selecting the largest elements and encoding their indices."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from geomx_cli.ps.aggregation.codec import Codec
from geomx_cli.ps.kernels import vectorised
from geomx_cli.ps.kernels.loops import compiled
from geomx_cli.ps.kernels.vectorised import GROUPS
from geomx_cli.ps.net.wire import BadMessage

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array

__all__ = ["SelectingCodec", "decode_indices", "encode_indices", "largest_of_rows", "reaching"]

_STEP = 32
"""A sample (one of so many elements) gives a first bound on magnitudes, so that few elements have to be ordered."""


def reaching(array: "Array", bound: "float | np.float32") -> "Array":
    """The indices, int64, of the elements of a 1-D array without NaN whose magnitude is at least `bound`, ascending."""
    return np.flatnonzero(np.abs(array) >= bound)


def largest_of_rows(array: "Array", length: int, count: int) -> "Array":
    """The indices, int64, of the `count` elements of largest magnitude of each row, ascending; ties go to the first.
    The array, 1-D and without NaN, has rows of `length` elements, at least twice as many as `count`.

    At least `count` elements of a row reach the `count`th largest of the maxima of disjoint groups, and few more do.
    Ordering maxima and these elements takes less time than ordering the row.
    """
    magnitude, groups = np.abs(array.reshape(-1, length)), GROUPS * count
    number, each = len(magnitude), length // groups
    bound = _nth_largest(magnitude[:, : each * groups].reshape(number, each, groups).max(axis=1), count)
    found = np.flatnonzero(magnitude >= bound[:, None])
    counts = np.diff(np.searchsorted(found, np.arange(0, number * length + 1, length)))
    present = np.arange(counts.max(initial=count)) < counts[:, None]
    candidates = np.full(present.shape, -1, array.dtype)
    candidates[present] = magnitude.reshape(-1)[found]
    return np.asarray(found[_largest(candidates, count)[present]])


def _largest(magnitude: "Array", count: int) -> "Array":
    """Which elements are the `count` largest of the last axis; of equal ones the first."""
    bound = _nth_largest(magnitude, count)[..., None]
    taken: Array = magnitude >= bound
    if np.count_nonzero(taken) > taken.size // taken.shape[-1] * count:
        tied = magnitude == bound
        spare = count - np.count_nonzero(magnitude > bound, axis=-1, keepdims=True)
        taken &= ~tied | (np.cumsum(tied, axis=-1) <= spare)
    return taken


def _nth_largest(magnitude: "Array", count: int) -> "Array":
    place = magnitude.shape[-1] - count
    found: Array = np.partition(magnitude, place)[..., place]
    return found


class SelectingCodec(Codec):
    """A codec that sends some elements. Subtracting them takes no pass over all elements."""

    _reaching = staticmethod(reaching)

    def prepare(self) -> None:
        """See Codec."""
        self._reaching = compiled(reaching)
        self.accumulate = compiled(vectorised.accumulate)

    @abstractmethod
    def select(self, array: "Array") -> "tuple[memoryview, Array, Array]":
        """Encode an array. Returns the payload, and the indices and values to which it is decoded."""

    def encode(self, array: "Array") -> memoryview:
        """See Codec."""
        return self.select(array)[0]

    def largest(self, array: "Array", count: int) -> "Array":
        """The indices, int64, of the `count` elements of largest magnitude of a 1-D array of float32 or float64 without
        NaN, ascending; ties go to the first.
        """
        length = len(array)
        if count >= length:
            return np.arange(length)
        sample = np.abs(array[::_STEP])
        expected = count * len(sample) / length
        wanted = int(expected + 4 * expected**0.5) + 8  # so that the bound is almost never too high
        if wanted < len(sample):
            bound = _nth_largest(sample, wanted)
            if array.dtype == np.float32:
                found = self._reaching(array, np.float32(bound))
            else:
                found = reaching(array, float(bound))
            if len(found) >= count:
                return np.asarray(found[_largest(np.abs(array[found]), count)])
        return np.flatnonzero(_largest(np.abs(array), count))

    def extract(self, array: "Array", momentum: "Array | None" = None) -> memoryview:
        """See Codec."""
        payload, indices, sent = self.select(array)
        array[indices] -= sent
        if momentum is not None:
            momentum[indices[sent != 0]] = 0
        return payload


def encode_indices(indices: "Array", length: int) -> "Array":
    """Encode ascending indices as the gaps between them, in uint8, or uint16 if the mean gap is long.

    A gap of at least the maximum takes several numbers. Each maximum adds itself, and the first smaller number ends the
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
