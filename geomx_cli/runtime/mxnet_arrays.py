"""MXNet's arrays on their way to and from the servers, dense or row-sparse: checked, summed, and one buffer per key.

Row-sparse arrays travel as the rows that they have; the servers hold every row.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from geomx_cli.errors import InvalidSettings
from geomx_cli.ps.rows import Rows
from geomx_cli.ps.wire import Array
from geomx_cli.runtime.kvstore import DTYPES, row_of

__all__ = ["Arrays", "is_sparse", "size_of"]

_FORMS = ("default", "row_sparse")


def is_sparse(array: Any) -> bool:
    """Whether it holds rows."""
    return bool(array.stype == "row_sparse")


def size_of(array: Any) -> int:
    """Elements of an array, with the rows that a row-sparse one leaves out."""
    return math.prod(array.shape)


class Arrays:
    """The arrays of one store. For the training thread; what it computes, MXNet's engine does when it can.

    A key has one buffer for its whole life. It holds what is pushed until the result takes its place, so what a worker
    needs for its pushes is bounded by the model's size, however far the training thread is ahead of the network.
    """

    def __init__(self, mx: Any) -> None:
        self._mx = mx
        self._buffers: dict[str, Any] = {}

    def check(self, values: Iterable[Any]) -> None:
        """Raise InvalidSettings for what cannot travel."""
        for value in values:
            if not isinstance(value, self._mx.nd.NDArray):
                raise InvalidSettings(f"a {type(value).__name__} is no NDArray")
            if value.stype not in _FORMS or np.dtype(value.dtype).name not in DTYPES:
                what = value.stype if value.stype not in _FORMS else np.dtype(value.dtype).name
                hint = f"use a dense or row-sparse array of {', '.join(DTYPES)}"
                raise InvalidSettings(f"a value of {what} cannot travel", hint)

    def sum(self, values: Sequence[Any]) -> Any:
        """The devices' sum as a dense array; fp16 is added in fp32."""
        dense = [value.tostype("default") if is_sparse(value) else value for value in values]
        if len(dense) == 1:
            return dense[0]
        first, *others = (value.as_in_context(self._mx.cpu()) for value in dense)
        total = first.astype("float32") if first.dtype == np.float16 else first
        for other in others:
            total = total + other.astype(total.dtype)
        return total.astype(first.dtype, copy=False)

    def rows(self, values: Sequence[Any]) -> Rows:
        """The devices' sum of row-sparse arrays, in numpy; fp16 is added in fp32. Waits for the values.

        Raises InvalidSettings for a row that their shape does not have.
        """
        total: Rows | None = None
        for value in values:
            numbers, count = value.indices.asnumpy().astype(np.int64), value.shape[0]
            if len(numbers) and not 0 <= numbers.min() <= numbers.max() < count:
                raise InvalidSettings(f"rows {numbers.min()} to {numbers.max()} of an array that has {count}")
            held = value.data.asnumpy().reshape(len(numbers), row_of(value.shape))
            if len(values) > 1:
                held = held.astype(np.promote_types(held.dtype, np.float32), copy=False)
            rows = Rows.ordered(numbers, held)
            total = rows if total is None else total.plus(rows)
        assert total is not None
        with np.errstate(over="ignore"):
            return total.astype(np.dtype(values[0].dtype))

    def add(self, name: str, like: Any) -> None:
        """Make the buffer of a new key: dense, on the CPU, of the size and dtype of `like`. It takes no memory yet."""
        self._buffers[name] = self._mx.nd.empty(like.shape, self._mx.cpu(), like.dtype)

    def buffer(self, name: str) -> Any:
        """The key's buffer. Only copies may be computed into it: kernels leave layouts that only they can read."""
        return self._buffers[name]

    def fill(self, buffer: Any, values: Sequence[Any]) -> None:
        """Copy the devices' sum to a key's buffer."""
        self.sum(values).copyto(_shaped(buffer, values[0]))

    def deliver(self, buffer: Any, outs: Iterable[Any]) -> None:
        """Copy a result to all of `outs`; to a row-sparse one all rows that are not zero."""
        for out in outs:
            result = _shaped(buffer, out)
            (result.tostype("row_sparse") if is_sparse(out) else result).copyto(out)

    def numbers(self, rows: Any, out: Any) -> Array:
        """The numbers of rows to be pulled to `out`, ascending, each once. Waits for them.

        Raises InvalidSettings for one that `out` does not have.
        """
        numbers: Array = np.unique(rows.asnumpy().astype(np.int64))
        if len(numbers) and not 0 <= numbers[0] <= numbers[-1] < out.shape[0]:
            raise InvalidSettings(f"rows {numbers[0]} to {numbers[-1]} of an array that has {out.shape[0]}")
        return numbers

    def room(self, name: str, numbers: Array, out: Any) -> Any:
        """A new array for these rows of a key, as `out` has them."""
        return self._mx.nd.empty((len(numbers), *out.shape[1:]), self._mx.cpu(), self._buffers[name].dtype)

    def take(self, source: Any, numbers: Array, out: Any) -> Any:
        """These rows of a dense array of the key's size, as `out` has them."""
        return _shaped(source, out).take(self._mx.nd.array(numbers, self._mx.cpu(), np.int64))

    def deliver_rows(self, numbers: Array, values: Any, out: Any) -> None:
        """Make `out`, which is row-sparse, have the rows `values` of these numbers, and no others. Waits for them;
        None for no rows.
        """
        sparse = self._mx.nd.sparse
        if values is None:
            sparse.zeros("row_sparse", out.shape, self._mx.cpu(), out.dtype).copyto(out)
        else:
            rows = self._mx.nd.array(numbers, self._mx.cpu(), np.int64)
            sparse.row_sparse_array((values, rows), out.shape, self._mx.cpu(), out.dtype).copyto(out)


def _shaped(buffer: Any, like: Any) -> Any:
    """The buffer's memory with the shape of another array of the same size."""
    return buffer if buffer.shape == like.shape else buffer.reshape(like.shape)
