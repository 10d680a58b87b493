"""The memory that the client sends from and receives in: a tensor's own where possible, else a copy on the host."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from geomx_cli.ps.arrays import Array
from geomx_cli.runtime.frontends.torch.model_state import EXCHANGED

__all__ = ["DeviceCopies", "Staging"]


class Staging:
    """For one tensor at a time, always of the same shape, dtype and device.

    A contiguous float32 or float64 tensor on the CPU is used itself; its memory must not change between `load` and
    `store`. Others are copied, from a GPU to pinned memory, with `copies`. Numbers of a narrower dtype are multiplied
    and divided in the copy, which does not overflow.
    """

    def __init__(self) -> None:
        self._copy: Any = None

    def load(
        self, tensor: Any, copies: "DeviceCopies | None", ready: Callable[[Array], None], factor: int = 1
    ) -> None:
        """Call `ready` with the tensor's elements (1-D), `factor` times as large, at once or, for a tensor on a GPU,
        later in another thread.
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
        """Copy the elements back, where they are not the tensor's own memory, divided by `divisor`."""
        own = tensor.detach()
        is_narrow = self._copy is not None and self._copy.dtype != own.dtype
        if is_narrow and divisor > 1:
            self._copy.div_(float(divisor))
        if self._copy is not None:
            if copies is None:
                own.copy_(self._copy)
            else:
                copies.bring(own, self._copy)
        if not is_narrow and divisor > 1:
            own.div_(float(divisor))


class DeviceCopies:
    """Copies between a GPU and pinned memory on a stream of its own, beside the backward pass."""

    def __init__(self, device: Any) -> None:
        self._stream = torch.cuda.Stream(device)
        self._waiting: queue.SimpleQueue[tuple[Any, Callable[[], None]]] = queue.SimpleQueue()
        self._pending = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="geomx-copies", daemon=True).start()

    def fetch(self, copy: Any, tensor: Any, then: Callable[[], None]) -> None:
        """Copy to the host once the work queued on the current stream is done; then call `then` in the own thread."""
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            copy.copy_(tensor, non_blocking=True)
            copied = self._stream.record_event()
        tensor.record_stream(self._stream)
        with self._changed:
            self._pending += 1
        self._waiting.put((copied, then))

    def settle(self) -> None:
        """Wait until `then` of all fetches has been called; raises what one of them raised."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)
        if self._error is not None:
            raise self._error

    def bring(self, tensor: Any, copy: Any) -> None:
        """Copy to the GPU; work queued later on the current stream waits for it."""
        with torch.cuda.stream(self._stream):
            tensor.copy_(copy, non_blocking=True)
        torch.cuda.current_stream(tensor.device).wait_stream(self._stream)

    def _run(self) -> None:
        while True:
            copied, then = self._waiting.get()
            try:
                copied.synchronize()
                then()
            except BaseException as error:  # raised by `settle` in the training thread
                self._error = self._error or error
            with self._changed:
                self._pending -= 1
                self._changed.notify_all()
