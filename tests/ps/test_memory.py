"""A server's memory is bounded independently of how slow any member is."""

import itertools
import os
import signal
import time
from pathlib import Path

import pytest
from cluster import Cluster
from rounds import SCRIPT, assert_equal, expected, found_in

pytestmark = pytest.mark.processes

WINDOW = 2**20
SLICE = 2**20
MEMBERS = 4
SERVERS = ("root0", "Asrv0")


def train(directory: Path, sizes: list[int], pulses: bool) -> dict[str, int]:
    """Three rounds of one party, whose rank 0 is slow; returns each server's peak of resident memory in bytes."""
    cluster = Cluster(directory, {"OUT": str(directory / "w{rank}.npz"), "SERVER_OPTIMIZER": "1", "ROUNDS": "3"})
    cluster.environment |= {"SIZES": ",".join(map(str, sizes)), "GEOMX_WINDOW": str(WINDOW), "SHUFFLE": "1"}
    peaks = dict.fromkeys(SERVERS, 0)
    try:
        cluster.launch(SCRIPT, parties=(MEMBERS,), worker_env={"Aw0": {"SLOW": "0.1"}})
        for name in itertools.cycle(SERVERS):
            for server in SERVERS:
                peaks[server] = max(peaks[server], peak(cluster.processes[server].pid))
            if all(process.poll() is not None for process in cluster.processes.values()):
                break
            if pulses and len(list(directory.glob("w*.npz"))) == 0:
                pulse(cluster.processes[name].pid)
            time.sleep(0.05)
        cluster.finish()
    finally:
        cluster.stop()
    return peaks


def peak(pid: int) -> int:
    """Peak resident memory of a process so far, 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def pulse(pid: int) -> None:
    """Stop a process for a moment, shorter than any patience."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.3)
    os.kill(pid, signal.SIGCONT)


def test_slow_members_and_slow_servers_take_no_memory_and_lose_nothing(tmp_path: Path) -> None:
    sizes = [1_000_000] * 6
    model = 4 * sum(sizes)
    small, large = tmp_path / "small", tmp_path / "large"
    for directory in (small, large):
        directory.mkdir()
    base = train(small, [10], pulses=False)
    peaks = train(large, sizes, pulses=True)
    found = found_in(large)
    assert len(found) == MEMBERS
    assert_equal(found, expected([list(range(MEMBERS))], dict.fromkeys(range(MEMBERS), 3), optimizer=True, sizes=sizes))
    for name, used in peaks.items():
        assert base[name] > 0
        # A slice that blocks others overtakes its member's window.
        bound = base[name] + 3 * model + MEMBERS * (WINDOW + SLICE)
        assert used < bound, f"{name}: {(used - base[name]) / model:.2f} models"
