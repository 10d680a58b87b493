"""Convert terminating signals to exceptions or messages, so that cleanup runs."""

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

from geomx_cli.jobs.actions.agent_connection import Inbox, Interrupt, Suspend

__all__ = ["interrupts_raised", "interrupts_to", "suspends_to"]


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], object], *numbers: int) -> Iterator[None]:
    """Handle these signals by `handler`, and as before afterwards."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _not_ignored(*numbers: int) -> Iterator[int]:
    return (number for number in numbers if signal.getsignal(number) != signal.SIG_IGN)


def interrupts_raised() -> AbstractContextManager[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, like Ctrl-C, unless the process ignores them. Main thread only."""
    return _handled(signal.default_int_handler, *_not_ignored(signal.SIGTERM, signal.SIGHUP))


def interrupts_to(inbox: Inbox, hear: Callable[[], object] = lambda: None) -> AbstractContextManager[None]:
    """Ctrl-C, and SIGTERM and SIGHUP unless the process ignores them (nohup), put an Interrupt into `inbox` and call
    `hear`, which must not take a lock that the main thread takes. Main thread only.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        by = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        inbox.put(("", Interrupt(by)))  # SimpleQueue.put may be called from a signal handler
        hear()

    return _handled(handle, signal.SIGINT, *_not_ignored(signal.SIGTERM, signal.SIGHUP))


def suspends_to(inbox: Inbox) -> AbstractContextManager[None]:
    """Ctrl-Z puts a Suspend into `inbox`, unless the process ignores SIGTSTP. Main thread only."""
    return _handled(lambda number, frame: inbox.put(("", Suspend())), *_not_ignored(signal.SIGTSTP))
