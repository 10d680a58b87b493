"""Converts arrays and rows to payloads in the slice's dtype and back, with the header fields that describe them."""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from geomx_cli.ps.arrays import Array
from geomx_cli.ps.net.wire import DTYPE_NAMES, BadMessage, DamagedPayload, Form, Header

__all__ = [
    "Content", "DTYPES", "Rows", "as_payload", "cast", "content", "digest", "dtype_of", "form_of",
    "numbers_payload", "row_numbers", "sum_payload", "view",
]  # fmt: skip

# A subset of the rows of a slice or tensor: how row-sparse arrays are sent and added.


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """`values` (2-D, one row per number) of the rows `numbers` (1-D integers, strictly increasing). Both are read-only.
    """

    numbers: Array
    values: Array

    @classmethod
    def none(cls, row: int, dtype: "np.dtype[Any] | type") -> "Rows":
        """No rows, of `row` elements each."""
        return cls(np.empty(0, np.uint32), np.empty((0, row), dtype))

    @classmethod
    def of(cls, array: Array, row: int, numbers: Array) -> "Rows":
        """Copies of these rows of a 1-D array."""
        return cls(numbers, array.reshape(-1, row)[numbers])

    @classmethod
    def ordered(cls, numbers: Array, values: Array) -> "Rows":
        """Sort rows; those with equal numbers are added in the given order."""
        if len(numbers) < 2 or bool((numbers[1:] > numbers[:-1]).all()):
            return cls(numbers, values)
        found, places = np.unique(numbers, return_inverse=True)
        total = np.zeros((len(found), values.shape[1]), values.dtype)
        np.add.at(total, places, values)
        return cls(found, total)

    @property
    def row(self) -> int:
        """Elements in a row."""
        return int(self.values.shape[1])

    def __len__(self) -> int:
        return len(self.numbers)

    def astype(self, dtype: "np.dtype[Any] | type") -> "Rows":
        """The same rows in another dtype; without a copy if they have it already."""
        return self if self.values.dtype == dtype else Rows(self.numbers, self.values.astype(dtype))

    def cut(self, first: int, last: int) -> "Rows":
        """The rows `first` to `last` - 1, renumbered from `first`; views if possible."""
        start, end = np.searchsorted(self.numbers, (first, last))
        return Rows(self.numbers[start:end] - first, self.values[start:end])

    def plus(self, other: "Rows") -> "Rows":
        """The sum. A row that only one operand has is copied."""
        numbers = np.union1d(self.numbers, other.numbers)
        total = self.among(numbers)
        total[np.searchsorted(numbers, other.numbers)] += other.values
        return Rows(numbers, total)

    def among(self, numbers: Array) -> Array:
        """A new array of the rows `numbers`, a superset of these; the others are zero."""
        found = np.zeros((len(numbers), self.row), self.values.dtype)
        found[np.searchsorted(numbers, self.numbers)] = self.values
        return found

    def with_zeros(self, numbers: Array) -> "Rows":
        """These rows, and rows of zeros for the missing ones of `numbers` (ascending)."""
        both = np.union1d(self.numbers, numbers)
        return Rows(both, self.among(both))

    def not_zero(self, array: Array) -> Array:
        """The numbers of the rows of a 1-D array that are not zero."""
        return np.flatnonzero(array.reshape(-1, self.row).any(axis=1))

    def dense(self, length: int) -> Array:
        """A new 1-D array of `length` elements; missing rows are zero."""
        found = np.zeros(length, self.values.dtype)
        found.reshape(-1, self.row)[self.numbers] = self.values
        return found

    def write_to(self, array: Array) -> None:
        """Overwrite these rows of a 1-D array; values too large for its dtype become infinite."""
        with np.errstate(over="ignore"):
            array.reshape(-1, self.row)[self.numbers] = self.values


Content = Array | Rows

DTYPES: tuple[np.dtype[Any], ...] = tuple(np.dtype(name) for name in DTYPE_NAMES)
"""The dtypes of slices, in the order of their codes."""
_ROW_NUMBER = np.dtype("uint32")
_WIDE = {np.dtype("float16"): np.dtype("float32")}


def cast(array: Array, dtype: int) -> Array:
    """`array` in the slice's dtype. Values too large for fp16 become infinite; the training code has to handle that."""
    if array.dtype == DTYPES[dtype]:
        return array
    with np.errstate(over="ignore"):
        return array.astype(DTYPES[dtype])


