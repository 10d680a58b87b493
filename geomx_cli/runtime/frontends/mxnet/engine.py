"""Asynchronous operations in MXNet's dependency engine, implemented in Python.

The engine starts an operation when the arrays that it reads and writes are available; the operation ends when its
completion is called, at any later time from any thread. So pending pulls hold no engine thread, and a reader of an
array waits for just that array.

This module does not import the framework: it is passed `mxnet`.
"""

import ctypes
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from geomx_cli.runtime.frontends.mxnet.native import Native, OnComplete

__all__ = ["Completion", "Engine"]

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
    """Queues operations, by `native`. `error` is the first failure of any of them; MXNet also raises it from waiting
    calls.

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
        """Have the engine call `work` when the arrays are available; `work` must not block. All arrays are on the CPU.

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

    def settle(self) -> None:
        """Wait for all queued operations, and until no MXNet thread needs Python on our behalf.

        Raises MXNetError as `mx.nd.waitall` does.
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
                self.settle()
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
