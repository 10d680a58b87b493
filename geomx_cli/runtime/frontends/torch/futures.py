"""Futures that PyTorch waits for."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from geomx_cli.core.futures import after, finished
from geomx_cli.runtime.frontends.torch.lanes import Lane

__all__ = ["PendingWork", "joined"]


class PendingWork(Work):  # type: ignore[misc, unused-ignore]  # torch is not installed where mypy runs
    """A collective operation in progress, for the tensors that it changes.

    ready: the results are here; `store` then writes them to the tensors, and `done` is completed. `wait` and PyTorch's
    futures raise the client's error, which names the process at fault, after the job has failed; then the tensors'
    values are undefined. lane: what callbacks of the future call belongs there; they may wait for other operations.
    before_wait: called by `wait` with `done`.
    """

    def __init__(
        self, ready: "Future[Any]", tensors: Sequence[Any], store: Callable[[], None], lane: Lane
    ) -> None:
        super().__init__()
        self.done: Future[None] = Future()
        self.lane = lane
        self.before_wait: Callable[[Future[None]], None] = lambda done: None
        self._tensors = list(tensors)
        self._gpus = list({tensor.device for tensor in tensors if tensor.is_cuda})
        self._stream = torch.cuda.Stream(self._gpus[0]) if self._gpus else None
        self._future: _Future | None = None
        self._lock = threading.Lock()
        ready.add_done_callback(lambda found: self._complete(found, store))

    def _complete(self, ready: "Future[Any]", store: Callable[[], None]) -> None:
        try:
            ready.result()
            with torch.cuda.stream(self._stream):
                store()
            self.done.set_result(None)
        except Exception as error:
            self.done.set_exception(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the results; on a GPU the current stream waits for them. The job's limits apply, not `timeout`."""
        self.before_wait(self.done)
        self.lane.while_waiting(self.done)
        self.done.result()
        if self._stream is not None:
            torch.cuda.current_stream(self._gpus[0]).wait_stream(self._stream)
        return True

    def get_future(self) -> Any:
        """A torch.futures.Future of the tensors. Its callbacks run in no thread that results depend on."""
        with self._lock:
            if self._future is None:
                self._future = _Future(self.lane, self._gpus)
                if self.done.done():  # and no callback to run
                    self._tell()
                else:
                    self.lane.run(self.done, self._tell)
            return self._future

    def _tell(self) -> None:
        assert self._future is not None
        with torch.cuda.stream(self._stream):  # waiters of the future wait for what is queued on this stream
            error = self.done.exception()
            if error is None:
                self._future.set_result(self._tensors)
            else:
                self._future.set_exception(error)

    def is_completed(self) -> bool:
        """Whether it has succeeded or failed."""
        return self.done.done()

    def is_success(self) -> bool:
        """Whether it has succeeded."""
        return self.done.done() and self.done.exception() is None

    def exception(self) -> BaseException | None:
        """Why it has failed, if it has."""
        return self.done.exception() if self.done.done() else None

    def result(self) -> list[Any]:
        """The tensors."""
        return self._tensors

    def synchronize(self) -> None:
        """See `wait`."""
        self.wait()


class _Future(torch.futures.Future):  # type: ignore[misc, type-arg, unused-ignore]
    """Its callbacks, and those of the futures that `then` returns, run in a lane, whichever thread runs them."""

    def __init__(self, lane: Lane, gpus: Sequence[Any]) -> None:
        super().__init__(devices=list(gpus) or None)
        self._lane = lane
        self._gpus = gpus
        self._over: Future[None] = Future()
        super().add_done_callback(lambda _: self._over.set_result(None))

    def wait(self) -> Any:
        """See torch.futures.Future.wait."""
        self._lane.while_waiting(self._over)
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """See torch.futures.Future.then."""
        result = _Future(self._lane, self._gpus)

        def call(_: Any) -> None:
            try:
                result.set_result(callback(self))
            except Exception as error:
                # The end of a backward pass raises it: C++ would take it for a value.
                self._lane.fail(error)
                result.set_exception(error)

        self.add_done_callback(call)
        return result

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """See torch.futures.Future.add_done_callback."""

        def call(_: Any) -> None:
            with self._lane.entered():
                callback(self)

        super().add_done_callback(call)


def joined(works: Sequence[PendingWork], tensors: Sequence[Any], lane: Lane) -> PendingWork:
    """One operation of several, or of none."""
    done = after([work.done for work in works], lambda: None) if works else finished(None)
    return PendingWork(done, tensors, lambda: None, lane)
