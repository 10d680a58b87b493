"""The order of collective calls: that of the script, and those of callbacks, which run beside it.

Rounds of workers meet by their order. Callbacks run whenever a result arrives, at other times in each worker, so what
they call is ordered by the operation that they belong to: each operation has a lane of its own.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

from geomx_cli.core.futures import pass_on

__all__ = ["Lane"]

_Result = TypeVar("_Result")
_SLOTS = 8
"""Operations after which a name is used again, so that the keys of rounds, which contain it, stay bounded."""
_here = threading.local()


class Lane:
    """A sequence of collective calls that all workers make in the same order. name: "" for the script's own calls.
    calls: how many have been compared. children: the prefix of its operations' names. while_waiting: called where any
    thread waits for an operation or its callbacks, with their future; returns at the latest when that is done.
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
        """The lane of the next operation of this one. Waits for the callbacks of an earlier one of that name."""
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
        """Calls of this thread belong to this lane."""
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

    def begin(self, after: "Future[Any]", action: "Callable[[], Future[_Result]]") -> "Future[_Result]":
        """As `run`, for an action that begins rounds; returns the result of the future that it returns."""
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

    def wait(self) -> BaseException | None:
        """Wait until nothing runs in this lane and those of its operations; return what failed there."""
        for over in self._running:
            self.while_waiting(over)
            over.result()
        errors = [self._error, *(lane.wait() for lane in list(self._lanes.values()))]
        return next((error for error in errors if error is not None), None)


class _Threads:
    """As many threads as actions wait for each other; ended with the process."""

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
