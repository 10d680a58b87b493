"""The thread of a server in which codecs encode, beside the loop, if its host has a core for it."""

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["Encoder", "at_once"]

_Made = TypeVar("_Made")
Submit = Callable[[Callable[[], None]], None]


def at_once(encode: Callable[[], _Made], then: Callable[[_Made], None]) -> None:
    """Encode in the calling thread: as Encoder.run, where no codec makes that worth another one."""
    then(encode())


class Encoder:
    """Encodes one array after another, while the loop receives, adds and sends others.

    submit: has the loop's thread call a function. host_threads: threads that compute in all processes of the job on
    this machine, 0 if not known. Without one core more there is no thread of its own, as it would take the time of
    another process. Used by the loop's thread only.
    """

    def __init__(self, submit: Submit = lambda call: call(), host_threads: int = 0) -> None:
        self._submit = submit
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        if 0 < host_threads < len(os.sched_getaffinity(0)):
            self._thread = threading.Thread(target=self._run, name="geomx-encoder", daemon=True)
            self._thread.start()

    @property
    def beside(self) -> bool:
        """Whether there is a thread."""
        return self._thread is not None

    def run(self, encode: Callable[[], _Made], then: Callable[[_Made], None]) -> None:
        """Call `encode` in the thread, and then `then` with what it returned in the loop's; without a thread, both at
        once. What `encode` raises is raised in the loop's thread.
        """
        if self._thread is None:
            at_once(encode, then)
        else:
            self._work.put(lambda: self._encode(encode, then))

    def close(self) -> None:
        """Encode nothing more, and call no `then`; wait for the array that is being encoded."""
        self._closed = True
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (each := self._work.get()) is not None:
            if not self._closed:
                each()

    def _encode(self, encode: Callable[[], _Made], then: Callable[[_Made], None]) -> None:
        made: Future[_Made] = Future()
        try:
            made.set_result(encode())
        except BaseException as error:
            made.set_exception(error)
        self._submit(lambda: None if self._closed else then(made.result()))
