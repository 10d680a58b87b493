"""Jobs of scripts/rounds.py, and their final parameters, bit for bit, computed in one process."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from cluster import ROOT, Cluster

from geomx_cli.plan import Plan

SCRIPT = [sys.executable, str(ROOT / "tests/scripts/rounds.py")]
HOSTILE = [sys.executable, str(ROOT / "tests/scripts/hostile.py")]
SIZES = (70_000, 10, 3)
PLANNED_ROUNDS = 4


def gradient(rank: int, number: int, size: int, index: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng([rank, number, index]).standard_normal(size).astype(dtype)


def initial(size: int, index: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(1000 + index).standard_normal(size).astype(dtype)


def expected(
    parties: list[list[int]],
    rounds: dict[int, int],
    optimizer: bool,
    sizes: Sequence[int] = SIZES,
    dtype: str = "float32",
) -> list[np.ndarray]:
    """Ranks are added in order inside a party, then the parties in order; sgd with momentum as in MXNet.

    fp16 is added in fp32 and updated in fp32.
    """
    work = np.float64 if dtype == "float64" else np.float32
    results = []
    for index, size in enumerate(sizes):
        weight, momentum = initial(size, index, dtype).astype(work), np.zeros(size, work)
        for number in range(max(rounds.values())):
            sums = []
            for party in parties:
                members = [gradient(rank, number, size, index, dtype) for rank in party if number < rounds[rank]]
                if members:
                    sums.append(_ordered_sum([member.astype(work) for member in members]))
            total = _ordered_sum(sums)
            if optimizer:
                momentum = work(0.9) * momentum - work(0.1) * (work(0.25) * total)
                weight = weight + momentum
            else:
                weight = total
        results.append(weight.astype(dtype))
    return results


def _ordered_sum(arrays: list[np.ndarray]) -> np.ndarray:
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total


def run(cluster: Cluster, tmp_path: Path, env: dict[str, str], **shape: object) -> dict[int, list[np.ndarray]]:
    """Run the cluster to its successful end and read every worker's final parameters."""
    environment = {
        "OUT": str(tmp_path / "w{rank}.npz"),
        "SERVER_OPTIMIZER": "1",
        "MXNET_KVSTORE_BIGARRAY_BOUND": "20000",
        **env,
    }
    cluster.environment = environment
    cluster.launch(SCRIPT, **shape)  # type: ignore[arg-type]
    cluster.finish()
    return found_in(tmp_path)


def launch_planned(cluster: Cluster, planned: Plan, argv: Mapping[str, Sequence[str]] = {}) -> None:
    """Start a plan of this script for PLANNED_ROUNDS; `argv` replaces commands, by process file name."""
    cluster.environment = {
        "OUT": str(cluster.directory / "w{rank}.npz"), "ROUNDS": str(PLANNED_ROUNDS), "SHUFFLE": "7",
        "SERVER_OPTIMIZER": "1",
    }  # fmt: skip
    cluster.launch_planned(planned, argv)


def found_in(folder: Path) -> dict[int, list[np.ndarray]]:
    """The final parameters that each worker has saved."""
    return {int(path.stem[1:]): list(np.load(path).values()) for path in sorted(folder.glob("w*.npz"))}


def assert_equal(found: dict[int, list[np.ndarray]], wanted: list[np.ndarray]) -> None:
    for rank, arrays in found.items():
        for got, want in zip(arrays, wanted, strict=True):
            assert got.dtype == want.dtype
            assert got.tobytes() == want.tobytes(), f"worker {rank}: off by {np.abs(got - want).max()}"
