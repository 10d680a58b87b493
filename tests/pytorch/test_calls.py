"""What workers say of calls and batches in which they differ."""

import os
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from geomx_cli.core.errors import InvalidSettings, TrainingFailed
from geomx_cli.runtime.frontends.torch import made_calls
from geomx_cli.runtime.frontends.torch.job_store import JobStore
from geomx_cli.runtime.frontends.torch.made_calls import PASS, MadeCalls
from geomx_cli.runtime.frontends.torch.skipped_batches import SkippedBatches, follow_loaders
from geomx_cli.runtime.frontends.torch.sparse_sums import SparseSum
from geomx_cli.runtime.frontends.torch.step_watch import _StepWatch


class _Session:
    """The warnings of a script, which uses torch.distributed in two workers."""

    num_all_workers = 2

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.store = SimpleNamespace(calls=0)

    def warn(self, message: str, *, affects_result: bool = False) -> None:
        assert affects_result
        self.warnings.append(message)


class _Servers:
    """What ended workers have left at the servers."""

    def __init__(self, *lines: str) -> None:
        self._values = [line.encode() + b"\xff" * line.startswith("x") for line in lines]

    def ask(self, topic: str, body: dict[str, Any], seconds: float = 0.0) -> "Future[dict[str, Any]]":
        assert topic == "store" and body["op"] == "get"
        answer: Future[dict[str, Any]] = Future()
        answer.set_result({"found": True, "values": self._values})
        return answer


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([(1, 1), (2, 2), (3, 3), (1, 1), (2, 2)], ""),
        ([(2, 2), (4, 4), (6, 6)], ""),  # gradients are accumulated over two
        ([(1, 1), (2, 3), (3, 4), (4, 5)], "worker 1 skipped batch 2 of its DataLoader"),
        ([(1, 1, 1), (4, 2, 2), (5, 3, 3)], "worker 0 skipped batches 2 to 3 of its DataLoader"),
        ([(2, 2), (6, 4), (8, 6)], "worker 0 skipped batches 3 to 4 of its DataLoader"),
        ([(4, 4), (1, 5), (6, 6), (7, 7)], ""),  # a look at another DataLoader
        ([(4, 4), (90, 5), (6, 6), (7, 7)], ""),
        ([(0, 0), (0, 0), (0, 3), (0, 5)], ""),
    ],
)
def test_skipped_batches(numbers: list[tuple[int, ...]], said: str) -> None:
    session = _Session()
    batches = SkippedBatches(session, 0)  # type: ignore[arg-type]
    for each in numbers:
        batches.compare(each)
    assert len(session.warnings) == bool(said) and said in "".join(session.warnings)
    assert said in batches.told


def test_the_batch_that_is_trained_on() -> None:
    follow_loaders(torch.utils.data.dataloader._BaseDataLoaderIter)
    batches = SkippedBatches(_Session(), 0)  # type: ignore[arg-type]
    found = []
    loader = DataLoader(torch.zeros(6), batch_size=2)
    for _ in loader:
        with torch.no_grad():
            next(iter(DataLoader(torch.zeros(3))))
        found.append(batches.number)
    assert found == [1, 2, 3]


@pytest.mark.parametrize(
    ("own", "left", "message", "hint"),
    [
        (
            [PASS] * 4, ["1 3 3 a backward pass\n"],
            "worker 0's operation 4 is a backward pass, and worker 1 ended before it, after a backward pass;"
            " backward passes: 4 and 3", "equally many batches",
        ),
        (
            [PASS, "barrier", "barrier"], ["2 1 1 a backward pass\n", "1 1 1 a backward pass\n"],
            "worker 0's operation 2 is barrier, and workers 1 and 2 ended before it", "rank == 0",
        ),
        (["barrier"], [], "worker 0's operation 1 is barrier, and another worker ended before it", "rank == 0"),
        (
            ["barrier"], ["\x1b[1m\n7\n", "1 0 0 \n", "x y z\n"],
            "and worker 1 ended before it, after none; backward passes: 0 and 0", "rank == 0"),
    ],
)  # fmt: skip
def test_a_call_that_an_ended_worker_did_not_make(own: list[str], left: list[str], message: str, hint: str) -> None:
    made = MadeCalls(_Servers(*left), 0, 0, SkippedBatches(_Session(), 0))  # type: ignore[arg-type]
    for call in own:
        made.note(call)
    with pytest.raises(TrainingFailed) as caught:
        made.missing().result()
    assert message in caught.value.message and hint in caught.value.hint


