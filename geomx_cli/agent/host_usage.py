"""CPU, memory and GPU use of this host, from /proc and nvidia-smi."""

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from geomx_cli.agent import processes
from geomx_cli.core.conventions import JobClock

__all__ = ["HostUsageMeter", "parse_cpu", "parse_gpus", "parse_memory"]

_EVERY, _FIRST = 10.0, 2.0  # seconds
_GPU_LIMIT = 10.0  # seconds
_GPU_TRIES = 3
_MOST_GPUS = 16
_MOST_NAME = 80
_QUERY = ("--query-gpu=name,utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits")


class HostUsageMeter:
    """Measures every 10 s and never waits: nvidia-smi, where there is one, runs beside the agent; after 3 failures in a
    row it is not started again. What cannot be read is left out.
    """

    def __init__(self, clock: JobClock) -> None:
        self._clock = clock
        self.newest: dict[str, Any] = {}
        self._machine = processes.boot_id()
        self._next = 0.0
        self._before = (0, 0)
        self._peak = 0
        self._program = shutil.which("nvidia-smi")
        self._query: subprocess.Popen[str] | None = None
        self._deadline = 0.0
        self._failures = 0
        self._gpus: list[dict[str, Any]] = []

    def measure(self, now: float) -> None:
        """Measure if it is time to; `now` is monotonic."""
        if self._query is not None:
            self._finish_query(now)
        if now < self._next:
            return
        self._next = now + (_EVERY if self._before[1] else _FIRST)
        with suppress(OSError, ValueError, IndexError, KeyError):
            before, counted = self._before, parse_cpu(Path("/proc/stat").read_text())
            self._before = counted
            if not before[1]:  # the counts are since boot
                return
            busy, total = counted[0] - before[0], counted[1] - before[1]
            memory = parse_memory(Path("/proc/meminfo").read_text())
            self._peak = max(self._peak, memory[0])
            share = min(1.0, max(0.0, busy / total)) if total > 0 else 0.0
            self.newest = {
                "time": self._clock.time(), "machine": self._machine, "cpu": round(share, 3),
                "cores": os.cpu_count() or 1, "memory": list(memory), "peak": self._peak, "gpus": self._gpus,
            }  # fmt: skip
        self._begin_query(now)

    def close(self) -> None:
        """End a running nvidia-smi."""
        if self._query is not None:
            self._query.kill()
            self._query.communicate()
            self._query = None

    def _begin_query(self, now: float) -> None:
        if self._program is None or self._query is not None or self._failures >= _GPU_TRIES:
            return
        try:
            self._query = subprocess.Popen(
                [self._program, *_QUERY], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True, errors="replace",
            )  # fmt: skip
        except OSError:
            self._failures += 1
        self._deadline = now + _GPU_LIMIT

    def _finish_query(self, now: float) -> None:
        assert self._query is not None
        if self._query.poll() is None and now < self._deadline:
            return
        self._query.kill()  # no effect if it has ended
        output, _ = self._query.communicate()
        self._failures = self._failures + 1 if self._query.returncode else 0
        self._gpus = [] if self._query.returncode else parse_gpus(output)
        self._query = None


def parse_cpu(stat: str) -> tuple[int, int]:
    """Return the ticks in which all CPUs were busy, and all ticks, from /proc/stat."""
    ticks = [int(word) for word in stat.partition("\n")[0].split()[1:9]]  # guests are contained in user and nice
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def parse_memory(meminfo: str) -> tuple[int, int]:
    """Return the bytes in use and the bytes installed, from /proc/meminfo."""
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    free, total = (int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    return total - free, total


def parse_gpus(output: str) -> list[dict[str, Any]]:
    """Return name, busy fraction (None if the GPU does not tell it) and bytes of memory of each GPU, from nvidia-smi's
    lines.
    """
    found = []
    for line in output.splitlines()[:_MOST_GPUS]:
        name, *numbers = (word.strip() for word in line.rsplit(",", 3))
        if len(numbers) == 3:
            busy, used, total = (int(word) if word.isdigit() else None for word in numbers)
            share = None if busy is None else min(1.0, busy / 100)
            memory = [(used or 0) << 20, (total or 0) << 20]
            found.append({"name": name[:_MOST_NAME], "busy": share, "memory": memory})
    return found
