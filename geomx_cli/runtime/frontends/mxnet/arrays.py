"""Conversion of MXNet arrays for transfer, dense or row-sparse: checks, sums over devices, and a buffer per key.

Row-sparse arrays are sent as their stored rows; the servers hold every row.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.net.payload import Rows
from geomx_cli.ps.net.wire import FLOAT_NAMES
from geomx_cli.runtime.frontends.mxnet.native import ArrayInfo, Native
from geomx_cli.runtime.script.store import row_of

__all__ = ["Arrays"]

_FORMS = ("default", "row_sparse")


class Arrays:
    """The arrays of one store. For the training thread; computations are asynchronous in MXNet's engine.

    Each key has one persistent buffer for values and results that cannot be read or written in place; its memory is
    allocated at first use.
    """

    def __init__(self, mx: Any, native: Native) -> None:
        self._mx = mx
        self._native = native
        self._buffers: dict[str, ArrayInfo] = {}
        self._orders: dict[str, Any] = {}

    def values(self, arrays: Iterable[Any]) -> list[ArrayInfo]:
        """Return the ArrayInfo of each array; for arrays of `mx.np`, that of the NDArray with the same memory.

        Raises InvalidSettings for unsupported arrays.
        """
        found = []
        for array in arrays:
            try:
                value = self._native.value(array)
            except TypeError as error:
                raise InvalidSettings(str(error)) from None
            if value.form not in _FORMS or value.dtype not in FLOAT_NAMES:
                what = value.form if value.form not in _FORMS else value.dtype
                hint = f"use a dense or row-sparse array of {', '.join(FLOAT_NAMES)}"
                raise InvalidSettings(f"a value of {what} cannot travel", hint)
            found.append(value)
        return found

    def sum(self, values: Sequence[ArrayInfo]) -> Any:
        """Return the sum over devices as a dense array; fp16 is added in fp32."""
        dense = [value.array.tostype("default") if value.is_sparse else value.array for value in values]
        if len(dense) == 1:
            return dense[0]
        first, *others = (value.as_in_context(self._mx.cpu()) for value in dense)
        total = first.astype("float32") if first.dtype == np.float16 else first
        for other in others:
            total = total + other.astype(total.dtype)
        return total.astype(first.dtype, copy=False)

    def rows(self, values: Sequence[ArrayInfo]) -> Rows:
        """Return the sum of row-sparse arrays over devices, in numpy; fp16 is added in fp32. Waits for the values.

        Raises InvalidSettings for a row index outside their shape.
        """
        total: Rows | None = None
        for value in values:
            numbers, count = value.array.indices.asnumpy().astype(np.int64), value.shape[0]
            if len(numbers) and not 0 <= numbers.min() <= numbers.max() < count:
                raise InvalidSettings(f"rows {numbers.min()} to {numbers.max()} of an array that has {count}")
            held = value.array.data.asnumpy().reshape(len(numbers), row_of(value.shape))
            if len(values) > 1:
                held = held.astype(np.promote_types(held.dtype, np.float32), copy=False)
            rows = Rows.ordered(numbers, held)
            total = rows if total is None else total.plus(rows)
        assert total is not None
        with np.errstate(over="ignore"):
            return total.astype(np.dtype(values[0].dtype))

    def add(self, name: str, like: ArrayInfo) -> None:
        """Declare a new key's buffer: dense, on the CPU, with shape and dtype of `like`. Allocates no memory yet."""
        self._buffers[name] = self._native.value(self._mx.nd.empty(like.shape, self._mx.cpu(), like.dtype))
        self._orders[name] = self._mx.nd.empty((1,), self._mx.cpu())

    def order(self, name: str) -> Any:
        """Return the key's empty ordering array: writes to it are ordered after earlier reads."""
        return self._orders[name]

    def holds(self, name: str, value: ArrayInfo) -> bool:
        """Return whether the array's memory can hold a value of the key as transferred: dense, on the CPU, same dtype.

        If so, an operation queued next can `view` it.
        """
        fits = value.on_cpu and not value.is_sparse and value.dtype == self._buffers[name].dtype
        return fits and self._native.lay_out(value)

    def view(self, value: ArrayInfo) -> Array:
        """See Native.view."""
        return self._native.view(value.array, value.dtype, value.size)

    def buffer(self, name: str) -> ArrayInfo:
        """Return the key's buffer. Write to it only by copies: kernels may leave private layouts."""
        return self._buffers[name]

    def fill(self, buffer: ArrayInfo, values: Sequence[ArrayInfo]) -> None:
        """Copy the sum over devices to a key's buffer."""
        self.sum(values).copyto(_shaped(buffer.array, values[0]))

    def deliver(self, source: Any, outs: Iterable[ArrayInfo]) -> None:
        """Copy a result to all of `outs`; a row-sparse one gets all nonzero rows."""
        for out in outs:
            result = _shaped(source, out)
            (result.tostype("row_sparse") if out.is_sparse else result).copyto(out.array)

    def numbers(self, rows: Any, out: ArrayInfo) -> Array:
        """Return the row indices to pull to `out`, ascending and unique. Waits for them.

        Raises InvalidSettings for an index out of the range of `out`.
        """
        numbers: Array = np.unique(rows.asnumpy().astype(np.int64))
        if len(numbers) and not 0 <= numbers[0] <= numbers[-1] < out.shape[0]:
            raise InvalidSettings(f"rows {numbers[0]} to {numbers[-1]} of an array that has {out.shape[0]}")
        return numbers

    def room(self, name: str, numbers: Array, out: ArrayInfo) -> ArrayInfo:
        """Return a new array for these rows of a key, with the row shape of `out`."""
        made = self._mx.nd.empty((len(numbers), *out.shape[1:]), self._mx.cpu(), self._buffers[name].dtype)
        return self._native.value(made)

    def take(self, source: Any, numbers: Array, out: ArrayInfo) -> Any:
        """Return these rows of a dense array of the key's size, with the row shape of `out`."""
        return _shaped(source, out).take(self._mx.nd.array(numbers, self._mx.cpu(), np.int64))

    def deliver_rows(self, numbers: Array, values: Any, out: ArrayInfo) -> None:
        """Set the row-sparse `out` to exactly the rows `numbers` with `values`, None for no rows. Waits for them."""
        sparse = self._mx.nd.sparse
        if values is None:
            sparse.zeros("row_sparse", out.shape, self._mx.cpu(), out.dtype).copyto(out.array)
        else:
            rows = self._mx.nd.array(numbers, self._mx.cpu(), np.int64)
            sparse.row_sparse_array((values, rows), out.shape, self._mx.cpu(), out.dtype).copyto(out.array)


def _shaped(buffer: Any, like: Any) -> Any:
    """Return a view of the buffer with the shape of another array of the same size."""
    return buffer if buffer.shape == like.shape else buffer.reshape(like.shape)
