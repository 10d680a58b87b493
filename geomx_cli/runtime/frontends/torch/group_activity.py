"""Reports between the workers of a party's process group, besides collective operations."""

import atexit
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from geomx_cli.ps.cluster.liveness import Activity

if TYPE_CHECKING:
    from geomx_cli.contract.settings import Settings

__all__ = ["LAST_WAIT", "GroupActivity"]

LAST_WAIT = 5.0
"""Seconds for which a process that ends waits for others of its group."""
_PERIOD = 2.0
_SILENT = 10.0  # seconds without news of a worker whose Python does not run; its agent tells if it hangs


class GroupActivity:
    """Each worker reports when its training code last ran, because the members that exchange with the servers wait for
    all workers. The other workers also give the first worker the rows that it sends to the servers for all.

    Every worker reports to the others through the group's store. It uses a thread of its own, because operations of the
    store block if a host cannot be reached. A worker of which no news arrives counts as running.

    store: a separate connection to the group's store.
    on_stuck: called in that thread with the reason, if a `pending` operation waits here and no code of the party ran
        for the option `patience`.
    on_post: called in that thread of the first worker, with a rank and the bytes that this worker has left under
        `post_key`.
    """

    def __init__(
        self, settings: "Settings", store: Any, on_stuck: Callable[[str], None], on_post: Callable[[int, bytes], None]
    ) -> None:
        assert settings.rank is not None
        self._posts = dict.fromkeys(range(0 if settings.rank else settings.group_size), 0)  # taken, by rank
        self._on_post = on_post
        self._keys = [f"ran/{rank}" for rank in range(settings.group_size)]
        self._own = self._keys[settings.rank]
        self._store = store
        self._told = dict.fromkeys(self._keys, (b"", time.monotonic()))  # the newest reports, and when they arrived
        self._last = 0.0
        self._pending: deque[tuple[Any, float]] = deque()  # in the order in which they began
        self._patience, self._party, self._on_stuck = settings.number("patience"), settings.party, on_stuck
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="geomx-group", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def last(self) -> float:
        """When training code of this party last ran, as far as is known (time.monotonic seconds)."""
        return self._last

    def stop(self) -> None:
        """End the thread. If it returned from the store while the interpreter shuts down, it would abort the process.
        """
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(LAST_WAIT)
        self._pending.clear()

    def pending(self, work: Any) -> None:
        """An operation has begun that needs all workers of the party, and no other process. Thread-safe."""
        self._pending.append((work, time.monotonic()))

    def _run(self) -> None:
        activity, number = Activity(), 0
        with contextlib.suppress(RuntimeError):  # the store has ended with its worker, and the job with that
            while not self._ended.wait(_PERIOD):
                ran, number = activity.last(), number + 1
                self._store.set(self._own, f"{time.monotonic() - ran:.1f} {number}")
                self._last = max([ran, *(self._of(key) for key in self._keys if key != self._own)])
                while self._pending and self._pending[0][0].is_completed():
                    self._pending.popleft()
                if self._pending and self._idle(self._pending[0][1]) > self._patience:
                    waited = f"the workers of party {self._party} wait for one another: for {self._patience:g} s"
                    self._on_stuck(f"{waited} no code of theirs has run")
                self._take_posts()
            self._take_posts()

    @staticmethod
    def post_key(rank: int, number: int) -> str:
        """The key under which a worker leaves its posts, numbered from 0."""
        return f"post/{rank}/{number}"

    def _take_posts(self) -> None:
        ranks = list(self._posts)
        while ranks:  # in turn, because posts of one number are of the same step
            ranks = [rank for rank in ranks if self._take_post(rank)]

    def _take_post(self, rank: int) -> bool:
        if not self._store.check([key := self.post_key(rank, self._posts[rank])]):
            return False
        self._on_post(rank, self._store.get(key))
        self._store.delete_key(key)
        self._posts[rank] += 1
        return True

    def _idle(self, began: float) -> float:
        return time.monotonic() - max(began, self._last)

    def _of(self, key: str) -> float:
        now, (known, since) = time.monotonic(), self._told[key]
        words = self._store.get(key) if self._store.check([key]) else b""
        if words != known:
            self._told[key] = (words, now)
            return now - float(words.split()[0])
        return now if now - since > _SILENT else self._last
