"""Termination of asynchronous jobs: the rank-0 root counts the finished workers, and workers poll it.

Parties go through rounds independently, so no round shows that all other workers are done. A worker whose party has no
more data leaves the rounds, reports that, and polls until all have; the roots' weights are then final. A stop request
reaches the workers that still train in the same way, because a worker that has left cannot push.
"""

import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.untrusted import check_whole

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client

__all__ = ["TOPIC", "CompletionClient", "CompletionServer"]

TOPIC = "completion"
INTERVAL = 0.5
"""Polling interval of a worker in seconds."""
MAX_WORKERS = 65_536


class CompletionServer:
    """Counts the finished workers. For the server's loop only."""

    def __init__(self) -> None:
        self._done: set[int] = set()
        self._stop = False

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Handle a worker's report: its global rank, the number of training workers, whether it is done, whether all
        must stop.

        Return the number of unfinished workers, and whether a stop was requested. Raises InvalidSettings for an invalid
        field, and KeyError for a missing one; nothing has changed then.
        """
        rank, workers, done, stop = (body[name] for name in ("rank", "workers", "done", "stop"))
        check_whole("the number of workers", workers, 1, MAX_WORKERS)
        check_whole("the global rank", rank, 0, workers - 1)
        if type(done) is not bool or type(stop) is not bool:
            raise InvalidSettings(f"done and stop are {done!r} and {stop!r}", "each is true or false")
        if done:
            self._done.add(rank)
        self._stop |= stop
        return {"missing": max(0, workers - len(self._done)), "stop": self._stop}


class CompletionClient:
    """The worker's side. For the training thread only; raises the client's error after the job has failed."""

    def __init__(self, client: "Client") -> None:
        self._client = client
        self._asked: Future[dict[str, Any]] | None = None
        self._next = 0.0
        self._stop = False

    def stop_requested(self) -> bool:
        """Return whether a stop request of another worker is known; returns at once, and polls periodically."""
        if self._asked is not None and self._asked.done():
            self._stop = bool(self._asked.result()["stop"])
            self._asked = None
        if self._asked is None and not self._stop and time.monotonic() >= self._next:
            self._next = time.monotonic() + INTERVAL
            self._asked = self._client.control.ask(TOPIC, self._report(done=False, stop=False))
        return self._stop

    def leave(self) -> None:
        """Leave the rounds. This worker has the results of all its contributions, and the others stop waiting for it.
        """
        self._client.leave()

    def complete(self, *, stop: bool) -> bool:
        """Report that this worker is done, and whether all must stop; blocks. Return True if all workers are done."""
        return bool(self._client.control.request(TOPIC, self._report(done=True, stop=stop))["missing"] == 0)

    def _report(self, *, done: bool, stop: bool) -> "dict[str, Any]":
        ranks = {"rank": self._client.global_rank, "workers": self._client.num_all_workers}
        return {**ranks, "done": done, "stop": stop}
