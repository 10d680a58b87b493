"""Why a process does not go on: want of memory, a full disk, SIGSTOP, a native function that hangs."""

import os
import re
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["LOCAL", "OomWatcher", "StopDetector", "file_system", "full_disk"]

# Detection of kills by the kernel's OOM killer.

_RECENT = 3.0  # seconds; an OOM-killed process may take a while to end


class OomWatcher:
    """Polls the kernel's OOM kill counter. Not thread-safe; poll it several times per second."""

    def __init__(self, counts: Path = Path("/proc/vmstat")) -> None:
        self._counts = counts
        self._kills = self._count()
        self._when = float("-inf")

    def ran_out(self) -> bool:
        """Whether an OOM kill occurred within the last seconds, since this object was created."""
        if (kills := self._count()) > self._kills:
            self._kills, self._when = kills, time.monotonic()
        return time.monotonic() - self._when < _RECENT

    def _count(self) -> int:
        try:
            lines = self._counts.read_text().splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


# Finds the disk on which a process had no room.

_LIMIT = 2.0  # seconds; a path may lie on a file system whose server does not answer
_LEAST = 1 << 16  # bytes; a log entry may need a page of its own
_ERRORS = re.compile(r"No space left on device|Disk quota exceeded")
LOCAL = ("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs")
_PATH = re.compile(r"'(/[^'\n]{1,1000})'")


def full_disk(output: str, job_dir: Path, others: Iterable[Path]) -> str:
    """Return the mount point and device of the disk that is full, as in "/data (/dev/sdb1)", or "".

    `output`: what a process wrote before it ended. If this is an error about lack of room, look first at the disks of
    the paths in it, then at the disks of `others` (folders to which the process may write), then at all local disks. A
    disk is full if it has no free bytes or inodes. Returns "" if that takes longer than 2 s.
    """
    found: list[str] = []
    search = threading.Thread(target=lambda: found.append(_search(output, job_dir, others)), daemon=True)
    search.start()
    search.join(_LIMIT)
    return found[0] if found else ""


def _search(output: str, job_dir: Path, others: Iterable[Path]) -> str:
    lacks = _ERRORS.search(output)
    named = [Path(path) for path in _PATH.findall(output[lacks.start() :])] if lacks else []
    # Of other disks, those are looked at whose state is known without waiting for a server.
    disks = [Path(fields[1]) for fields in _mounts() if fields[2] in LOCAL] if lacks else []
    for place in (*named, job_dir, *(others if lacks else ()), *disks):
        with suppress(OSError):
            if _is_full(_existing(place)):
                return _mount(_existing(place))
    if lacks and named:  # a quota, or room was made in the meantime
        with suppress(OSError):
            return _mount(_existing(named[0]))
    return ""


def _mounts() -> list[list[str]]:
    """Device, mount point, type and options of each mount; a later one hides an earlier one at the same point."""
    return [line.split(" ") for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines()]


def file_system(path: Path) -> str:
    """Return the type of the file system that a path lies on, as in "ext4"; "" if the kernel does not tell."""
    point = _mount_point(path)
    return next((fields[2] for fields in reversed(_mounts()) if fields[1] == str(point)), "")


def _existing(path: Path) -> Path:
    while not os.path.exists(path) and path != path.parent:  # noqa: PTH110  # Path.exists may raise
        path = path.parent
    return path


def _is_full(path: Path) -> bool:
    system = os.statvfs(path)
    if system.f_blocks == 0 or system.f_flag & os.ST_RDONLY:
        return False
    return system.f_bavail * system.f_frsize < _LEAST or (system.f_files > 0 and system.f_favail == 0)


def _mount_point(path: Path) -> Path:
    point = path.resolve()
    while not os.path.ismount(point):
        point = point.parent
    return point


def _mount(path: Path) -> str:
    point = _mount_point(path)
    devices = {fields[1]: f" ({fields[0]})" for fields in _mounts()}
    return f"{point}{devices.get(str(point), '')}"


_NOTICE = 5.0  # seconds


class StopDetector:
    """`limit`: seconds that the process may be stopped, or hang."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._since: float | None = None
        self._noticed = False

    def check(self, *, stopped: bool) -> bool:
        """Take its present state; return whether it has been in it for longer than the limit."""
        if not stopped:
            self._since, self._noticed = None, False
            return False
        self._since = self._since or time.monotonic()
        return time.monotonic() - self._since >= self.limit

    def notices(self) -> bool:
        """Return, once each time, whether it has been in it for a while as of the last check."""
        if self._since is None or self._noticed or time.monotonic() - self._since < _NOTICE:
            return False
        self._noticed = True
        return True
