"""Models that workers train, as the servers compare them: differences are said, and nothing else is."""

import zlib
from typing import Any

import numpy as np
import pytest

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.cluster.bodies import checked_request
from geomx_cli.ps.model_comparison import EPOCH, HALF, LATE, SUMS, TRAINED, ModelComparison
from geomx_cli.ps.net.wire import BadMessage

NAMES = ["first.weight", "first.bias", "last.weight"]
RANDOM = np.random.default_rng(1)
MODEL = np.abs(RANDOM.normal(size=(len(NAMES), SUMS + 1))).astype(np.float32)


class Job:
    """A comparison, and what it has said."""

    def __init__(self, workers: int = 2) -> None:
        self.said: list[str] = []
        self.workers = workers
        self.comparison = ModelComparison(lambda message, hint: self.said.append(f"{message}; {hint}"), lambda: workers)

    def row(self, rank: int, sketch: Any, step: int = 5, marks: bytes = bytes([TRAINED] * 3), **changes: Any) -> None:
        """Take a row of worker `rank`, through the checks of requests."""
        body = {
            "by": f"A/worker:{rank}", "scope": "0", "step": step, "of": self.workers, "names": NAMES,
            "layout": zlib.crc32(repr(NAMES).encode()), "marks": marks,
            "sketch": np.asarray(sketch, np.float32).tobytes(), "settings": {}, "platform": "p",
            "kind": "model", **changes,
        }  # fmt: skip
        self.comparison.add(checked_request("compare", body))


def changed(by: float, tensor: int = 2) -> Any:
    """The model with a tensor that differs by this share of its norm."""
    other = MODEL.copy()
    other[tensor, :SUMS] += by * MODEL[tensor, SUMS] / np.sqrt(SUMS)
    return other


def test_the_difference_of_a_pair_names_tensor_workers_step_and_rate() -> None:
    """And is said once."""
    job = Job()
    for step in (5, 6):
        job.row(0, MODEL, step, settings={"momentum": 0.9, "lr": 0.1})
        job.row(1, changed(0.1), step, settings={"momentum": 0.8, "lr": 0.05})
    (said,) = job.said
    assert "after 4 steps last.weight differs between workers A/worker:0 and A/worker:1" in said
    assert "lr is 0.1 in A/worker:0 and 0.05 in A/worker:1" in said


def test_names_of_one_worker_are_bounded_and_leave_room_to_others() -> None:
    job = Job()
    for layout in range(1000):
        job.row(1, MODEL, step=1, layout=layout)
    assert len(job.comparison._names) == 1
    job.row(0, MODEL, step=9)
    job.row(1, changed(0.1), step=9)
    assert "last.weight differs" in job.said[0]


def test_names_are_bounded_by_bytes() -> None:
    """Of each worker, so that those of the others are kept."""
    job = Job(workers=64)
    wide = {"marks": bytes([TRAINED] * 2048), "names": ["\U0001f600" * 100] * 2048, "of": 64}
    for scope in range(100):
        job.row(1, np.zeros((2048, SUMS + 1)), scope=str(scope), **wide)
    job.row(0, MODEL, scope="2", of=64)
    assert len(job.comparison._names) == 2 and job.comparison._named.total() < 2 * 2**20


def test_the_odd_worker_is_named_whoever_comes_first() -> None:
    """The rows of all are awaited."""
    job = Job(workers=4)
    for rank in range(4):
        assert not job.said
        job.row(rank, changed(0.1, tensor=0) if rank == 0 else MODEL, marks=bytes([TRAINED | LATE] * 3))
    (said,) = job.said
    assert "first.weight of A/worker:0 is not that of the other workers" in said
    assert "first.weight was frozen in the first step" in said


def test_elements_that_are_not_finite() -> None:
    """Named where they are; no difference if they are in all workers."""
    spoiled = MODEL.copy()
    spoiled[1] = np.nan
    job = Job()
    for rank in range(2):
        job.row(rank, spoiled, step=4)
    for rank, sketch in enumerate((MODEL, spoiled)):
        job.row(rank, sketch, step=5)
    (said,) = job.said
    assert "after 4 steps" in said and "first.bias has elements that are not finite in A/worker:1" in said


