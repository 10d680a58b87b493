"""Ctrl-C and SIGTERM in a process started by hand: notify the peers, print one line, exit.

A scheduler's or server's loop ends with a KeyboardInterrupt between two turns. A worker's main thread gets one wherever
it is, so a script can still save data. Python runs signal handlers only in Python code, and a worker's main thread may
block in MXNet for long, so a thread also watches for signals. `geomx launch` does not use this module: its agents
notify all processes and ensure that they end.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from types import FrameType
from typing import NoReturn

from geomx_cli.core.errors import Interrupted

__all__ = ["Signals", "interrupted"]

_NOTICE = 0.5
"""Seconds for the main thread to handle the signal, if it is in Python code."""
_RETURN = 3.0
"""Seconds for it to return from MXNet once the operation it waits for has failed."""


def interrupted(raised: BaseException) -> Interrupted:
    """Return the error for a KeyboardInterrupt, with the conventional exit status: 130, or 143 after SIGTERM."""
    number = raised.number if isinstance(raised, _Signalled) else signal.SIGINT
    error = Interrupted("interrupted by Ctrl-C" if number == signal.SIGINT else "ended by SIGTERM")
    error.exit_code = 128 + number
    return error


class _Signalled(KeyboardInterrupt):
    """Raised in the main thread on SIGINT or SIGTERM."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Signals:
    """Create once, in the main thread. `interruption`: the error for the signal received, if any."""

    def __init__(self) -> None:
        self.interruption: Interrupted | None = None
        self._noticed: SimpleQueue[None] = SimpleQueue()  # an Event's lock could stop a handler within a handler
        self._interrupt: Callable[[KeyboardInterrupt], None] | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def deliver_to(self, interrupt: Callable[[KeyboardInterrupt], None]) -> None:
        """Call `interrupt` on a signal from now on, instead of raising wherever the main thread is."""
        self._interrupt = interrupt

    def watch(self, notify: Callable[[Interrupted], None]) -> None:
        """Start the watching thread; call at most once; `notify` reports the reason to other processes and makes the
        main thread's pending wait fail. It is called if the main thread does not return to Python by itself.
        """
        near, self._far = socket.socketpair()
        self._far.setblocking(False)
        signal.set_wakeup_fd(self._far.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._poll, args=(near, notify), name="geomx-signals", daemon=True).start()
        os.register_at_fork(after_in_child=_forget)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Signal handler; runs in the main thread once it executes Python code."""
        self._noticed.put(None)
        signalled = _Signalled(number)
        self.interruption = interrupted(signalled)
        if self._interrupt is None:
            raise signalled
        self._interrupt(signalled)

    def _poll(self, near: socket.socket, notify: Callable[[Interrupted], None]) -> None:
        """Watcher thread: the wakeup socket receives each signal's number, whatever the main thread executes."""
        while number := near.recv(1):
            # A script may have replaced our handler, or handle other signals.
            if signal.getsignal(number[0]) == self._handle and not self._handled(_NOTICE):
                self.interruption = interrupted(_Signalled(number[0]))
                notify(self.interruption)
                if not self._handled(_RETURN):
                    _die(self.interruption)

    def _handled(self, limit: float) -> bool:
        """Whether the handler has run since the last call, or does within `limit` seconds."""
        try:
            self._noticed.get(timeout=limit)
        except Empty:
            return False
        while not self._noticed.empty():
            self._noticed.get()
        return True


def _forget() -> None:
    """In a forked child: detach from the shared wakeup socket."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _die(error: Interrupted) -> NoReturn:
    """Exit at once: the main thread is stuck outside Python."""
    print(f"error: {error.message}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)
