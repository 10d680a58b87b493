"""The cnn with each algorithm: 20 steps of SGD with PyTorch, with MXNet and in numpy give the same weights, to 1e-4 of
each tensor's largest.
"""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import ROOT
from desk import Desk
from idx import write_data
from reference_cnn import BATCH, RATE, Worker, differences, gradients, initial, parties
from rehearsal import Rehearsal
from safetensors.numpy import load_file

from geomx_cli.core import plugins

pytestmark = pytest.mark.processes

STEPS = 20
PYTHONS = {"torch": sys.executable, "mxnet": str(ROOT / ".venv" / "bin" / "python")}
TWO, APART = ("--parties", "1", "--workers", "2"), ("--parties", "2", "--workers", "1")
Taken = list[list[int]]
"""The steps of each worker in each round, from its records."""
JOBS: dict[str, tuple[int, tuple[str, ...], Callable[[list[Worker], Taken], Any]]] = {
    "fsa": (2, APART, lambda workers, taken: gradients(workers, STEPS)),
    "sync": (2, TWO, lambda workers, taken: gradients(workers, STEPS)),
    "mixed": (2, TWO, lambda workers, taken: gradients(workers, STEPS)),
    "async": (1, ("--parties", "1", "--workers", "1"), lambda workers, taken: gradients(workers, STEPS)),
    "local": (1, (), lambda workers, taken: gradients(workers, STEPS)),
    "hfa": (
        4, ("--parties", "2", "--workers", "2", "--k1", "5", "--k2", "2"),
        lambda workers, taken: parties(workers, 5, 2, 4),
    ),
    "diloco": (
        2, (*APART, "--inner-steps", "5", "--outer-lr", "0.7", "--outer-momentum", "0.9"),
        lambda workers, taken: differences(workers, [[5, 5]] * 4, 0.7, 0.9),
    ),
    "esync": (
        2, (*APART, "--min-local-steps", "3"),
        lambda workers, taken: differences(workers, list(zip(*taken, strict=True)), 1.0),
    ),
}  # fmt: skip
"""Workers, options, and the reference."""


def test_every_algorithm_is_here() -> None:
    assert set(JOBS) == set(plugins.algorithms()) - {"decoupled"}, "which refuses scripts"


@pytest.mark.parametrize("algorithm", JOBS)
def test_all_frameworks_give_the_same_weights(desk: Desk, tmp_path: Path, algorithm: str) -> None:
    count, options, reference = JOBS[algorithm]
    seed = 3 if algorithm == "hfa" else 1  # of which no ReLU or maximum compares what float32 cannot tell apart
    data, start = write_data(tmp_path / "data", train=count * STEPS * BATCH), initial(seed)
    rights: dict[str, dict[str, Any]] = {}  # by steps taken, which are the same with both but for esync
    for framework in PYTHONS:
        found, taken = trained(desk, framework, data, "--seed", str(seed), "--algo", algorithm, *options)
        assert algorithm == "esync" or all(sum(each) == STEPS for each in taken), taken
        assert set(found) == set(start)
        if str(taken) not in rights:
            workers = [Worker(data, rank, count, seed) for rank in range(count)]
            rights[str(taken)] = dict(zip(start, reference(workers, taken), strict=True))
        right = rights[str(taken)]
        if algorithm == "esync":
            error = _distance([found[name] for name in right], right.values())
            moved = _distance(right.values(), start.values())
            told = f"{error / moved} with {framework}, steps {taken}"
            # The machine's speed decides about the steps, and with some a ReLU does compare such values: only then may
            # the weights differ, by no more than float32's rounding can move those in float64.
            assert error < 0.05 * moved, told
            assert error <= 1e-4 * moved or any(
                _distance(_rounded(reference, data, seed, taken, draw), right.values()) >= error for draw in range(12)
            ), told
            continue
        for name, wanted in right.items():
            assert np.abs(wanted - start[name]).max() > 1e-3, f"{name} has not been trained"
            near = 1e-4 * np.abs(wanted).max()
            np.testing.assert_allclose(found[name], wanted, rtol=0, atol=near, err_msg=f"{name} with {framework}")


def _distance(some: Iterable[Any], others: Iterable[Any]) -> float:
    return float(np.sqrt(sum(np.square(one - other).sum() for one, other in zip(some, others, strict=True))))


def _rounded(reference: Callable[[list[Worker], Taken], Any], folder: Path, seed: int, taken: Taken, draw: int) -> Any:
    """The reference from initial weights that differ as by float32's rounding over a job's steps."""
    workers = [Worker(folder, rank, len(taken), seed) for rank in range(len(taken))]
    rng = np.random.default_rng(draw)
    model = [value * (1 + 3e-6 * rng.standard_normal(value.shape)) for value in workers[0].model]
    for worker in workers:
        worker.model = model
    return reference(workers, taken)


def trained(desk: Desk, framework: str, data: Path, *options: str) -> tuple[dict[str, Any], Taken]:
    """The weights of a job, and what its workers have done, by global rank."""
    words = ["--local", "--job-dir", framework, "--framework", framework, "--network", "cnn", "--data-dir", str(data)]
    words += ["--batch-size", str(BATCH), "--optimizer", "sgd", "--lr", str(RATE), "--momentum", "0", "--epochs", "1"]
    job = Rehearsal(desk, *words, *options, imported=framework, python=PYTHONS[framework])
    job.finish()
    taken = []
    for path in sorted(job.directory.glob("events/*worker*.jsonl")):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        taken.append([event.get("num_samples", 0) // BATCH for event in events if event["event"] == "round"])
    taken = [each for each in taken if each]  # without a master that does not train
    (model,) = job.directory.glob("outputs/*/model.safetensors")
    return load_file(model), taken