@pytest.mark.parametrize("damaged", [(3,), (0,), (0, 2, 3)])
def test_workers_whose_weights_are_not_finite_are_named_and_no_others(damaged: tuple[int, ...]) -> None:
    spoiled = MODEL.copy()
    spoiled[1, 2] = np.nan
    job = Job(workers=4)
    for rank in range(4):
        job.row(rank, spoiled if rank in damaged else MODEL)
    (said,) = job.said
    names = [f"A/worker:{rank}" for rank in damaged]
    listed = ", ".join(names[:-1]) + " and " * (len(names) > 1) + names[-1]
    assert f"first.bias of {listed} is not that of the other workers" in said
    assert f"elements that are not finite in {listed}; " in said


def test_the_values_of_two_workers_that_differ_are_told() -> None:
    """Where half of the workers differ from the other half."""
    job = Job(workers=4)
    for rank in range(4):
        job.row(rank, changed(0.1 * (rank > 1)), settings={"lr": 0.1 + rank // 2})
    assert "lr is 0.1 in A/worker:0 and 1.1 in A/worker:" in job.said[0]


def settings_said(*rows: dict[str, float], step: int = 1) -> list[str]:
    """What is said of workers with local steps that have these hyper-parameters."""
    job = Job(workers=len(rows))
    for rank, settings in enumerate(rows):
        job.row(rank, [], step, b"", names=[], settings=settings, kind="settings")
    return job.said


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"lr": 0.1}, {"lr": 0.05}], "in step 1 lr is 0.1 in A/worker:0 and 0.05 in A/worker:1; does a"),
        ([{"lr": 0.05}, {"lr": 0.1}, {"lr": 0.1}], "lr is 0.1 in A/worker:1 and 0.05 in A/worker:0;"),
        ([{"lr": 0.1, "betas[1]": 0.999}, {"lr": 0.1, "betas[1]": 0.99}], "betas[1] is 0.999 in"),
        ([{"lr of group 1": 0.1, "initial_lr of group 1": 0.1}, {"lr of group 1": 0.1, "initial_lr of group 1": 0.2}],
         "initial_lr of group 1 is 0.1 in A/worker:0 and 0.2 in A/worker:1"),
        ([{"lr": 0.01, "initial_lr": 0.1}, {"lr": 0.1, "initial_lr": 0.1}], "lr is 0.01 in"),
        ([{"lr": 0.0021, "largest lr": 0.0021}, {"lr": 0.002, "largest lr": 0.002}], ""),  # of 19 and 20 steps
        ([{"lr": 0.001, "largest lr": 0.1}, {"lr": 0.0, "largest lr": 0.1}], ""),  # and their ends
        ([{"lr": 0.01, "largest lr": 0.1, EPOCH: 9}, {"lr": 0.001, "largest lr": 0.1, EPOCH: 9}],
         "lr is 0.01 in A/worker:0 and 0.001 in"),
        ([{"lr": 0.1, EPOCH: 9}, {"lr": 0.01, "largest lr": 0.1, EPOCH: 9}], "lr is 0.1 in A/worker:0 and 0.01 in A/w"),
        ([{"lr": 0.1, EPOCH: 9}, {"lr": 0.01, "largest lr": 0.1, EPOCH: 8}], ""),
        ([{"lr": 0.0011}, {"lr": 0.001}], "lr is 0.0011 in A/worker:0 and 0.001 in"),
        ([{"initial_lr": 0.1}, {"lr": 0.2, "initial_lr": 0.1}], ""),  # the first has skipped a step
        ([{"lr": 0.0}, {"lr": 0.0}], ""),
    ],
)  # fmt: skip
def test_hyper_parameters_of_local_steps(rows: list[dict[str, float]], said: str) -> None:
    found = settings_said(*rows)
    assert len(found) == bool(said) and said in "".join(found)