def digest(payload: memoryview, dtype: int) -> bytes:
    """The BLAKE2b digest of the dtype and of these bytes of elements."""
    return blake2b(payload, digest_size=16, person=DTYPE_NAMES[dtype].encode()).digest()


def form_of(content: Content) -> dict[str, Any]:
    """The header fields that describe this content."""
    return {"form": Form.ROWS, "rows": len(content)} if isinstance(content, Rows) else {}


def as_payload(content: Content, dtype: int) -> memoryview:
    """The bytes in the slice's dtype; no copy if the array has that dtype already."""
    if isinstance(content, Rows):
        return _packed(Rows(content.numbers, cast(content.values, dtype)))
    return memoryview(cast(content, dtype).data).cast("B")


def numbers_payload(numbers: Array) -> memoryview:
    """The bytes of row numbers."""
    return memoryview(numbers.astype(_ROW_NUMBER).tobytes())


def sum_payload(content: Content, dtype: int) -> tuple[memoryview, bool]:
    """The bytes of a party's sum, and whether they are wider than the slice's dtype.

    A sum of fp16 arrays is sent in fp32 unless fp16 holds it exactly. There are two reasons: it may overflow although
    the sum over all parties does not, and rounding it would make two levels differ from one.
    """
    array = content.values if isinstance(content, Rows) else content
    narrow = cast(array, dtype)
    wide = narrow.dtype == np.float16 and not np.array_equal(narrow, array)
    chosen = array if wide else narrow
    if isinstance(content, Rows):
        return _packed(Rows(content.numbers, chosen)), wide
    return memoryview(chosen.data).cast("B"), wide


def _packed(rows: Rows) -> memoryview:
    return memoryview(rows.values.tobytes() + rows.numbers.astype(_ROW_NUMBER).tobytes())


def view(header: Header, payload: memoryview | None) -> Array:
    """The payload as a read-only 1-D array of `length` elements. Raises BadMessage if the sizes disagree."""
    dtype = dtype_of(header)
    if header.form != Form.FULL:
        raise BadMessage(f"a payload of form {header.form.name} where all elements are needed")
    if payload is None or len(payload) != header.length * dtype.itemsize:
        size = 0 if payload is None else len(payload)
        raise DamagedPayload(f"{size} bytes of payload for {header.length} elements of {dtype}")
    return np.frombuffer(payload, dtype)


def content(header: Header, payload: memoryview | None) -> Content:
    """The payload as a 1-D array as from `view`, or as read-only rows. Raises BadMessage for wrong sizes or row
    numbers.
    """
    if header.form != Form.ROWS:
        return view(header, payload)
    dtype, count = dtype_of(header), header.rows * header.row
    size = 0 if payload is None else len(payload)
    if size != count * dtype.itemsize + header.rows * _ROW_NUMBER.itemsize:
        raise DamagedPayload(f"{size} bytes of payload for {header.rows} rows of {header.row} elements of {dtype}")
    if payload is None:
        return Rows.none(header.row, dtype)
    values = np.frombuffer(payload, dtype, count).reshape(header.rows, header.row)
    return Rows(_numbers(header, payload[count * dtype.itemsize :]), values)


def row_numbers(header: Header, payload: memoryview | None) -> Array | None:
    """The row numbers of a PULL of rows; None for a PULL of all elements. Raises BadMessage if they are invalid."""
    size = 0 if payload is None else len(payload)
    if size != header.rows * _ROW_NUMBER.itemsize:
        raise BadMessage(f"{size} bytes of payload for a PULL of {header.rows} rows")
    return _numbers(header, payload or memoryview(b"")) if header.form == Form.ROWS else None


def _numbers(header: Header, data: memoryview) -> Array:
    numbers = np.frombuffer(data, _ROW_NUMBER)
    if len(numbers) and (numbers[-1] >= header.length // header.row or not (numbers[1:] > numbers[:-1]).all()):
        raise BadMessage(f"row numbers that do not increase, or are not below {header.length // header.row}")
    return numbers


def dtype_of(header: Header, *, wide: bool = True) -> np.dtype[Any]:
    """The dtype of the payload's elements; without `wide` the slice's dtype."""
    dtype = DTYPES[header.dtype]
    return _WIDE.get(dtype, dtype) if wide and header.wide else dtype
