"""ESync's worker side: after each step, asks whether to take another step or synchronize."""

import statistics
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from geomx_cli.core.futures import after
from geomx_cli.runtime.training.state import State

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client

__all__ = ["EsyncClient"]

REMEMBERED = 5


class EsyncClient:
    """Queries the job's state server over the existing connections. For the training thread only.

    It reports the worker's steps in this round (k), the duration of one (c, in seconds, including any work before it in
    that step), and the age of the last step's end. With `--esync-query overlapped` the answer to one step's query may
    come after the next step; the slowest worker waits for it, as its next step would delay all others. Raises the
    client's error after the job has failed. Errors from the state server are raised at this worker's next wait: for an
    answer, or at the start of a round.

    rounds: begun.
    epsilon: seconds, from the last answer.
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
        self._slowest = True  # until known otherwise
        self._asked: Future[dict[str, Any]] | None = None
        self._reports: deque[Future[dict[str, Any]]] = deque()
        self._left = False
        self._steps = 0
        self._ended = 0.0
        self._times: deque[float] = deque(maxlen=REMEMBERED)

    def begin(self) -> None:
        """Start a round: this worker has received the weights it starts from."""
        if self._asked is not None:  # about a step of the last round, which others have ended
            self._reports.append(self._asked)
            self._asked = None
        self.settle()
        self.rounds += 1
        self._steps = 0
        if self.rounds > 1 and not self._left:
            self._reports.append(self._request("enter", t=self.rounds))
        self._ended = time.monotonic()

    def step(self) -> bool:
        """Record the end of a step. Return True if it is time to synchronize."""
        now = time.monotonic()
        self._times.append(now - self._ended)
        self._ended, self._steps = now, self._steps + 1
        if self._ready(wait=False):
            return True
        # The median: one step that the system delays would make a fast worker appear the slowest.
        report = {"k": self._steps, "c": statistics.median(self._times), "age": 0.0}
        if self._asked is None:
            self._asked = self._request("query", **report)
        elif self._steps == self._least:  # the pending answer concerns a step that could not be the last
            self._reports.append(self._asked)
            self._asked = self._request("query", **report)
        # No worker is ready earlier: if it waited for those answers, one far from the server would be the slowest.
        return self._steps >= self._least and self._ready(wait=self._waits or self._slowest)

    def state(self) -> State:
        """Return what numbers this worker's reports. Durations are measured anew, a pending query is asked again."""
        return State({"rounds": self.rounds, "steps": self._steps, "left": self._left, "epsilon": self.epsilon})

    def load(self, state: State) -> None:
        """Continue from a `state`, in place of the first `begin`: the state server knows the round already."""
        self.rounds, self._steps, self._left, self.epsilon = (
            state.values[name] for name in ("rounds", "steps", "left", "epsilon")
        )
        self._ended = time.monotonic()

    def awaited(self) -> "Future[bool]":
        """Ask whether another worker of this round has been told to synchronize: this one waits for something else
        meanwhile, and takes no step.
        """
        asked = self._request("wait")
        return after([asked], lambda: bool(asked.result()["ready"]))

    def waited(self, seconds: float) -> None:
        """The last seconds, of which `begin` may have been called in some, belong to no step."""
        self._ended = min(time.monotonic(), self._ended + seconds)

    def leave(self) -> None:
        """Report that this worker takes no more steps; others stop waiting for it. Idempotent."""
        if not self._left:
            self._left, self._asked = True, None
            self._reports.append(self._request("leave"))

    def settle(self) -> None:
        """Wait until the state server has acknowledged all reports. Raises its errors."""
        while self._reports:
            self._reports.popleft().result()

    def _ready(self, *, wait: bool) -> bool:
        """Return whether the answer, if received, says that this worker is ready."""
        if self._asked is None or not (wait or self._asked.done()):
            return False
        answer = self._asked.result()
        self._asked = None
        self.settle()  # reported before the query
        self._slowest = bool(answer["slowest"])
        self.epsilon = float(answer["epsilon"])
        return bool(answer["ready"])

    def _request(self, do: str, **fields: float) -> "Future[dict[str, Any]]":
        return self._client.control.ask("esync", {"do": do, "r": self._rank, "workers": self._workers, **fields})
