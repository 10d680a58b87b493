"""Servers are killed at any message and any commit, alone and together: every result has the bits of a calm run."""

import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from crashes import CrashTree, contribution

from geomx_cli.ps.aggregation.algorithm import ServerAlgorithm
from geomx_cli.runtime.algorithms.fsa import FsaServer
from geomx_cli.runtime.algorithms.hfa import HfaServer

SIZE, ROUNDS, SEEDS = 600, 7, 6
SLICES = [(0, 0), (1, 0), (2, 1)]


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
    return {"fsa": FsaServer, "hfa": partial(HfaServer, 2, workers, by_samples=False)}[name]()


@pytest.mark.parametrize("name", ["fsa", "hfa"])
@pytest.mark.parametrize("compress", ["", "fp16", "bsc:0.05", "int8", "topk:0.1", "1bit"])
@pytest.mark.parametrize("roots", [1, 2])
def test_any_server_may_be_killed_at_any_moment(folder: Path, name: str, compress: str, roots: int) -> None:
    optimizer = ("sgd", {"learning_rate": 0.1, "momentum": 0.9}) if name == "fsa" else None

    def play(which: str, random: Random, chance: float) -> CrashTree:
        for kind in ("root0", "root1", "local0", "local1"):
            (folder / which / kind).mkdir(parents=True)
        tree = CrashTree(
            [2, 1], partial(algorithm, name), folder / which, random, chance=chance, optimizer=optimizer,
            roots=roots, size=SIZE, compress=compress,
        )  # fmt: skip
        for where in SLICES:
            tree.init(np.linspace(-1, 1, SIZE, dtype=np.float32), where)
        tree.play(ROUNDS, lambda who, number, where: contribution(who, number, where, SIZE), SLICES)
        tree.close()
        return tree

    calm = play("calm", Random(0), 0.0)
    for seed in range(SEEDS):
        tree = play(str(seed), Random(seed), 0.02)
        assert tree.kills
        for who in [(0, 0), (0, 1), (1, 0)]:
            for where in SLICES:
                got, expected = (
                    [(one.round, one.value.tobytes(), one.weight) for one in each.got(who, where)] for each in (tree, calm)
                )
                assert got == expected, f"seed {seed}, {who} {where}"
