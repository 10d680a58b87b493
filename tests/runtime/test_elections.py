"""The election of one of the workers by the weights of rounds."""

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from geomx_cli.ps.net.wire import MAX_WEIGHT, MAX_WORKER_WEIGHT
from geomx_cli.runtime.training.stop_vote import elect


class Rounds:
    """Rounds in which every worker gets the sum of the weights of those that contribute."""

    def __init__(self, workers: int) -> None:
        self._all_here = threading.Barrier(workers, timeout=240)
        self._lock = threading.Lock()
        self._total = 0.0

    def exchange(self, _: str, given: object, __: object, weight: float) -> Any:
        assert 0 < weight <= MAX_WORKER_WEIGHT
        with self._lock:
            self._total += weight if given is not None else 0.0
        self._all_here.wait()
        total = self._total
        if self._all_here.wait() == 0:
            self._total = 0.0
        self._all_here.wait()
        assert 0 < total <= MAX_WEIGHT
        done: Future[None] = Future()
        done.set_result(None)
        return SimpleNamespace(weight=total, done=done)


def elected(candidates: Mapping[int, int | None], count: int) -> set[int]:
    rounds: Any = Rounds(len(candidates))
    with ThreadPoolExecutor(len(candidates)) as pool:
        return set(pool.map(lambda candidate: elect(rounds, "key", candidate, count), candidates.values()))


@pytest.mark.parametrize("count", [1, 2, 4, 16, 17, 28, 42, 256, 300, 5000])
def test_the_highest_candidate_is_elected(count: int) -> None:
    everyone = {worker: worker for worker in range(min(count, 40))} | {count - 1: count - 1}
    some = {worker: worker if worker % 3 == 1 or not worker else None for worker in everyone}
    for candidates in (everyone, some):
        assert elected(candidates, count) == {max(one for one in candidates.values() if one is not None)}


def test_many_candidates_may_have_equal_digits() -> None:
    assert elected({worker: worker for worker in range(200)}, 70_000) == {199}
