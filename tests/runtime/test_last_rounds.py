"""Uneven data, to the last round: the bundled job against numpy; all workers end with the same final model.

Workers out of data do not count in any mean; limits of time and accuracy hold until the end. No MXNet here.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import last_rounds as numpy_
import numpy as np
import pytest
from cluster import ROOT, clean_environment
from desk import Desk
from last_rounds import BATCH, EPOCHS, MOMENTUM, RATE
from rehearsal import Rehearsal

from geomx_cli.core import plugins

pytestmark = pytest.mark.processes
Run = Callable[..., Rehearsal]
FOLDERS = (ROOT, ROOT / "tests/scripts", ROOT / "tests/without_mxnet")
BOTH = [[0, 1], [2, 3]]
HFA = "hfa --k1 2 --k2 5"
DILOCO = "diloco --inner-steps 4 --outer-lr 0.7 --outer-momentum 0.9"
STREAMING = "--fragments 2 --overlap 1 --mix 0.25"
OUTER = (0.7, 0.9)


@pytest.fixture
def launch(desk: Desk) -> Run:
    """Starts a job on tiny data divided by a Dirichlet distribution; `samples` in all."""

    def begin(algo: str, *arguments: str, samples: int = 90) -> Rehearsal:
        data = ["--data", "tiny:data", "--network", "linear", "--split", "dirichlet:0.2"]
        rates = ["--optimizer", "sgd", "--lr", str(RATE), "--momentum", str(MOMENTUM)]
        more = ["--save-every", "1", "--batch-size", str(BATCH), "--epochs", str(EPOCHS)]
        variables = {"PYTHONPATH": ":".join(map(str, FOLDERS)), "SAMPLES": str(samples)}
        words = ["--local", "--job-dir", "job", "--algo", *algo.split(), *data, *rates, *more, *arguments]
        return Rehearsal(desk, *words, **variables)

    return begin


def final(job: Rehearsal, workers: int) -> tuple[dict[str, dict[str, Any]], dict[int, Any]]:
    """The workers' final events, and the saved weights, of a job that ended with one model on all workers."""
    assert job.finish() == 0
    found = job.finished()
    assert len(found) == workers
    assert len({event["parameters"] for event in found.values()}) == 1
    kept = numpy_.checkpoints(job.directory)
    accuracy = numpy_.accuracy(kept[max(kept)])
    assert json.loads(job.output)["accuracy"] == pytest.approx(accuracy), "it is that model's"
    return found, kept


def assert_every_sample_was_used(found: dict[str, dict[str, Any]], seed: int) -> None:
    counts = [event["samples"] for _, event in sorted(found.items())]
    assert counts == [EPOCHS * len(shard) for shard in numpy_.shards(len(found), seed)]


def assert_nobody_stopped_before_all_were_through(found: dict[str, dict[str, Any]], seed: int) -> None:
    """In ESync a worker that has used all its data starts over."""
    counts = [event["samples"] for _, event in sorted(found.items())]
    least = [EPOCHS * len(shard) for shard in numpy_.shards(len(found), seed)]
    assert all(count >= wanted for count, wanted in zip(counts, least, strict=True))


EXACT = [
    ("sync --optimizer-on worker", 4, 15, lambda seed: numpy_.fsa(4, seed)),
    (
        f"{HFA} --weight samples --topology spread", 4, 15,
        lambda seed: numpy_.hfa(BOTH, seed, 2, 5, by_samples=True),
    ),
    (DILOCO, 4, 15, lambda seed: numpy_.diloco(4, seed, 4, OUTER)),
    (
        f"{DILOCO} {STREAMING} --weight samples", 4, 20,
        lambda seed: numpy_.diloco(4, seed, 4, OUTER, fragments=2, overlap=1, mix=0.25, by_samples=True),
    ),
    ("mixed --parties 1 --workers 2", 2, 5, lambda seed: numpy_.fsa(2, seed)),
    (
        "decoupled --parties 1 --workers 2 --inner-steps 4 --outer-lr 0.7", 2, 5,
        lambda seed: numpy_.diloco(2, seed, 4, (0.7, 0.0), by_samples=True),
    ),
    ("local", 1, 1, lambda seed: numpy_.fsa(1, seed)),
]  # fmt: skip
KEPT = [
    ("fsa", 26, 22, lambda seed: numpy_.fsa(4, seed)),
    (HFA, 26, 3, lambda seed: numpy_.hfa(BOTH, seed, 2, 5)),
    (
        f"{DILOCO} {STREAMING}", 38, 10,
        lambda seed: numpy_.diloco(4, seed, 4, OUTER, fragments=2, overlap=1, mix=0.25),
    ),
]  # fmt: skip
BY_SPEED = [
    ("esync", 4, 20),
    ("mixed --optimizer dcasgd --max-staleness 1 --topology spread", 4, 15),
    ("async --parties 2 --workers 1", 2, 5),
    ("decoupled --inner-steps 4 --fragments 2 --overlap 1 --compress fp16", 4, 15),
]
"""Where the weights depend on who is faster."""


