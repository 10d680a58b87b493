"""ESync's worker side: after each step, asks whether to take another step or synchronize."""

import statistics
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.futures import after
from geomx_cli.core.untrusted import check_whole
from geomx_cli.runtime.training.worker_algorithm import Contributed, State

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client

__all__ = ["Decision", "EsyncClient", "MAX_COUNT", "MAX_SECONDS", "MAX_WORKERS", "StateServer"]

REMEMBERED = 5


class EsyncClient:
    """Queries the job's state server over the existing connections. For the training thread only.

    It reports the worker's steps in this round (k), the duration of one (c, in seconds, including any work before it in
    that step), and the age of the last step's end. With `--esync-query overlapped` the answer to one step's query may
    come after the next step; the slowest worker waits for it, as its next step would delay all others. Raises the
    client's error after the job has failed. Errors from the state server are raised at this worker's next wait: for an
    answer, or at the start of a round.

    rounds: begun.
    steps: of this round.
    epsilon: seconds, from the last answer.
    """

    def __init__(self, client: "Client") -> None:
        settings = client.settings
        party = settings.text("esync_scope") == "party"
        self.rounds = self.steps = 0
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
        self._contributed: Contributed | None = None
        self._ended = 0.0
        self._times: deque[float] = deque(maxlen=REMEMBERED)

    def begin(self, contributed: Contributed | None = None) -> None:
        """Start a round: this worker has received the weights it starts from. contributed: see `continue_round`."""
        if self._asked is not None:  # about a step of the last round, which others have ended
            self._reports.append(self._asked)
            self._asked = None
        self.await_reports()
        self.rounds += 1
        self.steps = 0
        self.continue_round(contributed)
        self._ended = time.monotonic()

    def _enter(self) -> None:
        if self.rounds > 1 and not self._left:
            self._reports.append(self._request("enter", t=self.rounds))

    def step(self) -> bool:
        """Record the end of a step. Return True if it is time to synchronize."""
        now = time.monotonic()
        self._times.append(now - self._ended)
        self._ended, self.steps = now, self.steps + 1
        if self._contributed is not None:
            return self._contributed == (self.steps, "step")
        if self._ready(wait=False):
            return True
        # The median: one step that the system delays would make a fast worker appear the slowest.
        report = {"k": self.steps, "c": statistics.median(self._times), "age": 0.0}
        if self._asked is None:
            self._asked = self._request("query", **report)
        elif self.steps == self._least:  # the pending answer concerns a step that could not be the last
            self._reports.append(self._asked)
            self._asked = self._request("query", **report)
        # No worker is ready earlier: if it waited for those answers, one far from the server would be the slowest.
        return self.steps >= self._least and self._ready(wait=self._waits or self._slowest)

    def state(self) -> State:
        """Return what numbers this worker's reports. Durations are measured anew, a pending query is asked again."""
        return State({"rounds": self.rounds, "steps": self.steps, "left": self._left, "epsilon": self.epsilon})

    def load(self, state: State) -> None:
        """Continue from a `state`, in place of the first `begin`; `continue_round` follows."""
        self.rounds, self.steps, self._left, self.epsilon = (
            state.values[name] for name in ("rounds", "steps", "left", "epsilon")
        )
        self._ended = time.monotonic()

    def continue_round(self, contributed: Contributed | None) -> None:
        """This round is repeated as an earlier life `contributed` to it, if so.

        Others may have begun the next one then, so the state server must not be asked about this one. Otherwise it may
        not have heard of it.
        """
        self._contributed = contributed
        if contributed is None:
            self._enter()

    @property
    def must_join(self) -> bool:
        """See PacedWorkerAlgorithm."""
        return self._contributed == (self.steps, "join")

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

    def await_reports(self) -> None:
        """Wait until the state server has acknowledged all reports. Raises its errors."""
        while self._reports:
            self._reports.popleft().result()

    def _ready(self, *, wait: bool) -> bool:
        """Return whether the answer, if received, says that this worker is ready."""
        if self._asked is None or not (wait or self._asked.done()):
            return False
        answer = self._asked.result()
        self._asked = None
        self.await_reports()  # reported before the query
        self._slowest = bool(answer["slowest"])
        self.epsilon = float(answer["epsilon"])
        return bool(answer["ready"])

    def _request(self, do: str, **fields: float) -> "Future[dict[str, Any]]":
        return self._client.control.ask("esync", {"do": do, "r": self._rank, "workers": self._workers, **fields})


