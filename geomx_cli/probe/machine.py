"""What this machine has: memory, cores, GPUs. A container counts as what it may use."""

import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

__all__ = ["boot", "cores", "gpus", "memory"]

_GROUPS = Path("/sys/fs/cgroup")
_NVIDIA = Path("/proc/driver/nvidia/gpus")
_GPU_LIMIT = 3.0
_MOST = 64


def memory() -> int:
    """Bytes that new processes may take without anything being swapped out or killed; 0 where nobody says."""
    text = _read(Path("/proc/meminfo"))
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    rooms = [int(found[1]) * 1024] if found else []
    for group in _groups():
        limit, used = _read(group / "memory.max"), _read(group / "memory.current")
        if limit.isdigit() and used.isdigit():
            cached = re.search(r"^inactive_file (\d+)", _read(group / "memory.stat"), re.MULTILINE)
            rooms.append(max(0, int(limit) - int(used) + (int(cached[1]) if cached else 0)))
    return min(rooms, default=0)


def cores() -> int:
    """Cores that this process may use."""
    found = len(os.sched_getaffinity(0))
    for group in _groups():
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            found = min(found, math.ceil(int(quota) / int(period)))
    return max(1, found)


def gpus() -> list[str]:
    """The NVIDIA GPUs by their index, as "NVIDIA A100, 40960 MiB"; without the driver's tool only their names."""
    if shutil.which("nvidia-smi"):
        try:
            done = subprocess.run(
                ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"],
                capture_output=True, text=True, timeout=_GPU_LIMIT, check=True,
            )  # fmt: skip
            return [line.strip() for line in done.stdout.splitlines() if line.strip()][:_MOST]
        except (OSError, subprocess.SubprocessError):
            pass  # the driver hangs or does not match: ask the kernel
    try:
        folders = sorted(_NVIDIA.iterdir())[:_MOST]
    except OSError:
        return []
    models = (re.search(r"^Model:\s+(.+)", _read(folder / "information"), re.MULTILINE) for folder in folders)
    return [model[1].strip() if model else "NVIDIA GPU" for model in models]


def boot() -> str:
    """The same for all that share a kernel, another after each start of it; "" where nobody says."""
    return _read(Path("/proc/sys/kernel/random/boot_id"))


def _groups() -> Iterator[Path]:
    """The control groups (version 2) that this process is in, from its own upwards."""
    found = re.search(r"^0::(/.*)", _read(Path("/proc/self/cgroup")), re.MULTILINE)
    place = _GROUPS / found[1].lstrip("/") if found else _GROUPS
    while place.is_relative_to(_GROUPS):
        yield place
        place = place.parent


def _read(path: Path) -> str:
    try:
        with path.open(errors="replace") as file:
            return file.read(1 << 16).strip()
    except OSError:
        return ""