def test_every_algorithm_is_here_and_there_is_no_mxnet() -> None:
    assert {algo.split()[0] for algo, *_ in (*EXACT, *KEPT, *BY_SPEED)} == set(plugins.algorithms())
    env = {**clean_environment(), "PYTHONPATH": ":".join(map(str, FOLDERS))}
    code = [sys.executable, "-P", "-c", "import geomx_cli.runtime.training, tiny, mxnet"]
    done = subprocess.run(code, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'mxnet'\n"), done.stderr


@pytest.mark.parametrize(
    ("algo", "workers", "seed", "wanted"), EXACT,
    ids=("sync", "hfa-samples", "diloco", "streaming-samples", "mixed", "decoupled", "local"),
)  # fmt: skip
def test_as_in_numpy(launch: Run, algo: str, workers: int, seed: int, wanted: Callable[[int], Any]) -> None:
    """Also if a whole party is out of data before the other has begun its second round (seed 15)."""
    job = launch(algo, "--seed", str(seed), *(["--split", "iid"] if workers == 1 else []))
    found, kept = final(job, workers)
    right = wanted(seed)
    assert_close(kept[max(kept)], right[max(right)])
    assert_every_sample_was_used(found, seed)
    assert {event["stopped"] for event in found.values()} == {"epochs"}
    for name, event in found.items():
        assert_records(job, name, event["rounds"])
    if not algo.startswith(("mixed", "decoupled")):
        assert len({event["rounds"] for event in found.values()}) == 1, "all end in one round"


@pytest.mark.parametrize(("algo", "seed", "least", "wanted"), KEPT, ids=("fsa", "hfa", "streaming"))
def test_what_is_kept_and_evaluated_is_the_global_model(
    launch: Run, algo: str, seed: int, least: int, wanted: Callable[[int], Any]
) -> None:
    """After each of rank 0's rounds; with these seeds it has at least 20 steps."""
    job = launch(algo, "--seed", str(seed), "--eval-every", "1")
    found, kept = final(job, 4)
    assert_every_sample_was_used(found, seed)
    assert {event["stopped"] for event in found.values()} == {"epochs"}
    for name, event in found.items():
        assert_records(job, name, event["rounds"])
    assert len({event["rounds"] for event in found.values()}) == 1, "all end in one round"
    right = wanted(seed)
    assert len(kept) >= least
    *others, last = kept
    for rounds in others:
        assert_close(kept[rounds], right[rounds])
    assert_close(kept[last], right[max(right)])
    accuracies = evaluations(job)
    assert len(accuracies) >= least - 1
    for rounds, accuracy in accuracies.items():
        assert accuracy == pytest.approx(numpy_.accuracy(right[min(rounds, max(right))])), f"{rounds} rounds"


def assert_close(model: Any, wanted: Any) -> None:
    for got, want in zip(model, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def evaluations(job: Rehearsal) -> dict[int, float]:
    """The accuracies that rank 0 has reported during training, by the number of rounds."""
    events = [json.loads(line) for line in next(job.directory.glob("events/A-worker-0.jsonl")).read_text().splitlines()]
    return {event["round"]: event["accuracy"] for event in events if event["event"] == "evaluation"}


def assert_records(job: Rehearsal, worker: str, rounds: int) -> None:
    """A round without data has no samples and no loss."""
    events = [json.loads(line) for line in (job.directory / f"events/{worker}.jsonl").read_text().splitlines()]
    found = [event for event in events if event["event"] == "round"]
    assert [event["num_iters"] for event in found] == list(range(1, rounds + 1))
    assert all((event.get("num_samples", 0) > 0) == ("loss" in event) for event in found)
    assert all(np.isfinite(event.get("loss", 0.0)) for event in found)


@pytest.mark.parametrize(("algo", "workers", "seed"), BY_SPEED, ids=("esync", "dcasgd", "async", "decoupled"))
def test_one_model_of_all_samples(launch: Run, algo: str, workers: int, seed: int) -> None:
    found, kept = final(launch(algo, "--seed", str(seed)), workers)
    if algo == "esync":
        assert_nobody_stopped_before_all_were_through(found, seed)
    else:
        assert_every_sample_was_used(found, seed)
    assert all(np.isfinite(item).all() for model in kept.values() for item in model)
    assert {event["stopped"] for event in found.values()} == {"epochs"}


@pytest.mark.parametrize(
    ("algo", "seed"),
    [
        ("hfa --k1 2 --k2 3", 376),
        ("async --parties 2 --workers 1 --max-staleness 0", 175),
    ],
    ids=("hfa", "async"),
)
def test_a_time_limit_holds_when_rank_0_is_out_of_data(launch: Run, algo: str, seed: int) -> None:
    """Rank 0 has two or three samples of 3000."""
    words = ("--batch-size", "1", "--epochs", "5", "--eval-every", "50", "--time-limit", "2s", "--seed", str(seed))
    workers = 2 if "async" in algo else 4
    found, _ = final(launch(algo, *words, samples=3000), workers)
    ends = {name: event["stopped"] for name, event in found.items()}
    assert ends.pop("A-worker-0") == "time_limit"
    assert "asked" in ends.values() and "time_limit" not in ends.values()


@pytest.mark.parametrize(
    ("algo", "seed"), [("fsa", 376), ("async --parties 2 --workers 1", 175)], ids=("fsa", "async")
)
def test_a_target_is_reached_by_the_others(launch: Run, algo: str, seed: int) -> None:
    """After its own data, rank 0 evaluates the others' model."""
    words = ("--batch-size", "1", "--epochs", "5", "--eval-every", "10", "--target-accuracy", "0.6", "--lr", "0.0005")
    workers = 2 if "async" in algo else 4
    found, _ = final(launch(algo, *words, "--seed", str(seed), samples=3000), workers)
    first = found["A-worker-0"]
    assert (first["stopped"], first["samples"]) == ("target_accuracy", 5 * len(numpy_.shards(workers, seed, 3000)[0]))
    assert sum(event["samples"] for event in found.values()) < 5 * 3000


@pytest.mark.parametrize(
    ("algo", "lan"),
    [
        ("fsa --central-workers 1", "int8"),
        ("fsa --compress topk:0.1,min=0", "2bit:0.01"),
        (DILOCO, "topk:0.1,min=0"),
        ("esync --compress fp16", "q4"),
        ("hfa --k1 2 --k2 3 --compress topk:0.1,min=0", "fp16"),
    ],
    ids=("central workers", "fsa", "diloco", "esync", "hfa"),
)
def test_all_workers_end_together_with_a_codec_inside_parties(launch: Run, algo: str, lan: str) -> None:
    job = launch(algo, "--compress-lan", lan, "--seed", "20", "--lr", "0.001")
    found, _ = final(job, 5 if "central" in algo else 4)
    if "esync" not in algo:
        assert {event["stopped"] for event in found.values()} == {"epochs"}
    counted = json.loads(job.output)["bytes"]
    assert counted["encoded_lan"][0] > counted["encoded_lan"][1] > 0
    assert bool(counted["encoded"][1]) == ("--compress" in algo)


@pytest.mark.parametrize("algo", ["fsa", "hfa --k1 2 --k2 3", DILOCO], ids=("fsa", "hfa", "diloco"))
def test_a_stop_is_not_lost_in_a_codec(launch: Run, algo: str) -> None:
    words = ("--batch-size", "1", "--epochs", "50", "--eval-every", "1", "--target-accuracy", "0.01", "--seed", "20")
    job = launch(algo, *words, "--compress", "2bit:1000", samples=900)
    found, _ = final(job, 4)
    assert found["A-worker-0"]["stopped"] == "target_accuracy"
    assert all(event["rounds"] < 500 for event in found.values())
    assert not [path for path in job.directory.glob("logs/*") if "Warning" in path.read_text()]
