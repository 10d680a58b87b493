"""Prepares batches in a thread, so that the trainer does not wait for them."""

import contextlib
import queue
import threading
from collections.abc import Iterator

from geomx_cli.runtime.training.samples import Batch

__all__ = ["Prefetch"]

AHEAD = 2
POLL = 0.5


class Prefetch:
    """Yields the items of `batches` in order, with up to two prefetched; its exceptions are raised in the same place.

    Must be closed: its thread ends then, at the latest after the batch in progress.
    """

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._made: queue.Queue[Batch | BaseException | None] = queue.Queue(AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._make, name="batches", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        item = None if self._closed.is_set() else self._made.get()
        if item is None:
            self._closed.set()
            raise StopIteration
        if isinstance(item, BaseException):
            self._closed.set()
            raise item
        return item

    def close(self) -> None:
        """Stop prefetching."""
        self._closed.set()

    def _make(self) -> None:
        try:
            for batch in self._batches:
                if not self._put(batch):
                    return
            self._put(None)
        except Exception as error:
            self._put(error)

    def _put(self, item: Batch | BaseException | None) -> bool:
        """Return False if the consumer has closed."""
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._made.put(item, timeout=POLL)
                return True
        return False
