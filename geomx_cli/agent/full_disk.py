"""Finds the disk on which a process had no room."""

import os
import re
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["full_disk"]

_LIMIT = 2.0  # seconds; a path may lie on a file system whose server does not answer
_LEAST = 1 << 16  # bytes; a log entry may need a page of its own
_ERRORS = re.compile(r"No space left on device|Disk quota exceeded")
_LOCAL = ("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs")
_PATH = re.compile(r"'(/[^'\n]{1,1000})'")


def full_disk(output: str, job_dir: Path, others: Iterable[Path]) -> str:
    """Return the mount point and device of the disk that is full, as in "/data (/dev/sdb1)", or "".

    `output`: what a process wrote before it ended. If that is an error for lack of room, the disks of the paths in it
    come first, then those of `others`, folders that the process may write to, then any local one that is full. A disk
    is full if it has no free bytes or inodes. Returns "" if that takes longer than 2 s.
    """
    found: list[str] = []
    search = threading.Thread(target=lambda: found.append(_search(output, job_dir, others)), daemon=True)
    search.start()
    search.join(_LIMIT)
    return found[0] if found else ""


def _search(output: str, job_dir: Path, others: Iterable[Path]) -> str:
    lacks = _ERRORS.search(output)
    named = [Path(path) for path in _PATH.findall(output[lacks.start() :])] if lacks else []
    for place in (*named, job_dir, *((*others, *_local_disks()) if lacks else ())):
        with suppress(OSError):
            if _is_full(_existing(place)):
                return _mount(_existing(place))
    if lacks and named:  # a quota, or room was made in the meantime
        with suppress(OSError):
            return _mount(_existing(named[0]))
    return ""


def _local_disks() -> list[Path]:
    """The mount points of disks whose state is known without waiting for a server."""
    return [Path(fields[1]) for fields in _mounts() if fields[2] in _LOCAL]


def _mounts() -> list[list[str]]:
    """Device, mount point, type and options of each mount; a later one hides an earlier one at the same point."""
    return [line.split(" ") for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines()]


def _existing(path: Path) -> Path:
    while not os.path.exists(path) and path != path.parent:  # noqa: PTH110  # Path.exists may raise
        path = path.parent
    return path


def _is_full(path: Path) -> bool:
    system = os.statvfs(path)
    if system.f_blocks == 0 or system.f_flag & os.ST_RDONLY:
        return False
    return system.f_bavail * system.f_frsize < _LEAST or (system.f_files > 0 and system.f_favail == 0)


def _mount(path: Path) -> str:
    point = path.resolve()
    while not os.path.ismount(point):
        point = point.parent
    devices = {fields[1]: f" ({fields[0]})" for fields in _mounts()}
    return f"{point}{devices.get(str(point), '')}"
