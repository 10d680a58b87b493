"""How a process learns that its job is asked to stop: from its agent, or by a signal from somebody else.

Batch systems and clouds send SIGTERM, or what they were told to, to one process or to all of a host. So a process that
may go on for a while goes on, and tells its agent, which lets all processes of the job know. SIGTERM that the agent
itself sends ends the process as usual.
"""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from geomx_cli.core.events import Signalled, StopAwaited
from geomx_cli.core.stop_files import StopFiles

if TYPE_CHECKING:
    from geomx_cli.core.event_log import EventLog

__all__ = ["StopNotice", "pass_on_signals"]

_NUMBERS = (signal.SIGTERM, signal.SIGUSR1)
_FRAMEWORKS = ("geomx_cli.", "lightning.", "pytorch_lightning.")
"""Handlers of these packages would end the process, or its training, without the other workers."""


class StopNotice:
    """Whether the job is asked to stop. Create it once, when a worker first looks at it. Before, a stop ends the worker
    by SIGTERM, as any other process.

    If it is created in the main thread, SIGTERM and SIGUSR1 ask the job to stop from then on. A handler that the script
    set before is called too. A handler that it sets later replaces this one. A signal that the process ignores stays
    ignored. Without an agent a second SIGTERM ends the process.
    """

    def __init__(self, events: "EventLog", stop_file: str) -> None:
        self._events = events
        self._files = StopFiles(stop_file)
        self._signal = ""
        self._is_told = self._is_asked = False
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in _NUMBERS:
                if (before := signal.getsignal(number)) != signal.SIG_IGN:
                    self._before[number] = before
                    signal.signal(number, self._handle)
            os.register_at_fork(after_in_child=self._forget)
        events.write(StopAwaited())

    @property
    def is_given(self) -> bool:
        """Whether the job is asked to stop. This also reports a signal to the agent."""
        if self._signal and not self._is_told:
            self._is_told = True
            self._events.write(Signalled(signal=self._signal))
        self._is_asked = self._is_asked or bool(self._signal) or self._files.asked
        return self._is_asked

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        if number == signal.SIGTERM and (self._files.ends or (self._signal and not self._files.path)):
            if callable(before):
                before(number, frame)
            else:
                _end(number)
            return
        self._signal = self._signal or signal.Signals(number).name
        for handler in getattr(before, "signal_handlers", [before]):  # of Lightning, with the script's own among them
            if callable(handler) and not str(getattr(handler, "__module__", "")).startswith(_FRAMEWORKS):
                handler(number, frame)

    def _forget(self) -> None:
        """In a forked child, whose parent may end it by SIGTERM: restore the earlier handlers."""
        for number, before in self._before.items():
            with suppress(ValueError, TypeError):  # not in the main thread; or a handler that Python has not set
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, before)


def pass_on_signals(submit: Callable[[Callable[[], None]], object], events: "EventLog", stop_file: str) -> None:
    """Let a scheduler or server continue after SIGTERM and SIGUSR1, and report the signal to its agent. Workers may
    need this process until they have ended. Call it in the main thread. submit: runs a call in the loop.
    """
    files = StopFiles(stop_file)

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and files.ends:
            _end(number)
            return
        told = Signalled(signal=signal.Signals(number).name)
        submit(lambda: events.write(told))

    for number in _NUMBERS:
        signal.signal(number, handle)


def _end(number: int) -> None:
    """End by the signal, as without a handler."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
