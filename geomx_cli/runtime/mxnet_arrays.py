"""MXNet's arrays on their way to and from the servers, dense or row-sparse: checked, summed, and one buffer per key.

Row-sparse arrays travel dense: the servers hold every row.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from geomx_cli.errors import InvalidSettings
from geomx_cli.runtime.kvstore import DTYPES

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

    def deliver_rows(self, buffer: Any, out: Any, rows: Any) -> None:
        """Copy to `out`, which is row-sparse, the rows of these numbers: in any order, perhaps more than once.

        Raises InvalidSettings for one that the key does not have.
        """
        result = _shaped(buffer, out)
        numbers = np.unique(rows.asnumpy().astype(np.int64))
        if len(numbers) and not 0 <= numbers[0] <= numbers[-1] < result.shape[0]:
            raise InvalidSettings(f"rows {numbers[0]} to {numbers[-1]} of an array that has {result.shape[0]}")
        if len(numbers):
            wanted = self._mx.nd.array(numbers, self._mx.cpu(), np.int64)
            self._mx.nd.sparse.retain(result.tostype("row_sparse"), wanted).copyto(out)
        else:
            self._mx.nd.sparse.zeros("row_sparse", out.shape, self._mx.cpu(), out.dtype).copyto(out)


def _shaped(buffer: Any, like: Any) -> Any:
    """The buffer's memory with the shape of another array of the same size."""
    return buffer if buffer.shape == like.shape else buffer.reshape(like.shape)
