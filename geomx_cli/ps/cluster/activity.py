"""Whether a process's training code runs, by the processor time that it uses: others wait for it as long as it does."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Activity"]

SPAN = 0.5
"""Seconds between measurements, at least."""
POLLS, COMPUTES = 1e-4, 0.03
"""Shares of a processor. The main thread runs if it uses POLLS: one that sleeps between looks at a clock uses several
times that, and one that waits for a lock or a message nothing. Other threads, and the processes that it has started,
count from COMPUTES on: monitors and idle loaders of data wake up now and then."""
MOST_CHILDREN = 64
TICK = 1 / os.sysconf("SC_CLK_TCK")


class Activity:
    """Measures the process, without the thread that measures, from the first call of `last`. waits: it waits for others
    for now, and what it uses meanwhile, as to ask whether they wait for it, is no training.
    """

    def __init__(self) -> None:
        self._main_clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        self._ran = self._measured = 0.0
        self._main = self._rest = 0.0
        self.waits = False
        self._children: float | None = None  # while nothing else runs, as it takes a look at each thread

    def last(self) -> float:
        """When the training code last ran, as far as was measured (time.monotonic seconds)."""
        now = time.monotonic()
        span = now - self._measured
        if span >= SPAN:
            main = time.clock_gettime(self._main_clock)
            rest = time.process_time() - main - time.thread_time()
            if self.waits:
                self._children = None
            elif main - self._main >= POLLS * span or rest - self._rest >= COMPUTES * span:
                self._ran, self._children = now, None
            else:
                before, self._children = self._children, _descendants_used()
                if before is not None and self._children - before >= COMPUTES * span:
                    self._ran = now
            self._main, self._rest, self._measured = main, rest, now
        return self._ran


def _descendants_used() -> float:
    """Seconds of processor time of the processes that this one has started, and of theirs."""
    used, found, children = 0.0, 0, list(_children(os.getpid()))
    while children and (found := found + 1) <= MOST_CHILDREN:
        pid = children.pop()
        children += _children(pid)
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        used += (int(fields[11]) + int(fields[12])) * TICK
    return used


def _children(pid: int) -> Iterator[int]:
    """The processes that any thread of `pid` has started."""
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            yield from map(int, (thread / "children").read_text().split())
    except OSError:  # it has just ended, or the kernel has no such file
        return
