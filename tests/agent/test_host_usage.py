"""CPU, memory and GPU use, from text as the kernel and nvidia-smi write it."""

import itertools
from pathlib import Path

import msgspec
import pytest
from cluster import until

from geomx_cli.agent.status import HostUsageMeter, parse_cpu, parse_gpus, parse_memory
from geomx_cli.core.agent_protocol import HostUsage
from geomx_cli.core.conventions import JobClock

GPUS = "NVIDIA H200, 93, 40960, 143771\nTesla, K80, [N/A], 0, 11441\nodd line\n"


def test_what_the_kernel_and_nvidia_smi_write() -> None:
    assert parse_cpu("cpu  10 1 5 70 8 2 3 1 0 0\ncpu0 1 1 1 1\n") == (22, 100)
    assert parse_memory("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\n") == (600 * 1024, 1000 * 1024)
    assert parse_gpus(GPUS) == [
        {"name": "NVIDIA H200", "busy": 0.93, "memory": [40960 << 20, 143771 << 20]},
        {"name": "Tesla, K80", "busy": None, "memory": [0, 11441 << 20]},
    ]
    assert len(parse_gpus("A, 1, 1, 1\n" * 99)) == 16


@pytest.mark.processes
def test_a_meter_measures_and_gives_up_on_a_broken_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, count = tmp_path / "nvidia-smi", tmp_path / "count"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{GPUS}END\n")
    program.chmod(0o755)
    meter, now = HostUsageMeter(JobClock()), itertools.count(0.0, 11.0)

    def gpus() -> list[object]:
        meter.measure(0.0 if meter._query is not None else next(now))  # time stands still until nvidia-smi has ended
        return list(meter.newest.get("gpus", ()))

    until(lambda: gpus() and meter._query is None)
    usage = msgspec.convert(meter.newest, HostUsage)
    assert 0 <= usage.cpu <= 1 and 0 < usage.memory[0] <= usage.peak <= usage.memory[1] and usage.cores > 0
    program.write_text(f"#!/bin/sh\necho >>{count}\nexit 9\n")
    until(lambda: not gpus() and meter._failures == 3)
    tries = count.read_text()
    for _ in range(20):
        gpus()
    assert count.read_text() == tries, "no further one"
    meter.close()
