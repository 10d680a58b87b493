"""Workers that run a script of scripts/, in clusters of real processes."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cluster import ROOT, Cluster
from desk import Desk
from rehearsal import Rehearsal

SCRIPTS = Path(__file__).parent / "scripts"
HOOK = ROOT / "geomx_cli" / "runtime" / "hook"


def rehearsed(desk: Desk, script: str, *arguments: str, options: tuple[str, ...] = ()) -> Rehearsal:
    """A job of `--reduce torch` that runs a script of scripts/: of 2 parties of 2 workers, unless `options` differ."""
    words = ("--local", "--reduce", "torch", "--job-dir", "job", *options)
    return Rehearsal(desk, *words, "--", "python", str(SCRIPTS / script), *arguments, imported="torch")


def saved(folder: Path, rank: int) -> dict[str, Any]:
    """What the worker of this global rank has saved as RANK.npz."""
    with np.load(folder / f"{rank}.npz") as file:
        return dict(file)


@dataclass
class Workers:
    """A cluster whose workers run a script as launch starts it: the plain script, with the hook on PYTHONPATH."""

    cluster: Cluster

    def start(
        self, script: str, *arguments: str, count: int = 2, parties: tuple[int, ...] = (),
        master: bool = False, env: Mapping[str, str] = {},
    ) -> None:  # fmt: skip
        """Start a flat cluster of `count` workers, w0... by rank, or one with `parties`, whose global rank 0 is the
        master, or which has a `master` that does not train.
        """
        argv = [sys.executable, str(SCRIPTS / script), *arguments]
        paths = {"PYTHONPATH": os.pathsep.join(map(str, (HOOK, ROOT, SCRIPTS))), **env}
        if parties:
            paths["GEOMX_RANK_SCOPE"] = "party" if master else "global"
            self.cluster.launch(argv, parties=parties, central=master, env=paths)
        else:
            ranks = {f"w{rank}": {"GEOMX_RANK": str(rank)} for rank in range(count)}
            self.cluster.launch_flat(argv, workers=count, env=paths, worker_env=ranks)

    def start_planned(self, script: str, *arguments: str, **options: Any) -> None:
        """Start it with two parties of one worker, and options of launch, as --wan."""
        env = {"PYTHONPATH": os.pathsep.join(map(str, (HOOK, ROOT, SCRIPTS)))}
        values = {"parties": 2, "workers": 1, "rank_scope": "global", **options}
        self.cluster.launch_planned(self.cluster.planned([str(SCRIPTS / script), *arguments], values, env=env))

    def finish(self, limit: float = 240.0) -> None:
        """Wait for the successful end of all processes."""
        self.cluster.finish(limit)

    def saved(self, rank: int) -> dict[str, Any]:
        """What the worker of this global rank has saved as RANK.npz."""
        return saved(self.cluster.directory, rank)
