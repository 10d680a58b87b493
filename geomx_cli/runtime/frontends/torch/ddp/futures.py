"""Futures that PyTorch waits for."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import Work

from geomx_cli.core.futures import after, finished, pass_on

__all__ = ["Lane", "PendingWork", "joined"]

_Result = TypeVar("_Result")
_SLOTS = 8
"""After so many operations a name is used again. So the keys of rounds, which contain the name, stay bounded."""
_here = threading.local()


class Lane:
    """A sequence of collective calls that all workers make in the same order.

    The workers' rounds match by their order. Callbacks run when a result arrives, which is at different times in each
    worker. So the calls that callbacks make are ordered separately for each operation: each operation has its own lane.

    name: "" for the script's own calls.
    calls: how many have been compared.
    children: the prefix of its operations' names.
    while_waiting: called when any thread waits for an operation or its callbacks, with their future. It returns at the
        latest when the future is done.
    """

    def __init__(
        self, name: str, children: str, while_waiting: "Callable[[Future[Any]], None]" = lambda _: None
    ) -> None:
        self.name = name
        self.calls = 0
        self.while_waiting = while_waiting
        self._children = children
        self._lock = threading.Lock()
        self._begun = 0
        self._lanes: dict[int, Lane] = {}
        self._running: list[Future[None]] = []
        self._error: BaseException | None = None

    @staticmethod
    def present() -> "Lane | None":
        """The lane that this thread has entered."""
        return getattr(_here, "lane", None)

    def next(self) -> "Lane":
        """The lane of the next operation in this lane. Waits for the callbacks of an earlier operation of the same
        name.
        """
        with self._lock:
            slot, self._begun = self._begun % _SLOTS, self._begun + 1
            name = f"{self._children}.{slot}"
            previous, lane = self._lanes.get(slot), Lane(name, name, self.while_waiting)
            self._lanes[slot] = lane
        if previous is not None:
            previous.wait()
        return lane

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within the block, calls of this thread belong to this lane."""
        outer, _here.lane = self.present(), self
        try:
            yield
        finally:
            _here.lane = outer

    def run(self, after: "Future[Any]", action: Callable[[], None]) -> None:
        """Once `after` is done, run `action` in this lane, in a thread where it may wait for other operations."""
        over: Future[None] = Future()
        self._running.append(over)

        def run() -> None:
            try:
                with self.entered():
                    action()
            except Exception as error:
                self.fail(error)
            over.set_result(None)

        after.add_done_callback(lambda _: _threads.submit(run))

    def run_rounds(self, after: "Future[Any]", action: "Callable[[], Future[_Result]]") -> "Future[_Result]":
        """Like `run`, for an action that begins rounds. The result is the result of the future that the action returns.
        """
        done: Future[_Result] = Future()

        def begin() -> None:
            try:
                after.result()
                pass_on(action(), done)
            except Exception as error:
                done.set_exception(error)

        self.run(after, begin)
        return done

    def fail(self, error: BaseException) -> None:
        """A callback of this lane has raised `error`."""
        self._error = self._error or error

    def state(self) -> dict[str, int]:
        """Return the state between operations."""
        return {"calls": self.calls, "begun": self._begun}

    def load(self, state: Mapping[str, int]) -> None:
        """Continue from a `state`."""
        self.calls, self._begun = state["calls"], state["begun"]

    def wait(self) -> BaseException | None:
        """Wait until nothing runs in this lane and its operations' lanes. Return the failures there."""
        for over in self._running:
            self.while_waiting(over)
            over.result()
        errors = [self._error, *(lane.wait() for lane in list(self._lanes.values()))]
        return next((error for error in errors if error is not None), None)


class _Threads:
    """Threads for actions: as many as wait for each other. They end with the process."""

    def __init__(self) -> None:
        self._actions: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0

    def submit(self, action: Callable[[], None]) -> None:
        """Run the action in a thread that runs no other."""
        with self._lock:
            is_new = not self._free
            self._free -= not is_new
        self._actions.put(action)
        if is_new:
            threading.Thread(target=self._run, name="geomx-callbacks", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._actions.get()()
            with self._lock:
                self._free += 1


_threads = _Threads()


class PendingWork(Work):  # type: ignore[misc, unused-ignore]  # torch is not installed where mypy runs
    """A collective operation in progress, for the tensors that it changes.

    After the job has failed, `wait` and PyTorch's futures raise the client's error, which names the process at fault.
    The tensors' values are then undefined.

    ready: done when the results have arrived. Then `store` writes them to the tensors, and `done` is completed.
    lane: the lane to which calls in callbacks of the future belong. The callbacks may wait for other operations.
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
        """Wait for the results. On a GPU, the current stream waits for them. The job's limits apply, not `timeout`."""
        self.before_wait(self.done)
        self.lane.while_waiting(self.done)
        self.done.result()
        if self._stream is not None:
            torch.cuda.current_stream(self._gpus[0]).wait_stream(self._stream)
        return True

    def get_future(self) -> Any:
        """A torch.futures.Future of the tensors. Its callbacks run in a thread on which no results depend."""
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
        with torch.cuda.stream(self._stream):  # waiters of the future wait for the work on this stream
            error = self.done.exception()
            if error is None:
                self._future.set_result(self._tensors)
            else:
                self._future.set_exception(error)

    def is_completed(self) -> bool:
        """Whether the operation has succeeded or failed."""
        return self.done.done()

    def is_success(self) -> bool:
        """Whether the operation has succeeded."""
        return self.done.done() and self.done.exception() is None

    def exception(self) -> BaseException | None:
        """The error of the operation; None if it has not failed."""
        return self.done.exception() if self.done.done() else None

    def result(self) -> list[Any]:
        """The tensors."""
        return self._tensors

    def synchronize(self) -> None:
        """See `wait`."""
        self.wait()


class _Future(torch.futures.Future):  # type: ignore[misc, type-arg, unused-ignore]
    """Its callbacks run in a lane, whichever thread runs them. So do callbacks of the futures that `then` returns."""

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
                # The end of a backward pass raises the error, because C++ would take it for a value.
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
