"""Runs an unmodified script under stock MXNet with its own scheduler, server and workers, and as a planned job of ours.
"""

import contextlib
import fcntl
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cluster import ROOT, Cluster, free_ports

from geomx_cli.core.options import Value

SCRIPTS = ROOT / "tests/scripts/conformance"
WORKERS = 2
LIMIT = 120.0
# MXNet 1.9.1 needs names that numpy has removed.
_NAMES = "import numpy as n\nfor k in 'bool int float object complex'.split(): setattr(n, k, vars(__builtins__)[k])\n"
_SERVE = [sys.executable, "-W", "ignore", "-c", _NAMES + "import mxnet"]
_RUN = "import runpy, sys\nsys.argv.pop(0)\nrunpy.run_path(sys.argv[0], run_name='__main__')"
_WORK = [sys.executable, "-W", "ignore", "-c", _NAMES + _RUN]


@dataclass(frozen=True)
class Outcome:
    """A script's results: by rank the saved arrays, by name; and the peak memory of the largest worker, in KiB."""

    weights: list[dict[str, np.ndarray]]
    memory: int


@dataclass(frozen=True)
class Script:
    """A script of tests/scripts/conformance with its arguments. It saves weights-RANK.npz in its working directory."""

    name: str
    arguments: tuple[str, ...] = ()

    def argv(self) -> list[str]:
        """The command to run."""
        return [str(SCRIPTS / f"{self.name}.py"), *self.arguments]

    def __str__(self) -> str:
        return "-".join((self.name, *self.arguments))


def with_mxnet(script: Script, cache: Path) -> Outcome:
    """The outcome under stock MXNet; run once, by the first test process that asks."""
    directory = cache / str(script)
    directory.mkdir(exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "done").exists():
            cluster = Cluster(directory)
            _run(cluster, lambda: _start_stock(cluster, script))
            (directory / "done").touch()
    return _outcome(directory)


def with_geomx(script: Script, directory: Path, options: Mapping[str, Value]) -> Outcome:
    """The outcome under geomx, in a job with these options."""
    cluster = Cluster(directory)
    planned = cluster.planned(script.argv(), {"parties": WORKERS, "workers": 1, **options})
    _run(cluster, lambda: cluster.launch_planned(planned))
    return _outcome(directory)


def _start_stock(cluster: Cluster, script: Script) -> None:
    common = {
        "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_ports(1)[0]), "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_SERVER": "1", "DMLC_NUM_WORKER": str(WORKERS), "PYTHONPATH": "",
    }  # fmt: skip
    roles = [("scheduler", _SERVE), ("server", _SERVE), *[("worker", [*_WORK, *script.argv()])] * WORKERS]
    for index, (role, argv) in enumerate(roles):
        cluster.start(f"{role}{index}", argv, {**common, "DMLC_ROLE": role})


def _run(cluster: Cluster, start: Callable[[], None]) -> None:
    try:
        start()
        workers = [process for name, process in cluster.processes.items() if "worker" in name]
        end, memory = time.monotonic() + LIMIT, 0
        while any(process.poll() is None for process in cluster.processes.values()) and time.monotonic() < end:
            memory = max(memory, *(_memory(process.pid) for process in workers))
            if any(process.poll() for process in cluster.processes.values()):
                break  # stock MXNet would wait forever for a failed process
            time.sleep(0.05)
        cluster.finish(5)
        (cluster.directory / "memory").write_text(str(memory))
    finally:
        cluster.stop()


def _memory(pid: int) -> int:
    """The peak memory of a process so far; 0 if it has ended."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) if found else 0
    return 0


def _outcome(directory: Path) -> Outcome:
    weights = [dict(np.load(directory / f"weights-{rank}.npz")) for rank in range(WORKERS)]
    return Outcome(weights, int((directory / "memory").read_text()))
