"""ESync in a worker: after each step the question whether to take another, or to synchronise."""

import statistics
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client

__all__ = ["EsyncClient"]

REMEMBERED = 5


class EsyncClient:
    """Asks the state server of the job, over the connections that are there. For the training thread only.

    It tells the worker's steps in this round (k), how long one takes (c, in seconds, with whatever came before it in
    that step), and how long ago the last one ended. c is the median of the last ones: a single one in which the system
    paused would make a fast worker the slowest, or the slowest's end seem far. Nobody is ready before the
    `--min-local-steps`-th step of a round, so no answer is waited for until then: that would make a worker far from the
    state server the slowest. With `--esync-query overlapped` the answer to one step's question may be taken after the
    next step; a worker that is the slowest waits for it, as its next step would keep all waiting.
    epsilon: that of the last answer, in seconds.
    Raises what the client does when the job has failed. What the state server has refused is raised where this worker
    next waits: for an answer, or at the begin of a round.
    """

    def __init__(self, client: "Client") -> None:
        settings = client.settings
        party = settings.text("esync_scope") == "party"
        self.rounds = 0
        self.epsilon = 0.0
        self._client = client
        self._rank = client.rank if party else client.global_rank
        self._workers = client.num_workers if party else client.num_all_workers
        self._waits = settings.text("esync_query") == "blocking"
        self._least = int(settings.number("min_local_steps"))
        self._slowest = True  # until it is known
        self._asked: Future[dict[str, Any]] | None = None
        self._told: deque[Future[dict[str, Any]]] = deque()
        self._left = False
        self._steps = 0
        self._ended = 0.0
        self._times: deque[float] = deque(maxlen=REMEMBERED)

    def begin(self) -> None:
        """A round begins: this worker has the weights that it goes on from."""
        self.settle()
        self.rounds += 1
        self._steps = 0
        if self.rounds > 1 and not self._left:
            self._told.append(self._ask("enter", t=self.rounds))
        self._ended = time.monotonic()

    def step(self) -> bool:
        """A step has ended. True if it is time to synchronise."""
        now = time.monotonic()
        self._times.append(now - self._ended)
        self._ended, self._steps = now, self._steps + 1
        if self._ready(wait=False):
            return True
        told = {"k": self._steps, "c": statistics.median(self._times), "age": 0.0}
        if self._asked is None:
            self._asked = self._ask("query", **told)
        elif self._steps == self._least:  # the answer under way is about a step that could not be the last
            self._told.append(self._asked)
            self._asked = self._ask("query", **told)
        return self._steps >= self._least and self._ready(wait=self._waits or self._slowest)

    def leave(self) -> None:
        """This worker takes no more steps; nobody needs to reckon with it. Leaving twice changes nothing."""
        if not self._left:
            self._left, self._asked = True, None
            self._told.append(self._ask("leave"))

    def settle(self) -> None:
        """Wait until the state server knows all that it was told. Raises what it has refused."""
        while self._told:
            self._told.popleft().result()

    def _ready(self, *, wait: bool) -> bool:
        """Whether the answer, if it is here, says that this worker is ready."""
        if self._asked is None or not (wait or self._asked.done()):
            return False
        answer = self._asked.result()
        self._asked = None
        self.settle()  # was told before the question
        self._slowest = bool(answer["slowest"])
        self.epsilon = float(answer["epsilon"])
        return bool(answer["ready"])

    def _ask(self, do: str, **fields: float) -> "Future[dict[str, Any]]":
        return self._client.ask("esync", {"do": do, "r": self._rank, "workers": self._workers, **fields})
