"""Convert terminating signals to exceptions or messages, so that cleanup runs."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from geomx_cli.jobs.actions.agent_connection import Inbox
from geomx_cli.jobs.actions.local_messages import Interrupt, Suspend

__all__ = ["interrupts_raised", "interrupts_to", "suspends_to"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupts_raised() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, like Ctrl-C, unless the process ignores them. Main thread only."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupts_to(inbox: Inbox, hear: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP put an Interrupt into `inbox` and call `hear`, which must not take a lock that the
    main thread takes. Main thread only.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        inbox.put(("", Interrupt()))  # SimpleQueue.put may be called from a signal handler
        hear()

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def suspends_to(inbox: Inbox) -> Iterator[None]:
    """Ctrl-Z puts a Suspend into `inbox`, unless the process ignores SIGTSTP. Main thread only."""

    def handle(number: int, frame: FrameType | None) -> None:
        inbox.put(("", Suspend()))

    before = signal.getsignal(signal.SIGTSTP)
    if before != signal.SIG_IGN:
        signal.signal(signal.SIGTSTP, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)
