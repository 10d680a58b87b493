"""The scalars that wait for the thread that writes them."""

import queue
import sys
import threading
from collections.abc import Iterator

from geomx_cli.observe.exports.scalars import Scalar

__all__ = ["Backlog"]

AHEAD = 10_000
EVERY = 1.0  # seconds between batches
PATIENCE = 60.0  # seconds of a wait for room, longer than a client takes to start


class Backlog:
    """Takes scalars from one thread, and passes them on in batches to another, the writer.

    With `waits`, as for the events of a finished job, `put` waits for room, at most a minute; after one wait in vain no
    more. What finds no room is dropped, and counted for `report`.
    """

    def __init__(self, *, waits: bool = False) -> None:
        self._patience = PATIENCE if waits else 0.0
        self._queue: queue.Queue[Scalar] = queue.Queue(AHEAD)
        self._over = threading.Event()
        self._abandoned = False
        self._dropped = 0

    def put(self, scalar: Scalar) -> None:
        """Add a scalar."""
        if self._abandoned:
            return
        try:
            self._queue.put(scalar, timeout=self._patience)
        except queue.Full:
            self._patience = 0.0
            self._dropped += 1

    def batches(self) -> Iterator[list[Scalar]]:
        """Yield what was put, each second or as soon as it is full, until `close` was called and all is yielded."""
        over = False
        while not over:
            over = self._over.wait(0 if self._queue.full() else EVERY)  # before the rest: nothing is put after it
            if batch := [self._queue.get() for _ in range(self._queue.qsize())]:
                yield batch

    def close(self) -> None:
        """Add nothing any more."""
        self._over.set()

    def abandon(self) -> None:
        """Take nothing any more, nor keep `put` waiting: the writer has ended early, which it has reported."""
        self._abandoned = True
        for _ in range(self._queue.qsize()):
            self._queue.get()

    def report(self, where: str) -> None:
        """Say how many scalars `where` lacks, if it does."""
        if self._dropped and not self._abandoned:
            what = f"{self._dropped} values of this job, which came faster than they could be written"
            print(f"warning: {where} lacks {what}", file=sys.stderr, flush=True)
