"""Conversion of MXNet arrays for transfer, dense or row-sparse: checks, sums over devices, and a buffer for each key.

Row-sparse arrays are sent as their stored rows; the servers hold every row.
"""

import ctypes
import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.net.payload import Rows
from geomx_cli.ps.net.wire import FLOAT_NAMES
from geomx_cli.runtime.frontends.mxnet.native import ArrayInfo, Native, OnComplete
from geomx_cli.runtime.script.store import row_size

__all__ = ["Arrays", "Completion", "Engine"]

# Asynchronous operations in MXNet's dependency engine, implemented in Python. The engine starts an operation when the
# arrays that it reads and writes are available. The operation ends when its completion is called, at any later time
# from any thread. So pending pulls hold no engine thread, and a reader of an array waits only for that array. This
# module does not import the framework: its functions get `mxnet` as an argument.

_ERROR_BYTES = 64
_RETURN = 10.0  # seconds for an MXNet thread to return from a finished operation


class Completion:
    """Completes one operation: call it once, with the error or None. Keeps the operation's arrays alive until then."""

    def __init__(self, engine: "Engine", number: int, raw: OnComplete) -> None:
        self._engine = engine
        self._number = number
        self._raw = raw
        self._over = False

    def __call__(self, error: BaseException | None = None) -> None:
        if not self._over:
            self._engine.end(self._number, self._raw, error)
            self._over = True

    def wait(self) -> None:
        """Wait until the operation is complete."""
        while not self._over:
            time.sleep(0.001)


class Engine:
    """Queues operations, by `native`. `error` is the first failure of any of them. MXNet also raises it from calls that
    wait.

    A failed operation completes like any other, so waits do not hang. The engine cannot fork while an operation needs
    Python, so all operations are awaited before a fork. A forked child must not queue operations.
    """

    def __init__(self, mx: Any, native: Native) -> None:
        self._mx = mx
        self.native = native
        self._numbers = itertools.count(1)
        self._operations: dict[int, tuple[Callable[[Completion], None], Sequence[Any]]] = {}
        self._running: set[int] = set()  # operations executing on an MXNet thread
        self._start = native.starter(self._run)
        self._naive = mx.util.getenv("MXNET_ENGINE_TYPE") == "NaiveEngine"
        self._process = os.getpid()
        self.error: BaseException | None = None
        os.register_at_fork(before=self._drain)

    def queue(
        self,
        work: Callable[[Completion], None],
        *,
        reads: Sequence[Any],
        writes: Sequence[Any],
        priority: int,
        name: str,
    ) -> None:
        """Make the engine call `work` when the arrays are available. `work` must not block. All arrays are on the CPU.

        An exception from `work` fails the operation. No array may occur twice or share memory with another.
        """
        number = next(self._numbers)
        self._operations[number] = (work, (*reads, *writes))
        self.native.push(self._start, number, reads, writes, priority, name.encode())

    def _run(self, _context: int, on_complete: int, number: int) -> None:
        """Run on an MXNet thread; must not raise."""
        self._running.add(number)
        completion = Completion(self, number, OnComplete.from_address(on_complete).copy())
        try:
            self._operations[number][0](completion)
        except BaseException as error:
            completion(error)
        if self._naive:
            # NaiveEngine runs an operation synchronously and expects it to be complete on return.
            completion.wait()
        self._running.discard(number)

    def end(self, number: int, raw: OnComplete, error: BaseException | None) -> None:
        """Report an operation's completion to MXNet."""
        self._operations.pop(number, None)  # frees its arrays before waiters resume
        if error is not None and self.error is None:
            self.error = error
        native = None if error is None else _NativeError(f"geomx: {error}")
        raw.call(None if native is None else native.address)

    def wait_for_operations(self) -> None:
        """Wait for all queued operations, and until no MXNet thread needs Python on our behalf.

        Raises MXNetError in the same cases as `mx.nd.waitall`.
        """
        known = list(self._operations)
        try:
            self._mx.nd.waitall()
        finally:
            end = time.monotonic() + _RETURN
            while self._running and time.monotonic() < end:
                time.sleep(0.001)
            for number in known:  # the remaining ones were skipped, because an input had failed
                self._operations.pop(number, None)

    def _drain(self) -> None:
        if (self._operations or self._running) and os.getpid() == self._process:
            try:
                self.wait_for_operations()
            except self._mx.base.MXNetError:
                pass  # recorded in `error`


class _NativeError:
    """A std::runtime_error that MXNet copies and raises as MXNetError; `address` is None without libstdc++."""

    def __init__(self, message: str) -> None:
        self.address: int | None = None
        try:
            self._library = ctypes.CDLL("libstdc++.so.6")
            construct = self._library["_ZNSt13runtime_errorC1EPKc"]
        except (OSError, AttributeError):
            return
        self._memory = ctypes.create_string_buffer(_ERROR_BYTES)
        self.address = ctypes.addressof(self._memory)
        construct(ctypes.c_void_p(self.address), ctypes.c_char_p(message.encode()))

    def __del__(self) -> None:
        if self.address is not None:
            self._library["_ZNSt13runtime_errorD1Ev"](ctypes.c_void_p(self.address))


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
        """Return the ArrayInfo of each array. For an array of `mx.np`, the ArrayInfo of the NDArray with the same
        memory.

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
            held = value.array.data.asnumpy().reshape(len(numbers), row_size(value.shape))
            if len(values) > 1:
                held = held.astype(np.promote_types(held.dtype, np.float32), copy=False)
            rows = Rows.ordered(numbers, held)
            total = rows if total is None else total.plus(rows)
        assert total is not None
        with np.errstate(over="ignore"):
            return total.astype(np.dtype(values[0].dtype))

    def add(self, name: str, shape: Sequence[int], dtype: str) -> None:
        """Declare a new key's buffer: dense, on the CPU. Allocates no memory yet."""
        self._buffers[name] = self._native.value(self._mx.nd.empty(tuple(shape), self._mx.cpu(), dtype))
        self._orders[name] = self._mx.nd.empty((1,), self._mx.cpu())

    def order(self, name: str) -> Any:
        """Return the key's empty ordering array: writes to it are ordered after earlier reads."""
        return self._orders[name]

    def holds(self, name: str, value: ArrayInfo) -> bool:
        """Return whether the array's memory can hold a value of the key as transferred: dense, on the CPU, of the same
        dtype.

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
        """Copy a result to all of `outs`. A row-sparse array gets all rows that are not zero."""
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
        """Set the row-sparse `out` to exactly the rows `numbers` with `values` (None for no rows). Waits for them."""
        sparse = self._mx.nd.sparse
        if values is None:
            sparse.zeros("row_sparse", out.shape, self._mx.cpu(), out.dtype).copyto(out.array)
        else:
            rows = self._mx.nd.array(numbers, self._mx.cpu(), np.int64)
            sparse.row_sparse_array((values, rows), out.shape, self._mx.cpu(), out.dtype).copyto(out.array)


def _shaped(buffer: Any, like: Any) -> Any:
    """Return a view of the buffer with the shape of another array of the same size."""
    return buffer if buffer.shape == like.shape else buffer.reshape(like.shape)
