"""Ctrl-C and SIGTERM in a process that was started by hand: the others are told, one line is printed, it ends.

The main thread gets a KeyboardInterrupt where it stands, so a script may still save something. It only notices when it
is in Python, and a worker's may be inside MXNet for long: so a thread looks, too. Under `geomx launch` nothing of this
is needed: its agents tell everybody, and see to it that all processes end.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from geomx_cli.core.errors import Interrupted

__all__ = ["Signals", "interrupted"]

_NOTICE = 0.5
"""Seconds in which the main thread notices by itself, if it is in Python."""
_RETURN = 3.0
"""Seconds for it to come back from MXNet once what it waits for has failed."""


def interrupted(told: BaseException) -> Interrupted:
    """The error for a KeyboardInterrupt, with the exit status that a shell expects: 130, or 143 after SIGTERM."""
    number = told.number if isinstance(told, _Signalled) else signal.SIGINT
    error = Interrupted("interrupted by Ctrl-C" if number == signal.SIGINT else "ended by SIGTERM")
    error.exit_code = 128 + number
    return error


class _Signalled(KeyboardInterrupt):
    """SIGINT or SIGTERM has come."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Signals:
    """Made once, in the main thread. `told` is the signal that has come, as an error, if any."""

    def __init__(self) -> None:
        self.told: Interrupted | None = None
        self._noticed = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def watch(self, tell: Callable[[Interrupted], None]) -> None:
        """Have a thread look too; call it at most once. `tell` tells the other processes why this one ends, and makes
        what the main thread waits for fail. It is called when that does not come back to Python by itself.
        """
        near, self._far = socket.socketpair()
        self._far.setblocking(False)
        signal.set_wakeup_fd(self._far.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._look, args=(near, tell), name="geomx-signals", daemon=True).start()
        os.register_at_fork(after_in_child=_forget)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, as soon as it is in Python."""
        self._noticed.set()
        signalled = _Signalled(number)
        self.told = interrupted(signalled)
        raise signalled

    def _look(self, near: socket.socket, tell: Callable[[Interrupted], None]) -> None:
        """In a thread: the system writes the number of each signal into the socket, wherever the main thread is."""
        while number := near.recv(1):
            # A script may have put a handler of its own in the place of ours, or handle other signals.
            if signal.getsignal(number[0]) == self._handle and not self._noticed.wait(_NOTICE):
                self.told = interrupted(_Signalled(number[0]))
                tell(self.told)
                if not self._noticed.wait(_RETURN):
                    _die(self.told)
            self._noticed.clear()


def _forget() -> None:
    """In a forked child, which shares the socket: its signals are its own."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _die(error: Interrupted) -> NoReturn:
    """End now: the main thread is stuck where Python cannot reach it."""
    print(f"error: {error.message}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)
