"""What reaches who follows a job: messages of agents, news of the connections to them, and signals of the user."""

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from types import FrameType
from typing import Any

__all__ = [
    "Broken", "Gone", "Inbox", "InboxMessage", "Interrupt", "JsonObject", "Mended", "Notice", "Suspend",
    "interrupts_raised", "interrupts_to", "suspends_to",
]  # fmt: skip


class InboxMessage:
    """Base class of the messages in the inbox that no host has sent."""


@dataclass(frozen=True)
class Gone(InboxMessage):
    """The agent no longer exists or is unreachable."""

    how: str
    reachable: bool = True


@dataclass(frozen=True)
class Broken(InboxMessage):
    """The connection broke; reconnection is attempted for `limit` seconds (0: without limit)."""

    why: str
    limit: float = 0.0


@dataclass(frozen=True)
class Mended(InboxMessage):
    """The connection is restored."""


@dataclass(frozen=True)
class Notice(InboxMessage):
    """A warning about the connection."""

    message: str


@dataclass(frozen=True)
class Interrupt(InboxMessage):
    """The user asks for the job's end, `by` Ctrl-C or the signal of this name."""

    by: str


@dataclass(frozen=True)
class Suspend(InboxMessage):
    """The user suspends this process (Ctrl-Z), not the job."""


JsonObject = dict[str, Any]
Inbox = SimpleQueue[tuple[str, JsonObject | InboxMessage]]
"""Messages from hosts, by host name, and local events."""


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
