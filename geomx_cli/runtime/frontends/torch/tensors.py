"""Tensors of scripts: the part that this process holds, their bytes, and the memory in which they are exchanged."""

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Array, Floats

__all__ = [
    "BUFFERS", "EXCHANGED", "DeviceCopies", "SentGradient", "Staging", "check_dense", "check_gradient", "is_divided",
    "local", "of_bytes", "plain", "read", "read_bytes", "set_gradient", "shares_memory", "write", "write_bytes",
]  # fmt: skip

EXCHANGED: Mapping[Any, Any] = {
    torch.float32: torch.float32, torch.float64: torch.float64, torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}  # fmt: skip
"""The dtypes of trained tensors, and the dtypes in which their contributions are sent."""
BUFFERS = "geomx.buffers"
"""Name of the key for the means of buffers: the elements of all of them in float32."""
_USE_COUNT: Any = getattr(torch._C, "_storage_Use_Count", None)
_OWN_USES = 2
"""How many objects refer to memory that no other tensor shares: the tensor, and the object that Python has for the
memory.
"""


def is_divided(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, of which each process of a mesh holds a part."""
    return hasattr(tensor, "device_mesh")


def shares_memory(tensor: Any) -> bool:
    """Whether other tensors share this one's memory, as views do, or PyTorch does not tell."""
    return _USE_COUNT is None or bool(_USE_COUNT(tensor.untyped_storage()._cdata) > _OWN_USES)


def local(tensor: Any) -> Any:
    """The elements of a tensor that this process holds, detached and in the same memory. For a DTensor, its shard."""
    own = tensor.detach()
    return own.to_local() if is_divided(own) else own


@torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
def read(tensor: Any, out: Floats) -> None:
    """Copy a tensor's elements."""
    torch.from_numpy(out).copy_(local(tensor).reshape(-1))


@torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
def write(tensor: Any, value: Floats) -> None:
    """Set a tensor's elements."""
    own = local(tensor)
    own.copy_(torch.from_numpy(value).view(own.shape))


def read_bytes(tensor: Any) -> Array:
    """The elements' bytes (1-D, uint8), in the tensor's own memory if it is contiguous and on the CPU. Raises
    InvalidSettings for a sparse tensor.
    """
    check_dense(tensor)
    flat = tensor.detach().contiguous().to("cpu").view(-1)
    found: Array = flat.view(torch.uint8).numpy()
    return found


def check_dense(tensor: Any) -> None:
    """Raise InvalidSettings for a sparse tensor, because its memory does not have the elements."""
    if tensor.layout != torch.strided:
        what = f"a tensor of layout {str(tensor.layout).removeprefix('torch.')} in a collective operation"
        raise InvalidSettings(what, "only sums and means of sparse_coo are supported: make it dense, as by to_dense()")


def write_bytes(tensor: Any, data: Array) -> None:
    """Set the elements from such bytes, as many as the tensor has."""
    tensor.detach().copy_(of_bytes(data, tensor.dtype).view(tensor.shape))


def of_bytes(data: Array, dtype: Any) -> Any:
    """A tensor (1-D) of such bytes that shares their memory. They must begin at a multiple of the element's size."""
    return torch.from_numpy(data).view(dtype) if data.size else torch.empty(0, dtype=dtype)


def check_gradient(key: str, gradient: Any, dtype: Any) -> None:
    """Raise InvalidSettings for a sparse gradient, because contributions are dense. Also raise it if a gradient's dtype
    on the wire differs from the dtype with which its tensor was wrapped.
    """
    if gradient.layout != torch.strided:
        raise InvalidSettings(f"the gradient of {key} is sparse", "create the embedding with sparse=False")
    if EXCHANGED.get(gradient.dtype) != dtype:
        what = f"the gradient of {key} is of {plain(gradient.dtype)}, and contributions to it are of {plain(dtype)}"
        raise InvalidSettings(what, "convert the model before wrap")


def plain(dtype: object) -> str:
    """The name of a dtype, as "float32"."""
    return str(dtype).removeprefix("torch.")


def set_gradient(parameter: Any, elements: Any) -> None:
    """Give a parameter without a gradient this gradient. For a DTensor it is the gradient of its shard."""
    if is_divided(parameter):
        from torch.distributed.tensor import DTensor

        elements = DTensor.from_local(
            elements, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )
    parameter.grad = elements


class SentGradient:
    """The gradient of a tensor as it was sent. It must not change until the mean takes its place."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self._version = tensor._version  # a DTensor's own: changes through it do not raise its shard's

    def check(self, key: str, present: Any) -> None:
        """Raise InvalidSettings if `present`, the tensor's gradient now, is another one, or has been changed in place.
        A change
        through its `data` is not detected: this has no version, and a comparison would need a copy.
        """
        if present is not self.tensor or present._version != self._version:
            what = f"the gradient of {key} was changed while it was exchanged"
            hint = "register the script's own gradient hooks before wrap, or change gradients after backward"
            raise InvalidSettings(what, hint)


class Staging:
    """The memory from which the client sends and in which it receives: a tensor's own memory if possible, otherwise a
    copy on the host.

    For one tensor at a time, always of the same shape, dtype and device.

    A contiguous float32 or float64 tensor on the CPU is used itself. Its memory must not change between `load` and
    `store`. Other tensors are copied, from a GPU to pinned memory, with `copies`. Numbers of a narrower dtype are
    multiplied and divided in the copy, which does not overflow.
    """

    def __init__(self) -> None:
        self._copy: Any = None

    def load(
        self, tensor: Any, copies: "DeviceCopies | None", ready: Callable[[Array], None], factor: int = 1
    ) -> None:
        """Call `ready` with the tensor's elements (1-D), multiplied by `factor`. It is called at once or, for a tensor
        on a GPU, later in another thread.
        """
        tensor = tensor.detach()
        if copies is None and tensor.is_contiguous() and tensor.dtype == EXCHANGED[tensor.dtype]:
            self._copy = None
            if factor > 1:
                tensor.mul_(factor)
            ready(tensor.view(-1).numpy())
            return
        if self._copy is None or self._copy.shape != tensor.shape:
            dtype, pinned = EXCHANGED[tensor.dtype], copies is not None
            self._copy = torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=pinned)
        array: Array = self._copy.view(-1).numpy()

        def copied() -> None:
            if factor > 1:
                array[:] *= array.dtype.type(factor)
            ready(array)

        if copies is None:
            self._copy.copy_(tensor)
            copied()
        else:
            copies.fetch(self._copy, tensor, copied)

    def store(self, tensor: Any, copies: "DeviceCopies | None", divisor: int = 1) -> None:
        """Copy the elements back, divided by `divisor`, unless they are in the tensor's own memory."""
        own = tensor.detach()
        is_narrow = self._copy is not None and self._copy.dtype != own.dtype
        if is_narrow and divisor > 1:
            self._copy.div_(float(divisor))
        if self._copy is not None:
            if copies is None:
                own.copy_(self._copy)
            else:
                copies.write_back(own, self._copy)
        if not is_narrow and divisor > 1:
            own.div_(float(divisor))


class DeviceCopies:
    """Copies between a GPU and pinned memory on a stream of its own, concurrently with the backward pass."""

    def __init__(self, device: Any) -> None:
        self._stream = torch.cuda.Stream(device)
        self._waiting: queue.SimpleQueue[tuple[Any, Callable[[], None]]] = queue.SimpleQueue()
        self._pending = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="geomx-copies", daemon=True).start()

    def fetch(self, copy: Any, tensor: Any, then: Callable[[], None]) -> None:
        """Copy to the host once the work queued on the current stream is done. Then call `then` in a separate thread.
        """
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            copy.copy_(tensor, non_blocking=True)
            copied = self._stream.record_event()
        tensor.record_stream(self._stream)
        with self._changed:
            self._pending += 1
        self._waiting.put((copied, then))

    def wait_for_fetches(self) -> None:
        """Wait until `then` of all fetches has been called. Raises the error that one of them raised."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)
        if self._error is not None:
            raise self._error

    def write_back(self, tensor: Any, copy: Any) -> None:
        """Copy to the GPU. Work that is queued later on the current stream waits for it."""
        with torch.cuda.stream(self._stream):
            tensor.copy_(copy, non_blocking=True)
        torch.cuda.current_stream(tensor.device).wait_stream(self._stream)

    def _run(self) -> None:
        while True:
            copied, then = self._waiting.get()
            try:
                copied.synchronize()
                then()
            except BaseException as error:  # raised by `wait_for_fetches` in the training thread
                self._error = self._error or error
            with self._changed:
                self._pending -= 1
                self._changed.notify_all()
