"""Servers are killed at any message and any commit, alone and together: every result has the bits of a calm run."""

import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from crashes import CrashTree, contribution
from tree import Slice, Tree, Who

from geomx_cli.ps.aggregation.aggregator import Aggregator
from geomx_cli.ps.aggregation.algorithm import ServerAlgorithm
from geomx_cli.ps.aggregation.slices import SliceState
from geomx_cli.runtime.algorithms.diloco import MeanServer
from geomx_cli.runtime.algorithms.fsa import FsaServer
from geomx_cli.runtime.algorithms.hfa import HfaServer
from geomx_cli.runtime.algorithms.mixed import MixedServer

SIZE, ROUNDS, SEEDS = 600, 7, 1
SLICES = [(0, 0), (1, 0), (2, 1)]
PARTIES = [2, 1]
WORKERS = [(0, 0), (0, 1), (1, 0)]
FIRST = np.linspace(-1, 1, SIZE, dtype=np.float32)
Optimizer = tuple[str, dict[str, float]] | None
SGD: Optimizer = ("sgd", {"learning_rate": 0.1, "momentum": 0.9})
PLAIN: Optimizer = ("sgd", {"learning_rate": 1.0})


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """On tmpfs if there is one, as in a job."""
    memory = Path("/dev/shm")
    made = tmp_path_factory.mktemp("state")
    if memory.is_dir():
        made = memory / f"geomx-test-{made.name}-{id(made)}"
        made.mkdir()
    yield made
    shutil.rmtree(made)


def algorithm(name: str, workers: int, is_root: bool) -> ServerAlgorithm:
    return {
        "fsa": FsaServer, "diloco": MeanServer,
        "async -1": partial(MixedServer, max_staleness=-1), "async 1": partial(MixedServer, max_staleness=1),
        "hfa": partial(HfaServer, 2, workers, by_samples=False),
    }[name]()  # fmt: skip


def play(
    folder: Path, name: str, seed: int, chance: float, *, optimizer: Optimizer, parties: Sequence[int] = PARTIES,
    rounds: int = ROUNDS, **more: Any,
) -> CrashTree:  # fmt: skip
    """Play a whole job. chance: of a kill, with each message and each commit."""
    own = folder / f"{seed}-{chance}"
    own.mkdir()
    tree = CrashTree(
        parties, partial(algorithm, name), own, Random(seed), chance=chance, optimizer=optimizer, size=SIZE, **more
    )  # fmt: skip
    for where in SLICES:
        tree.init(FIRST, where)
    tree.play(rounds, lambda who, number, where: contribution(who, number, where, SIZE), SLICES)
    tree.close()
    return tree


@pytest.mark.parametrize(
    ("name", "compress", "lan", "optimizer"),
    [
        *(("fsa", spec, "", SGD) for spec in ("", "fp16", "bf16", "bsc:0.05", "int8", "q4", "topk:0.1", "1bit")),
        *(("hfa", spec, "", None) for spec in ("", "fp16", "bsc:0.05", "int8", "sparseloco:0.1")),
        *(("diloco", spec, "", SGD) for spec in ("", "int8", "q4", "sparseloco:0.1")),
        ("fsa", "", "", None), ("fsa", "bsc:0.05,pull=union", "", SGD), ("fsa", "bsc:0.05", "int8", SGD),
        ("fsa", "", "topk:0.1", SGD), ("hfa", "int8", "fp16", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("roots", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_any_server_may_be_killed_at_any_moment(
    folder: Path, name: str, compress: str, lan: str, optimizer: Optimizer, roots: int
) -> None:
    job = partial(play, folder, name, optimizer=optimizer, roots=roots, compress=compress, compress_lan=lan)
    calm = job(0, 0.0)
    for seed in range(1, SEEDS + 1):
        tree = job(seed, 0.02)
        assert tree.kills
        for who in WORKERS:
            for where in SLICES:
                assert results(tree, who, where) == results(calm, who, where), f"seed {seed}, {who} {where}"


def results(tree: CrashTree, who: Who, where: Slice) -> list[tuple[int, bytes, float]]:
    return [(one.round, one.value.tobytes(), one.weight) for one in tree.got(who, where)]


@pytest.mark.parametrize("bound", [-1, 1])
@pytest.mark.parametrize("optimizer", [PLAIN, SGD])
def test_in_asynchronous_jobs_each_contribution_counts_once(folder: Path, bound: int, optimizer: Optimizer) -> None:
    """bound: on staleness. With plain steps the last value is the first one less all contributions, in any order."""
    for seed in range(SEEDS):
        tree = play(folder, f"async {bound}", seed, 0.02, optimizer=optimizer, roots=2)
        assert tree.kills
        for where in SLICES:
            newest = max((one for who in WORKERS for one in tree.got(who, where)), key=lambda one: one.version)
            assert newest.version == ROUNDS * len(PARTIES)
            if optimizer is PLAIN:
                given = [contribution(who, n + 1, where, SIZE) for who in WORKERS for n in range(ROUNDS)]
                np.testing.assert_allclose(newest.value, FIRST - np.sum(given, axis=0), atol=1e-4)


class Saving(Tree):
    """saved: versions of the root's value, as its state file has them."""

    def __init__(self, *given: Any, **more: Any) -> None:
        self.saved = list[int]()
        super().__init__(*given, **more)

    def _commit(self, rounds: Aggregator, entry: SliceState) -> None:
        if rounds is self.roots[0].rounds:
            self.saved.append(entry.version)


def test_a_pull_gives_no_value_that_a_kill_would_take_back() -> None:
    """Of a round that is too far ahead the value has the update before the party has the answer."""
    tree = Saving([1, 1], partial(algorithm, "async 1")).use("sgd", learning_rate=1.0)
    tree.init(np.zeros(8, np.float32))
    for number in (1, 2):
        tree.push((0, 0), number, np.ones(8, np.float32))
    assert [one.round for one in tree.got((0, 0))] == [1]
    tree.pull((1, 0), number=1)
    assert tree.got((1, 0))[-1].version == tree.saved[-1] == 2