def test_the_text_that_an_ended_worker_leaves_can_be_read() -> None:
    told: list[bytes] = []
    control = SimpleNamespace(ask=lambda topic, body: told.extend(body["values"]))
    made = MadeCalls(control, 0, 1, SkippedBatches(_Session(), 1))  # type: ignore[arg-type]
    made.note("reduce_scatter to " + "+".join(["1000"] * 99))
    made.leave_behind()
    other = MadeCalls(_Servers(told[0].decode()), 0, 0, SkippedBatches(_Session(), 0))  # type: ignore[arg-type]
    other.note("reduce_scatter")
    other.note("barrier")
    with pytest.raises(TrainingFailed, match="and worker 1 ended before it, after reduce_scatter to 1000"):
        other.missing().result(10)


class _Passes:
    """A store where worker 2 of three waits in a backward pass after these calls, and worker 0 does not."""

    def __init__(self, calls: list[str]) -> None:
        self._text = "\n".join(calls).encode()

    def ask(self, topic: str, body: dict[str, Any], seconds: float = 0.0) -> "Future[dict[str, Any]]":
        found = body["op"] == "get" and all(key.endswith("/2") for key in body["keys"])
        answer: Future[dict[str, Any]] = Future()
        answer.set_result({"found": found, "values": [self._text[: made_calls._MOST]] * found})
        return answer


@pytest.mark.parametrize(
    ("own", "others", "said"),
    [
        (["a", "b"], ["a", "c"], "worker 1's call 2 is b, and worker 2's is c"),
        (["a", "barrier", "c"], ["a", "barrier", "c", "d"], ""),  # cut within "barrier"
    ],
)
def test_workers_that_wait_in_a_pass_after_other_calls(
    own: list[str], others: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made_calls, "_LONG", 0.0)
    monkeypatch.setattr(made_calls, "_MOST", 5)
    waits: Future[None] = Future()
    made = MadeCalls(_Passes(others), 0, 1, SkippedBatches(_Session(), 1))  # type: ignore[arg-type]
    found = made.look_in_pass("operation 1", own, waits, 3)
    if said:
        assert said in found.result(10).message
    else:
        with pytest.raises(TimeoutError):
            found.result(0.05)
    waits.set_result(None)


def test_a_key_that_a_script_lists_twice_is_asked_for_once() -> None:
    asked: list[list[str]] = []

    def ask(topic: str, body: dict[str, Any], seconds: float) -> "Future[dict[str, Any]]":
        asked.append(body["keys"])
        answer: Future[dict[str, Any]] = Future()
        answer.set_result({"found": True, "values": [b"x"] * len(body["keys"])})
        return answer

    joined: Any = SimpleNamespace(control=SimpleNamespace(ask=ask), while_waiting=lambda _: None)
    store = JobStore(joined, "p/")
    store.wait(["a", "b", "a"])
    assert store.check(["a", "b", "a"]) and store.multi_get(["a", "b", "a"]) == [b"x"] * 3
    assert asked == [["p/a", "p/b"]] * 3


@pytest.mark.parametrize("count", [-1, 7, 2**60])
def test_a_worker_that_claims_more_elements_of_a_sparse_tensor_than_fit_is_named(count: int) -> None:
    """Before memory for them is taken."""
    own = SparseSum(torch.eye(6, 2).to_sparse(1))
    counts = np.array([[2], [count]], "<i8").view(np.uint8)
    with pytest.raises(InvalidSettings, match=f"worker 1 gives {count} elements .* has room for 6"):
        own.elements(counts)
    assert own.elements(np.array([[2], [6]], "<i8").view(np.uint8)).size == 6 * 16


@pytest.mark.parametrize(
    ("size", "exchanged", "is_told"),
    [(3, 3, False), (51, 51, False), (51, 2, True), (51, 0, True), (5000, 2, True), (5000, 1024, False)],
)
def test_models_that_are_exchanged(size: int, exchanged: int, is_told: bool) -> None:
    """However small they are; losses and counts are not the model."""
    session = _Session()
    watch = _StepWatch(session, os.getpid())  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([torch.zeros(size, requires_grad=True), torch.zeros(900)])
    for _ in range(60):
        session.store.calls += exchanged
        watch.after_step(optimizer)
    assert len(session.warnings) == is_told


def test_a_model_of_which_more_is_trained_later_is_exchanged() -> None:
    """What is unfrozen after DistributedDataParallel was built is told by its name, and the rest is exchanged."""
    session, late = _Session(), torch.zeros(900)
    watch = _StepWatch(session, os.getpid())  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([torch.zeros(51, requires_grad=True), late])
    for step in range(100):
        late.requires_grad_(step >= 10)
        session.store.calls += 51
        watch.after_step(optimizer)
    assert not session.warnings
