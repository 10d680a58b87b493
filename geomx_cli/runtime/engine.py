"""Operations of our own in MXNet's dependency engine, written in Python.

An operation is started by the engine when the arrays that it reads and writes are free, and ends when its completion
is called, at any later time from any thread. So a pull that waits for the network holds no thread of the engine,
however many wait, and whoever reads the array next waits for just that array.

This module imports no framework: it is given `mxnet`, and speaks to the C interface of version 1.9.1.
"""

import ctypes
import itertools
import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from geomx_cli.ps.wire import Array

__all__ = ["Completion", "Engine"]

# FnProperty::kCPUPrioritized of mxnet/engine.h: threads of their own, so that no kernel stands before us.
_CPU_PRIORITIZED = 3
_CPU = 1
_ERROR_BYTES = 64

_START = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_DELETE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_COMPLETE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class _Context(ctypes.Structure):
    """mxnet::Context."""

    _fields_ = (("device", ctypes.c_int32), ("index", ctypes.c_int32))


class _OnComplete(ctypes.Structure):
    """mxnet::engine::CallbackOnComplete; lives only as long as the call that hands it over, so it is copied."""

    _fields_ = (("callback", ctypes.c_void_p), ("engine", ctypes.c_void_p), ("param", ctypes.c_void_p))


class _DLTensor(ctypes.Structure):
    """The beginning of a DLManagedTensor."""

    _fields_ = (("data", ctypes.c_void_p),)


class Completion:
    """Ends one operation: call it once, with what went wrong or None. The operation's arrays live until then."""

    def __init__(self, engine: "Engine", raw: _OnComplete) -> None:
        self._engine = engine
        self._raw = (raw.callback, raw.engine, raw.param)
        self.called = threading.Event()

    def __call__(self, error: BaseException | None = None) -> None:
        if not self.called.is_set():
            self._engine.end(self._raw, error)
            self.called.set()


class Engine:
    """Queues operations. `error` is the first failure of any of them; MXNet too raises it, where somebody waits.

    A failed operation completes like any other, so nothing waits for it for ever. The engine cannot fork while an
    operation needs Python, so all are waited for before this process forks. A forked child must not queue any.
    """

    def __init__(self, mx: Any) -> None:
        self._mx = mx
        self._lib = mx.base._LIB
        self._check = mx.base.check_call
        self._numbers = itertools.count(1)
        self._operations: dict[int, tuple[Callable[[Completion], None], Sequence[Any]]] = {}
        self._start, self._delete = _START(self._run), _DELETE(self._forget)
        self._naive = mx.util.getenv("MXNET_ENGINE_TYPE") == "NaiveEngine"
        self._process = os.getpid()
        self._idle = threading.Condition()
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
        """Have the engine call `work` when the arrays are free; it must not wait for anything. All are on the CPU.

        What `work` raises counts as the operation's failure. No array may stand twice or share memory with another.
        """
        number = next(self._numbers)
        self._operations[number] = (work, (*reads, *writes))
        prop, context = ctypes.c_int(_CPU_PRIORITIZED), _Context(_CPU, 0)
        self._check(
            self._lib.MXEnginePushAsyncND(
                self._start, ctypes.c_void_p(number), self._delete, ctypes.byref(context), _handles(reads),
                ctypes.c_int(len(reads)), _handles(writes), ctypes.c_int(len(writes)), ctypes.byref(prop),
                ctypes.c_int(priority), ctypes.c_char_p(name.encode()), ctypes.c_bool(False),
            )
        )  # fmt: skip

    def view(self, array: Any) -> Array:
        """The memory of an array on the CPU as a 1-D numpy array; only in an operation that has the array.

        Raises MXNetError for an array that a kernel of oneDNN has left in a layout of its own. (MXNDArrayGetData would
        change that, but wait for the engine meanwhile, and so for this very operation.)
        """
        packed = ctypes.c_void_p()
        self._check(self._lib.MXNDArrayToDLPack(array.handle, ctypes.byref(packed)))
        assert packed.value is not None
        address = _DLTensor.from_address(packed.value).data
        self._check(self._lib.MXNDArrayCallDLPackDeleter(packed))
        dtype = np.dtype(array.dtype)
        memory = (ctypes.c_char * (math.prod(array.shape) * dtype.itemsize)).from_address(address)
        return np.frombuffer(memory, dtype)

    def _run(self, _context: int, on_complete: int, number: int) -> None:
        """In a thread of MXNet's: an exception must not leave it."""
        completion = Completion(self, _OnComplete.from_address(on_complete))
        try:
            self._operations[number][0](completion)
        except BaseException as error:
            completion(error)
        if self._naive:
            # This engine runs an operation where it is queued and wants it done on return.
            completion.called.wait()

    def end(self, raw: tuple[int, int, int], error: BaseException | None) -> None:
        """Tell MXNet that an operation is over."""
        if error is not None and self.error is None:
            self.error = error
        native = None if error is None else _NativeError(f"geomx: {error}")
        callback, engine, param = raw
        _COMPLETE(callback)(engine, param, None if native is None else native.address)

    def _forget(self, number: int) -> None:
        """In any thread: MXNet is through with an operation, also with one that it has skipped for a failed input."""
        operation = self._operations.pop(number, None)
        del operation  # frees its arrays before anybody who waits goes on, and not under the lock
        with self._idle:
            self._idle.notify_all()

    def settle(self) -> None:
        """Wait for everything queued, by whomever, and until no thread of MXNet's needs Python for us.

        Raises MXNetError as `mx.nd.waitall` does.
        """
        self._mx.nd.waitall()
        with self._idle:
            self._idle.wait_for(lambda: not self._operations, 10)

    def _drain(self) -> None:
        if self._operations and os.getpid() == self._process:
            try:
                self.settle()
            except self._mx.base.MXNetError:
                pass  # `error` has it


class _NativeError:
    """A std::runtime_error for MXNet to copy and to raise as MXNetError; `address` is None without GNU's library."""

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


def _handles(arrays: Sequence[Any]) -> Any:
    return (ctypes.c_void_p * max(1, len(arrays)))(*(array.handle.value for array in arrays))
