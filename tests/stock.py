"""Runs an unmodified script under stock MXNet with its own scheduler, server and workers, and as a planned job of ours.
"""

import contextlib
import fcntl
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import forks
import numpy as np
from cluster import ROOT, Cluster, clean_environment, free_ports
from forks import Forked

from geomx_cli.core.options import Value

SCRIPTS = ROOT / "tests/scripts/conformance"
WORKERS = 2
LIMIT = 240.0


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
    serve = ["-m", "mxnet.kvstore.kvstore_server"]
    roles = [("scheduler", serve), ("server", serve), *[("worker", script.argv())] * WORKERS]
    for index, (role, argv) in enumerate(roles):
        name, env = f"{role}{index}", {**clean_environment(), **common, "DMLC_ROLE": role}
        out = cluster.directory / f"{name}.out"
        cluster.processes[name] = forks.server("stock").start(argv, env, cluster.directory, out)


def _run(cluster: Cluster, start: Callable[[], None]) -> None:
    try:
        start()
        workers = [process for name, process in cluster.processes.items() if "worker" in name]
        end, memory = time.monotonic() + LIMIT, 0
        while any(process.poll() is None for process in cluster.processes.values()) and time.monotonic() < end:
            memory = max(memory, *map(_memory, workers))
            if any(process.poll() for process in cluster.processes.values()):
                break  # stock MXNet would wait forever for a failed process
            time.sleep(0.05)
        cluster.finish(5)
        (cluster.directory / "memory").write_text(str(memory))
    finally:
        cluster.stop()


def _memory(process: subprocess.Popen[bytes] | Forked) -> int:
    """The peak memory of a process so far; 0 if it has ended. Pages of libraries count though a forked process has them
    only once it reads them.
    """
    with contextlib.suppress(OSError, KeyError):
        peak, libraries = _kilobytes(process.pid)
        inherited = _kilobytes(process.server.pid)[1] if isinstance(process, Forked) else 0
        return peak + max(0, inherited - libraries)
    return 0


def _kilobytes(pid: int) -> tuple[int, int]:
    """A process's peak memory, and that of files in memory now."""
    found = dict(re.findall(r"(VmHWM|RssFile):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()))
    return int(found["VmHWM"]), int(found["RssFile"])


def _outcome(directory: Path) -> Outcome:
    weights = [dict(np.load(directory / f"weights-{rank}.npz")) for rank in range(WORKERS)]
    return Outcome(weights, int((directory / "memory").read_text()))
