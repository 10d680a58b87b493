"""A subset of the rows of a slice or tensor: how row-sparse arrays are sent and added."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from geomx_cli.ps.arrays import Array

__all__ = ["Rows"]


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
        """The sum; a row that only one operand has is taken from it."""
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
        """These rows and zeros for those of `numbers` (ascending) that are missing."""
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
