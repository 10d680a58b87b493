"""Calls a function anew at each line that it executes, as signals that come within a signal handler do."""

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["reentered"]


def reentered(function: Callable[[], object], limit: float = 10.0) -> bool:
    """Whether it returns within `limit` seconds if it is called anew, once, at each line that it executes in Python."""
    within = False

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal within
        if event == "line" and not within:
            within = True
            function()
            within = False
        return trace

    def call() -> None:
        sys.settrace(trace)
        function()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(limit)
    return not thread.is_alive()
