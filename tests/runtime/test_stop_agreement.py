"""Workers stop at the same place, in whatever order requests are answered and workers are restarted."""

from concurrent.futures import Future
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from geomx_cli.ps.cluster.key_values import KeyValues
from geomx_cli.ps.cluster.members import Member
from geomx_cli.runtime.script.stopping import StopAgreement

Pending = tuple[str, dict[str, Any], "Future[dict[str, Any]]"]


class Root:
    """The values of a job, and the requests that are not answered yet."""

    def __init__(self) -> None:
        self.values = KeyValues()
        self.pending: list[Pending] = []

    def answerable(self) -> list[Pending]:
        """Those that need not wait for values."""
        return [each for each in self.pending if each[1]["op"] != "wait" or not self.values.missing(each[1]["keys"])]

    def answer(self, pending: Pending) -> None:
        """Answer one, also a "get" whose time is over before its values are there."""
        self.pending.remove(pending)
        process, body, future = pending
        future.set_result(self.values.apply(body, Member(process)))


class Control:
    """A worker's requests to the root, of which the test answers those that do not block."""

    def __init__(self, root: Root, process: str) -> None:
        self._root, self._process = root, process

    def request(self, _: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._root.values.apply(body, Member(self._process))

    def ask(self, _: str, body: dict[str, Any], seconds: float = 0.0) -> "Future[dict[str, Any]]":
        future: Future[dict[str, Any]] = Future()
        self._root.pending.append((self._process, body, future))
        return future

    def check(self) -> None:
        """The job has not failed."""


class Worker:
    """It takes steps until it is to stop. `stopped`: after which step, 0 before that."""

    def __init__(self, root: Root, rank: int, count: int, wishes_at: int) -> None:
        self._root, self._rank, self._count, self._wishes_at = root, rank, count, wishes_at
        self.step = self.stopped = 0
        self._begin()

    def _begin(self) -> None:
        control: Any = Control(self._root, str(self._rank))
        self._agreement = StopAgreement(control, [self._rank], lambda: range(self._count), self.step)

    def restart(self, step: int) -> None:
        """Begin anew after an earlier step; nobody answers what the earlier life has asked."""
        self._root.pending[:] = [each for each in self._root.pending if each[0] != str(self._rank)]
        self.step = step
        self._begin()

    @property
    def blocks(self) -> bool:
        """Whether its next step ends with a wait for others."""
        agreement = self._agreement
        return agreement._is_told and not agreement._last.done() and self.step >= agreement._place

    def take_step(self) -> None:
        """Take one."""
        self.step += 1
        if self._agreement.is_reached(self.step, wishes=0 < self._wishes_at <= self.step):
            self.stopped = self.step


@given(
    st.integers(1, 4), st.integers(1, 6), st.lists(st.integers(0, 8), min_size=4, max_size=4), st.booleans(),
    st.integers(0, 1 << 32),
)  # fmt: skip
def test_all_stop_at_the_same_place(count: int, drift: int, wishes: list[int], restarts: bool, seed: int) -> None:
    chance, root = Random(seed), Root()
    wishes[chance.randrange(count)] = chance.randint(1, 8)
    workers = [Worker(root, rank, count, wishes[rank]) for rank in range(count)]
    while not all(worker.stopped for worker in workers):
        slowest = min(worker.step for worker in workers)
        ahead = [worker for worker in workers if not (worker.stopped or worker.blocks)]
        ready = [worker for worker in ahead if worker.step < slowest + drift]
        answers = root.answerable()
        assert ready or answers, "all wait for each other"
        if ready and (not answers or chance.random() < 0.5):
            chance.choice(ready).take_step()
        elif answers:
            root.answer(chance.choice(answers))
        if restarts and chance.random() < 0.02:
            worker = chance.choice(workers)
            if not worker.stopped:
                worker.restart(chance.randint(max(0, worker.step - drift), worker.step))
    assert len({worker.stopped for worker in workers}) == 1
