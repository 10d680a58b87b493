"""The C interface of MXNet 1.9.1, called without releasing the GIL.

MXNet's own bindings release the GIL in each call. With a worker's several threads that costs a thread switch, which
takes
longer than these calls: all of them return at once. This module does not import the framework: its functions get
    `mxnet` as an argument.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from geomx_cli.ps.arrays import Array

__all__ = ["ArrayInfo", "Native", "OnComplete"]

# FnProperty::kCPUPrioritized of mxnet/engine.h: a separate thread pool, so that no kernel delays our operations.
_CPU_PRIORITIZED = 3
_CPU, _CPU_PINNED, _CPU_SHARED = 1, 3, 5
_ON_CPU = (_CPU, _CPU_PINNED, _CPU_SHARED)
_FORMS = {0: "default", 1: "row_sparse", 2: "csr"}
_DTYPES = {
    0: "float32", 1: "float64", 2: "float16", 3: "uint8", 4: "int32", 5: "int8", 6: "int64", 7: "bool", 12: "bfloat16",
}  # fmt: skip
_REORDER = "_ZNK5mxnet7NDArray20Reorder2DefaultAsyncEv"

_START = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_COMPLETE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class ArrayInfo(NamedTuple):
    """An NDArray and its storage type ("default", "row_sparse" or "csr"), dtype and shape."""

    array: Any
    form: str
    dtype: str
    shape: tuple[int, ...]
    on_cpu: bool

    @property
    def size(self) -> int:
        """Number of elements, including rows that a row-sparse array omits."""
        return math.prod(self.shape)

    @property
    def is_sparse(self) -> bool:
        """Whether it is row-sparse."""
        return self.form == "row_sparse"


class _Context(ctypes.Structure):
    """mxnet::Context."""

    _fields_ = (("device", ctypes.c_int32), ("index", ctypes.c_int32))


class OnComplete(ctypes.Structure):
    """mxnet::engine::CallbackOnComplete; valid only during the call that passes it, so it must be copied."""

    _fields_ = (("callback", ctypes.c_void_p), ("engine", ctypes.c_void_p), ("param", ctypes.c_void_p))

    def copy(self) -> "OnComplete":
        """Return a copy that we own."""
        return OnComplete(self.callback, self.engine, self.param)

    def call(self, error: int | None) -> None:
        """Complete the operation; `error`: address of a std::exception, or None."""
        _COMPLETE(self.callback)(self.engine, self.param, error)


class _DLTensor(ctypes.Structure):
    """The leading fields of a DLManagedTensor."""

    _fields_ = (("data", ctypes.c_void_p),)


_HERE, _OWN_POOL = _Context(_CPU, 0), ctypes.c_int(_CPU_PRIORITIZED)


class Native:
    """Functions of the library. Thread-safe."""

    def __init__(self, mx: Any) -> None:
        self._mx = mx
        self._check = mx.base.check_call
        self._has_layouts = mx.runtime.Features().is_enabled("MKLDNN")
        library, pointer, number = ctypes.PyDLL(mx.base._LIB._name), ctypes.c_void_p, ctypes.c_int
        self._push = _function(
            library, "MXEnginePushAsyncND", _START, pointer, pointer, pointer, pointer, number, pointer, number,
            pointer, number, ctypes.c_char_p, ctypes.c_bool,
        )  # fmt: skip
        self._reorder = _function(library, _REORDER, pointer)
        self._to_dlpack = _function(library, "MXNDArrayToDLPack", pointer, pointer)
        self._delete_dlpack = _function(library, "MXNDArrayCallDLPackDeleter", pointer)
        self._get_form = _function(library, "MXNDArrayGetStorageType", pointer, pointer)
        self._get_dtype = _function(library, "MXNDArrayGetDType", pointer, pointer)
        self._get_context = _function(library, "MXNDArrayGetContext", pointer, pointer, pointer)
        self._get_shape = _function(library, "MXNDArrayGetShapeEx64", pointer, pointer, pointer)

    def value(self, array: Any) -> ArrayInfo:
        """Return an array's ArrayInfo. For an array of `mx.np`, the ArrayInfo of the NDArray with the same memory.
        Raises TypeError for any other object.
        """
        if not isinstance(array, self._mx.nd.NDArray):
            raise TypeError(f"a {type(array).__name__} is no NDArray")
        if type(array) is not self._mx.nd.NDArray:
            array = array.as_nd_ndarray()
        handle, first, second = array.handle, ctypes.c_int(), ctypes.c_int()
        one, two = ctypes.byref(first), ctypes.byref(second)
        self._check(self._get_form(handle, one) or self._get_dtype(handle, two))
        form, dtype = _FORMS.get(first.value, "undefined"), _DTYPES.get(second.value, "unknown")
        self._check(self._get_context(handle, one, two))
        on_cpu, sizes = first.value in _ON_CPU, ctypes.POINTER(ctypes.c_int64)()
        self._check(self._get_shape(handle, one, ctypes.byref(sizes)))
        shape = tuple(sizes[: first.value]) if first.value >= 0 else (0,)  # its shape is not known yet
        return ArrayInfo(array, form, dtype, shape, on_cpu)

    def lay_out(self, value: ArrayInfo) -> bool:
        """Queue the conversion of a dense CPU array from any oneDNN layout to MXNet's own layout, so that an operation
        queued next can `view` it. Return False if that is impossible.

        The C interface can convert as well, but waits for the array; NDArray::Reorder2DefaultAsync does not.
        """
        if len(value.shape) <= 1:  # 1-D arrays have no other layout
            return True
        if self._reorder is None:
            return not self._has_layouts
        self._reorder(value.array.handle)
        return True

    def view(self, array: Any, dtype: str, size: int) -> Array:
        """Return a CPU array's memory as a 1-D numpy array. Use it only within an operation that holds the array.

        Raises MXNetError for an array in a oneDNN layout; see `lay_out`.
        """
        packed = ctypes.c_void_p()
        self._check(self._to_dlpack(array.handle, ctypes.byref(packed)))
        assert packed.value is not None
        address = _DLTensor.from_address(packed.value).data
        self._check(self._delete_dlpack(packed))
        kind: np.dtype[Any] = np.dtype(dtype)
        memory = (ctypes.c_char * (size * kind.itemsize)).from_address(address)
        memory.owner = array  # type: ignore[attr-defined]  # lives as long as any view, as one that is still being sent
        return np.frombuffer(memory, kind)  # type: ignore[call-overload, no-any-return]

    def push(
        self, start: Any, number: int, reads: Sequence[Any], writes: Sequence[Any], priority: int, name: bytes
    ) -> None:
        """Queue an operation: `start` (from `starter`) is called with this number when the arrays are available."""
        self._check(
            self._push(
                start, number, None, ctypes.byref(_HERE), _handles(reads), len(reads), _handles(writes), len(writes),
                ctypes.byref(_OWN_POOL), priority, name, False,
            )
        )  # fmt: skip

    @staticmethod
    def starter(start: Callable[[int, int, int], None]) -> Any:
        """Return a C callback for `push`: it receives the context, the address of an OnComplete, and the operation's
        number. It is called on MXNet's threads, and must not raise.
        """
        return _START(start)


def _function(library: Any, name: str, *takes: Any) -> Any:
    """Return the function, or None if the build does not export it."""
    try:
        found = library[name]
    except AttributeError:
        return None
    found.argtypes = takes
    return found


def _handles(arrays: Sequence[Any]) -> Any:
    return (ctypes.c_void_p * max(1, len(arrays)))(*(array.handle.value for array in arrays))
