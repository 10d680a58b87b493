"""Signals that would end this process become messages, so that nothing is interrupted half-way."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from geomx_cli.control.line import Inbox

__all__ = ["interrupts_to"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)


@contextmanager
def interrupts_to(inbox: Inbox, hear: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP put "interrupt" into `inbox`, and call `hear`, which may take no lock that the main
    thread takes; Ctrl-Z puts "suspend" there. For the main thread.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        suspends = number == signal.SIGTSTP
        inbox.put(("", {"type": "suspend" if suspends else "interrupt"}))  # a signal handler may call SimpleQueue.put
        if not suspends:
            hear()

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
