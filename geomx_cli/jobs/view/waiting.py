"""One line of status while something takes longer than 2 s."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["SetStatus", "ticking", "waiting"]

SetStatus = Callable[[str], None]
_SLOW = 2.0  # seconds before a wait is reported
_REFRESH, _LINE_EVERY = 0.5, 10.0


@contextmanager
def ticking(text: str, show: SetStatus, every: float) -> Iterator[SetStatus]:
    """Within, call `show` from a thread after 2 s and then every `every` seconds, with the text and the seconds so far.
    Yields a function that changes the text; any thread may call it.
    """
    current, over, began = [text], threading.Event(), time.monotonic()

    def tick() -> None:
        pause = _SLOW
        while not over.wait(pause):
            show(f"{current[0]} ({time.monotonic() - began:.0f} s)")
            pause = every

    thread = threading.Thread(target=tick, name="waiting", daemon=True)
    thread.start()
    try:
        yield lambda text: current.__setitem__(0, text)
    finally:
        over.set()
        thread.join()


@contextmanager
def waiting(text: str) -> Iterator[SetStatus]:
    """`ticking` on stderr: a line that is replaced and finally cleared in a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        with ticking(text, lambda line: print(line, file=sys.stderr, flush=True), _LINE_EVERY) as set_text:
            yield set_text
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:

        def show(line: str) -> None:
            live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

        with ticking(text, show, _REFRESH) as set_text:
            yield set_text
