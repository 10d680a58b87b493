"""What workers say of calls and batches in which they differ."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from geomx_cli.core.errors import InvalidSettings, TrainingFailed
from geomx_cli.ps.cluster.bodies import checked_request
from geomx_cli.runtime.frontends.torch.data import follow_loaders
from geomx_cli.runtime.frontends.torch.ddp import made_calls
from geomx_cli.runtime.frontends.torch.ddp.gradient_sums import SparseSum
from geomx_cli.runtime.frontends.torch.ddp.job_store import JobStore
from geomx_cli.runtime.frontends.torch.ddp.made_calls import PASS, MadeCalls, SkippedBatches
from geomx_cli.runtime.frontends.torch.ddp.script_watch import _StepWatch
from geomx_cli.runtime.frontends.torch.store import Store


class Alone(Store):
    """A script's store that counts what is exchanged, and how often a worker says that it trains alone."""

    failure, calls = None, 0  # type: ignore[assignment]

    def __init__(self) -> None:
        known = {"global_rank": 0, "num_all_workers": 2, "party_ranks": None}
        super().__init__(None, SimpleNamespace(compare=self._compare, **known))  # type: ignore[arg-type]
        self.told: list[int] = []

    def option(self, name: str) -> str:
        return "fsa"

    def _compare(self, row: dict[str, Any]) -> None:
        assert checked_request("compare", {**row, "by": "A/worker:0"})["kind"] == "alone" and row["of"] == 2
        self.told.append(row["step"])


class _Session:
    """The warnings of a script, which uses torch.distributed in two workers."""

    num_all_workers = 2

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.store = Alone()

    def warn(self, message: str, *, affects_result: bool = False) -> None:
        assert affects_result == ("has joined" not in message)
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

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        timer = threading.Timer(seconds + 0.01, call)
        timer.daemon = True
        timer.start()


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
    assert session.store.told == [0] * is_told and not session.warnings


def test_a_model_of_which_more_is_trained_later_is_exchanged() -> None:
    """What is unfrozen after DistributedDataParallel was built is told by its name, and the rest is exchanged."""
    session, late = _Session(), torch.zeros(900)
    watch = _StepWatch(session, os.getpid())  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([torch.zeros(51, requires_grad=True), late])
    for step in range(100):
        late.requires_grad_(step >= 10)
        session.store.calls += 51
        watch.after_step(optimizer)
    assert not session.store.told


def step_of(size: int) -> Any:
    return torch.optim.SGD([torch.zeros(size, requires_grad=True)])


def told_after(steps: Callable[[Any, Callable[..., None]], None]) -> list[int]:
    """What a worker tells that takes these steps: after how many exchanges it trains alone."""
    session = _Session()
    watch = _StepWatch(session, os.getpid())  # type: ignore[arg-type]

    def take(optimizer: Any, exchanged: int = 0, count: int = 1) -> None:
        for _ in range(count):
            session.store.calls += exchanged
            watch.after_step(optimizer)

    steps(session.store, take)
    assert not session.warnings
    return session.store.told


def test_a_probe_beside_training_is_no_model_of_all_workers() -> None:
    model, probe = step_of(3000), step_of(40)

    def steps(store: Any, take: Any) -> None:
        for _ in range(3):
            take(model, 3000, 20)
            take(probe, 0, 200)

    assert told_after(steps) == []


def test_a_teacher_before_training_is_told_as_alone_which_the_servers_wait_for_all_to_say() -> None:
    teacher, model = step_of(900), step_of(3000)

    def steps(store: Any, take: Any) -> None:
        take(teacher, 0, 60)
        take(model, 3000, 100)

    assert told_after(steps) == [0]


def test_two_models_of_which_each_is_exchanged() -> None:
    """A GAN; also where one backward pass serves both optimizers."""
    generator, critic = step_of(3000), step_of(51)

    def steps(store: Any, take: Any) -> None:
        for _ in range(60):
            take(critic, 51, 5)
            take(generator, 3051)
        for _ in range(60):
            take(generator, 3051)
            take(critic)

    assert told_after(steps) == []


def test_a_model_that_is_not_exchanged_any_more() -> None:
    """The first optimizer's, or the same parameters with a new optimizer; initial weights were exchanged by hand."""
    first, other = step_of(3000), step_of(2000)

    def steps(store: Any, take: Any) -> None:
        take(first, 3000, 8)
        take(first, 2, 51)
        take(first, 3000)
        store.updates_common = lambda optimizer: optimizer is other
        take(other, 2, 51)

    assert told_after(steps) == [8, 9]


@pytest.mark.parametrize(("rank", "is_told"), [("0", False), ("1", True)])
def test_training_before_the_job_is_joined(monkeypatch: pytest.MonkeyPatch, rank: str, is_told: bool) -> None:
    """The worker of rank 0 may train a teacher first."""
    monkeypatch.setenv("RANK", rank)
    session = _Session()
    session.store = None  # type: ignore[assignment]
    watch = _StepWatch(session, os.getpid())  # type: ignore[arg-type]
    for _ in range(60):
        watch.after_step(step_of(3))
    assert ["before this worker has joined" in text for text in session.warnings] == [True] * is_told