def test_a_rate_that_a_schedule_changes_differs_twice_before_it_is_told() -> None:
    job = Job()
    for step, rate in ((40, 0.1), (44, 0.01), (48, 0.1), (52, 0.1)):
        assert not job.said
        for rank, own in enumerate((0.01, rate)):
            job.row(rank, [], step, b"", names=[], settings={"lr": own, "largest lr": 0.1}, kind="settings")
    assert "in step 52 lr is 0.01 in A/worker:0 and 0.1 in A/worker:1" in job.said[0]


@pytest.mark.parametrize(
    ("sketch", "changes"),
    [
        (changed(1e-4), {}),
        (changed(5e-3), {"platform": "another"}),
        (changed(3e-2), {"platform": "another", "marks": bytes([TRAINED | HALF] * 3)}),
        (changed(0.5), {"marks": bytes([TRAINED, TRAINED, 0])}),
        (changed(0.5), {"layout": 7}),
        (changed(0.5), {"scope": "1"}),
        (changed(0.5), {"step": 6}),
        (MODEL, {"settings": {"lr": 0.05}}),
    ],
    ids=["rounding", "hardware", "hardware-16-bits", "frozen", "names", "scope", "step", "settings"],
)
def test_what_is_no_difference(sketch: Any, changes: dict[str, Any]) -> None:
    """Rounding, tensors that nobody trains, and what is not of the same model and step."""
    job = Job()
    job.row(0, MODEL, marks=changes.get("marks", bytes([TRAINED] * 3)), settings={"lr": 0.1})
    job.row(1, sketch, **changes)
    job.comparison.close()
    assert not job.said


def test_workers_that_choose_other_steps_meet_in_common_ones() -> None:
    """Steps in which not all compare are closed by later ones, or by the end."""
    job = Job(workers=3)
    for step in (2, 4, 6, 8, 10, 12):
        job.row(0, MODEL, step)
        if step % 4 == 0:
            job.row(1, changed(0.1 * (step == 12)), step)
    assert not job.said
    job.comparison.close()
    assert "after 11 steps" in job.said[0]


def test_rows_of_a_member_that_lies_are_bounded_and_refused() -> None:
    """Memory does not grow with the numbers of scopes, steps and names that it sends."""
    job = Job()
    for number in range(300):
        job.row(0, MODEL, step=number, of=65_535)
        job.row(0, MODEL, scope=f"s{number}", of=65_535)
        job.row(number, MODEL, step=999, of=65_535)
        job.row(0, MODEL, step=1000, layout=number, of=65_535)
    assert len(job.comparison._names) <= 2 * 128
    scopes = job.comparison._scopes
    assert len(scopes) == 128 and all(len(steps) <= 64 for steps in scopes.values())
    assert all(len(rows) <= 2 for steps in scopes.values() for rows in steps.values())
    with pytest.raises(InvalidSettings, match="15 numbers for 2 tensors"):
        job.row(0, MODEL, marks=bytes(2), names=[])
    for wrong in ({"of": 1 << 20}, {"names": ["n"] * 3000}, {"marks": bytes(4096)}, {"step": -1}, {"scope": 3},
                  {"settings": dict.fromkeys(map(str, range(257)), 0.0)}):  # fmt: skip
        with pytest.raises(BadMessage):
            job.row(0, MODEL, **wrong)
    assert not job.said


def alone(job: Job, *ranks: int, exchanges: int = 0) -> None:
    for rank in ranks:
        job.row(rank, [], exchanges, b"", names=[], scope="alone", kind="alone")


def test_workers_that_all_train_alone_are_told() -> None:
    """Between the same exchanges; not some of them, which may train a probe or a teacher."""
    job = Job(workers=3)
    alone(job, 0, 0, 1)
    alone(job, 2, 1, exchanges=7)
    job.comparison.close()
    assert not job.said
    job = Job(workers=3)
    alone(job, 1, exchanges=2)
    alone(job, 0, 2, 1, exchanges=7)
    (said,) = job.said
    assert "each worker trains a model of its own; use torch.distributed.init_process_group" in said
