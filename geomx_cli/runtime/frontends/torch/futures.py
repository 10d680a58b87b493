"""Futures that PyTorch waits for."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from geomx_cli.core.futures import after

__all__ = ["PendingWork", "done_work", "joined"]


class PendingWork(Work):  # type: ignore[misc, unused-ignore]  # torch is not installed where mypy runs
    """A collective operation in progress, for the tensors that it changes.

    ready: the results are here; `store` then writes them to the tensors, and `done` is completed. `wait` and PyTorch's
    futures raise the client's error, which names the process at fault, after the job has failed; then the tensors'
    values are undefined.
    """

    def __init__(self, ready: "Future[Any]", tensors: Sequence[Any], store: Callable[[], None]) -> None:
        super().__init__()
        gpus = list({tensor.device for tensor in tensors if tensor.is_cuda})
        self.done: Future[None] = Future()
        self._tensors = list(tensors)
        stored = torch.futures.Future(devices=gpus or None)
        self._future = stored.then(_outcome(self.done, self._tensors))
        ready.add_done_callback(_storing(store, self.done, stored, self._tensors, gpus))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the results; on a GPU the current stream waits for them. The job's limits apply, not `timeout`."""
        self.done.result()
        self._future.wait()
        return True

    def get_future(self) -> Any:
        """A torch.futures.Future of the tensors. Within C++ an error becomes a RuntimeError with its text."""
        return self._future

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


def _outcome(done: "Future[None]", tensors: list[Any]) -> Callable[[Any], Any]:
    """What a future of PyTorch becomes: `set_exception` of these reaches C++ as a value and not as an error."""

    def outcome(_: Any) -> list[Any]:
        done.result()
        return tensors

    return outcome


def _storing(
    store: Callable[[], None], done: "Future[None]", stored: Any, tensors: list[Any], gpus: Sequence[Any]
) -> Callable[["Future[Any]"], None]:
    def complete(ready: "Future[Any]") -> None:
        try:
            ready.result()
            # Waiters of the tensors' future wait for what is queued on this stream.
            with torch.cuda.stream(torch.cuda.Stream(gpus[0]) if gpus else None):
                store()
                done.set_result(None)
                stored.set_result(tensors)
        except Exception as error:
            done.set_exception(error)
            stored.set_result(None)

    return complete


def done_work(tensors: Sequence[Any]) -> PendingWork:
    """One that is over, as nothing was to do."""
    done: Future[None] = Future()
    done.set_result(None)
    return PendingWork(done, tensors, lambda: None)


def joined(works: Sequence[PendingWork], tensors: Sequence[Any]) -> PendingWork:
    """One operation of several."""
    if len(works) == 1:
        return works[0]
    if not works:
        return done_work(tensors)
    return PendingWork(after([work.done for work in works], lambda: None), tensors, lambda: None)
