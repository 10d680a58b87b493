"""The event loop of every scheduler, server and client: one thread, many sockets, some timers."""

import heapq
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

__all__ = ["Loop", "Timer"]


class Timer:
    """A scheduled call; `cancel` revokes it."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Revoke the call."""
        self.callback = None


class Loop:
    """Calls handlers when sockets are readable, and timers when they are due.

    All methods except `submit` are for the loop's own thread, and `interrupt` also for its signal handlers. An
    exception in a handler ends `run` with that exception. Invalid input is refused where it is decoded, so an exception
    here is a bug in this process.
    """

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._handlers: dict[object, Callable[[], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._inbox: deque[Callable[[], None]] = deque()
        self._is_woken = False  # the loop will still empty the inbox
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._idle: list[Callable[[], None]] = []
        self._stopping = self._closed = False
        self._interruption: KeyboardInterrupt | None = None
        self._lock = threading.RLock()  # reentrant: the garbage collector may call `submit` while this thread holds it
        self.watch(self._wake, self._drain_inbox)

    def watch(self, source: zmq.Socket[bytes] | int, handler: Callable[[], None]) -> None:
        """Call `handler` whenever `source` (a ZeroMQ socket or file descriptor) is readable."""
        self._poller.register(source, zmq.POLLIN)
        self._handlers[source] = handler

    def unwatch(self, source: zmq.Socket[bytes] | int) -> None:
        """Stop watching `source`."""
        self._poller.unregister(source)
        del self._handlers[source]

    def each_turn(self, callback: Callable[[], None]) -> None:
        """Call `callback` after each batch of handlers and timers, before the loop sleeps."""
        self._idle.append(callback)

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` once at `when` (time.monotonic seconds)."""
        timer = Timer(callback)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` once, `delay` seconds from now."""
        return self.call_at(time.monotonic() + delay, callback)

    def every(self, interval: float, callback: Callable[[], None]) -> None:
        """Call `callback` every `interval` seconds while the loop runs."""

        def tick() -> None:
            self.call_later(interval, tick)
            callback()

        self.call_later(interval, tick)

    def submit(self, callback: Callable[[], None]) -> None:
        """Make the loop's thread call `callback` soon. The only method for other threads.

        After `close` the callback runs immediately in the caller, so that no one waits for it forever.
        """
        with self._lock:
            if not self._closed:
                self._inbox.append(callback)
                if not self._is_woken:
                    self._is_woken = True
                    os.eventfd_write(self._wake, 1)
                return
        callback()

    def stop(self) -> None:
        """Let `run` return after the current turn."""
        self._stopping = True

    def interrupt(self, interruption: KeyboardInterrupt) -> None:
        """Make `run` raise this error between two turns. If a signal handler raised it itself, it could interrupt a
        destructor, where Python ignores exceptions, or leave a message half handled.
        """
        self._interruption = interruption
        if not self._closed:
            os.eventfd_write(self._wake, 1)

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Run until `stop` is called or `until()` is true. Raises the error that `interrupt` received."""
        while not self._stopping and not (until is not None and until()):
            if self._interruption is not None:
                interruption, self._interruption = self._interruption, None
                raise interruption
            for source, _ in self._poller.poll(self._sleep_ms()):
                handler = self._handlers.get(source)
                if handler is not None:
                    handler()
            self._run_timers()
            for callback in self._idle:
                callback()

    def close(self) -> None:
        """Release the wake-up descriptor and run the remaining submitted calls; the loop cannot run again."""
        self._stopping = True
        with self._lock:
            self._closed = True
            os.close(self._wake)
        while self._inbox:
            self._inbox.popleft()()

    def _sleep_ms(self) -> int:
        if not self._timers:
            return 1000
        return max(0, min(1000, int((self._timers[0][0] - time.monotonic()) * 1e3 + 0.999)))

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.callback is not None:
                timer.callback()

    def _drain_inbox(self) -> None:
        os.eventfd_read(self._wake)
        self._is_woken = False  # before the inbox is read: a callback that comes from now on wakes the loop again
        while self._inbox:
            self._inbox.popleft()()