# ESync's state server: decides whether each worker takes another local step or synchronizes now. Z. Li, H. Zhou, T.
# Zhou, H. Yu, Z. Xu, G. Sun: ESync: Accelerating Intra-Domain Federated Learning in Heterogeneous Data Centers. IEEE
# Transactions on Services Computing 15(4), 2022, Algorithm 2.

MAX_WORKERS = 65_536
MAX_COUNT = 2**31 - 1
MAX_SECONDS = 1e10
AUTOMATIC_PART, AUTOMATIC_MOST = 0.05, 0.5


@dataclass(frozen=True)
class Decision:
    """The answer to a worker, with its basis.

    ready: synchronize now; otherwise there is time for another step.
    slowest: this is the worker whose steps take longest.
    """

    ready: bool
    slowest: bool


@dataclass(slots=True)
class _Record:
    """The state of a worker.

    steps: completed in its round.
    step_time, ended: of the last one, in seconds.
    ready: it was told to synchronize.
    waits: for something else, and takes no step.
    round: that it has begun.
    left: it takes no more steps.
    """

    rank: int
    steps: int = 0
    step_time: float = 0.0
    ended: float = 0.0
    ready: bool = False
    waits: bool = False
    round: int = 1
    left: bool = False


class StateServer:
    """Decides for one group of workers, from their reports of steps.

    A worker is ready if it could not complete another step before the slowest completes its own, with `epsilon` seconds
    of margin; the slowest is ready after its first step, which determines the round's duration. Time is a parameter:
    `now` is in seconds of an arbitrary clock. Workers report ages of events, so differences between their clocks do
    not matter.

    In all methods r is a worker's rank; k the steps it has completed in this round; c its capability, the seconds that
    its last step took (0 if not measured); te (in `home`) the time when that step ended, or, with k = 0, when it began
    the round; t a round, counted from 1. InvalidSettings is raised before `init`, for an unknown rank or, but in
    `entered`, one that has left, and for a number out of range; nothing has changed then. Not thread-safe.
    """

    def __init__(self) -> None:
        self._records: list[_Record] = []
        self._epsilon: float | None = None
        self._min_steps = 1
        self._round = 1
        self._slowest: _Record | None = None

    def init(self, num_workers: int, epsilon: float | None, min_steps: int = 1) -> None:
        """Reset to round 1 of `num_workers` workers, discarding all records.

        epsilon (seconds): None means 5 % of the slowest worker's capability, but at most 0.5 s.
        min_steps: minimum number of steps of every worker, including the slowest, in each round.
        """
        check_whole("the number of workers", num_workers, 1, MAX_WORKERS)
        check_whole("the least number of steps", min_steps, 1, MAX_COUNT)
        if epsilon is not None:
            _seconds("epsilon", epsilon)
        self._records = [_Record(rank) for rank in range(num_workers)]
        self._epsilon, self._min_steps, self._round = epsilon, min_steps, 1
        self._slowest = None

    def query(self, now: float, r: int, k: int, c: float, age: float) -> Decision:
        """Record a report of worker r, whose step ended `age` seconds before `now`, and return the decision for it."""
        _seconds("the age of the step's end", age)
        worker = self._present(r)
        check_whole("k, the number of steps,", k, 0, MAX_COUNT)
        _seconds("c, the time of a step,", c)
        self._note(worker, k, c, now - age)
        slowest = self._slowest
        if slowest is None or slowest.round != self._round:
            # While no step has been measured, another one is cheap and determines the slowest worker.
            return Decision(ready=False, slowest=worker is slowest)
        missing = max(1, self._min_steps - slowest.steps)
        rest = slowest.step_time * missing + slowest.ended - now
        late = worker.step_time + self.epsilon > rest
        ready = k >= self._min_steps and (worker is slowest or slowest.ready or late)
        worker.ready |= ready
        return Decision(ready, worker is slowest)

    def wait(self, now: float, r: int, *, alone: bool) -> bool:
        """Record that worker r takes no step, as it waits for something else. Return whether it is to synchronize:
        another worker is told to; or all wait and, as they are not `alone`, for workers of other groups, for as long
        as a step of the slowest takes.
        """
        worker = self._present(r)
        worker.waits = True
        present = [record for record in self._records if not record.left]
        if any(record.ready for record in present):
            return True
        since = max(record.ended for record in present)
        return not alone and all(record.waits and now - since >= record.step_time for record in present)

    def entered(self, now: float, r: int, t: int) -> None:
        """Record that worker r begins round t; the first such report begins the round for all. One that has left comes
        back: it was killed, and goes on from before it left.

        Raises InvalidSettings for a past round: returning to it would keep the others from ever ending theirs.
        """
        worker = self._find(r)
        check_whole("t, the round,", t, 1, MAX_COUNT)
        if t < self._round:
            raise InvalidSettings(
                f"worker {r} begins round {t}, but round {self._round} has begun already",
                "each worker begins each round once, and takes part in all",
            )
        if t > self._round:
            self._round = t
            for record in self._records:
                record.steps, record.ready = 0, False
        worker.round, worker.ended = t, now
        if worker.left:
            worker.left = False
            self._slowest = self._search()

    def leave(self, r: int) -> None:
        """Remove worker r, which has ended or was lost, so that nobody waits for its steps. Idempotent."""
        self._find(r).left = True
        self._slowest = self._search()

    @property
    def epsilon(self) -> float:
        """The current margin for a step, in seconds."""
        if self._epsilon is not None:
            return self._epsilon
        return min(AUTOMATIC_MOST, AUTOMATIC_PART * self._slowest.step_time) if self._slowest is not None else 0.0

    def home(self) -> dict[str, Any]:
        """The full state: num_workers, t, epsilon (seconds), records, one [r, k, c, te, ready, round] each."""
        return {
            "num_workers": len(self._records),
            "t": self._round,
            "epsilon": self.epsilon,
            "records": [[w.rank, w.steps, w.step_time, w.ended, w.ready, w.round] for w in self._records],
        }

    def _note(self, worker: _Record, k: int, c: float, te: float) -> None:
        """Store a report and update the slowest worker. Searches all workers only if the slowest one has become faster.
        """
        faster = c < worker.step_time
        worker.steps, worker.step_time, worker.ended, worker.waits = k, c, te, False
        slowest = self._slowest
        if worker is slowest and faster:
            self._slowest = self._search()
        elif c > 0 and (slowest is None or (c, -worker.rank) > (slowest.step_time, -slowest.rank)):
            self._slowest = worker

    def _search(self) -> _Record | None:
        """Return the lowest rank of those with the longest steps; None if no step has been measured."""
        known = (record for record in self._records if record.step_time > 0 and not record.left)
        return max(known, key=lambda record: record.step_time, default=None)

    def _present(self, r: int) -> _Record:
        worker = self._find(r)
        if worker.left:
            raise InvalidSettings(f"worker {r} has left", "a worker that left takes no part in later rounds")
        return worker

    def _find(self, r: int) -> _Record:
        if not self._records:
            raise InvalidSettings(
                "the state server does not know how many workers there are",
                "rank 0 tells it with init, before all else",
            )
        check_whole("r, the rank,", r, 0, len(self._records) - 1)
        return self._records[r]


def _seconds(what: str, number: float) -> None:
    # NaN compares as false.
    if not isinstance(number, int | float) or isinstance(number, bool) or not 0 <= number <= MAX_SECONDS:
        raise InvalidSettings(f"{what} is {number!r}", f"it is a number of seconds from 0 to {MAX_SECONDS:.0e}")
