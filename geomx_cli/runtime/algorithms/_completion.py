"""How the workers of an asynchronous job end together: the rank-0 root counts who is done, and workers ask it.

Parties go through rounds by themselves there, so no round tells one that all the others are done. A worker whose party
has no more data leaves the rounds, reports that, and asks now and then until all have; what the roots hold then is
final. A request to stop reaches the workers that still train in the same way, for who has left cannot push any more.
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
"""Seconds between two questions of a worker."""
MAX_WORKERS = 65_536


class CompletionServer:
    """Counts the workers that are done. For the server's loop only."""

    def __init__(self) -> None:
        self._done: set[int] = set()
        self._stop = False

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """What a worker reports: its global rank, how many workers train, whether it is done, whether all are to stop.

        Answers how many are not done, and whether somebody asked to stop. Raises InvalidSettings for a field that makes
        no sense, and KeyError for one that is missing; nothing has changed then.
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
    """A worker's end of it. For the training thread only; raises what the client does when the job has failed."""

    def __init__(self, client: "Client") -> None:
        self._client = client
        self._asked: Future[dict[str, Any]] | None = None
        self._next = 0.0
        self._stop = False

    def stop_requested(self) -> bool:
        """Whether another worker is known to have asked all to stop; returns at once, and asks anew now and then."""
        if self._asked is not None and self._asked.done():
            self._stop = bool(self._asked.result()["stop"])
            self._asked = None
        if self._asked is None and not self._stop and time.monotonic() >= self._next:
            self._next = time.monotonic() + INTERVAL
            self._asked = self._client.ask(TOPIC, self._report(done=False, stop=False))
        return self._stop

    def leave(self) -> None:
        """This worker contributes no more: nobody waits for it, and it has the results of all that it contributed."""
        self._client.leave()

    def complete(self, *, stop: bool) -> bool:
        """Report that this worker is done, and whether all are to stop; blocks. True if all workers are done."""
        return bool(self._client.control(TOPIC, self._report(done=True, stop=stop))["missing"] == 0)

    def _report(self, *, done: bool, stop: bool) -> "dict[str, Any]":
        ranks = {"rank": self._client.global_rank, "workers": self._client.num_all_workers}
        return {**ranks, "done": done, "stop": stop}
