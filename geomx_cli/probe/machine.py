"""Memory, cores and GPUs of this machine, within the limits of a container."""

import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

__all__ = ["boot", "cores", "gpus", "memory", "shared_memory", "slow_start"]

_GROUPS = Path("/sys/fs/cgroup")
_NVIDIA = Path("/proc/driver/nvidia/gpus")
_GPU_LIMIT = 3.0
_MOST = 64


def memory() -> int:
    """Return the bytes available to new processes without swapping or OOM kills; 0 if unknown."""
    text = _read(Path("/proc/meminfo"))
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    rooms = [int(found[1]) * 1024] if found else []
    for group in _groups():
        limit, used = _read(group / "memory.max"), _read(group / "memory.current")
        if limit.isdigit() and used.isdigit():
            cached = re.search(r"^inactive_file (\d+)", _read(group / "memory.stat"), re.MULTILINE)
            rooms.append(max(0, int(limit) - int(used) + (int(cached[1]) if cached else 0)))
    return min(rooms, default=0)


def slow_start() -> bool:
    """Return whether TCP connections forget how much their path takes while they are idle; no if unknown."""
    return _read(Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")) == "1"


def shared_memory() -> int:
    """Return the free bytes of /dev/shm; 0 if it is not in memory."""
    place = "/dev/shm"
    mounts = [line.split() for line in _read(Path("/proc/mounts")).splitlines()]
    if not any(fields[1:3] == [place, "tmpfs"] for fields in mounts):
        return 0
    system = os.statvfs(place)
    return system.f_bavail * system.f_frsize


def cores() -> int:
    """Return the number of cores that this process may use."""
    found = len(os.sched_getaffinity(0))
    for group in _groups():
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            found = min(found, math.ceil(int(quota) / int(period)))
    return max(1, found)


def gpus() -> list[str]:
    """Return the NVIDIA GPUs by index, e.g. "NVIDIA A100, 40960 MiB"; names only if nvidia-smi is missing or fails."""
    if shutil.which("nvidia-smi"):
        try:
            done = subprocess.run(
                ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"],
                capture_output=True, text=True, timeout=_GPU_LIMIT, check=True,
            )  # fmt: skip
            return [line.strip() for line in done.stdout.splitlines() if line.strip()][:_MOST]
        except (OSError, subprocess.SubprocessError):
            pass  # the driver hangs or its versions mismatch: use /proc
    try:
        folders = sorted(_NVIDIA.iterdir())[:_MOST]
    except OSError:
        return []
    models = (re.search(r"^Model:\s+(.+)", _read(folder / "information"), re.MULTILINE) for folder in folders)
    return [model[1].strip() if model else "NVIDIA GPU" for model in models]


def boot() -> str:
    """Return an id that is shared by all users of one kernel and changes with each boot; "" if unknown."""
    return _read(Path("/proc/sys/kernel/random/boot_id"))


def _groups() -> Iterator[Path]:
    """Yield the cgroups (version 2) of this process, from its own upwards."""
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
