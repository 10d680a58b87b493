"""Removes what a job has on this host, once nothing of it runs there; with --dry-run only measures it.

Further arguments are the directories of other planned hosts on this machine. Prints {"bytes", "place", "left",
"running"}. place: the directory's path and inode, equal on hosts that share a file system. left: what could not be
removed, in words. running: how many processes of the job run here; then nothing is removed.
"""

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from geomx_cli.agent import state_folder
from geomx_cli.agent.host_spec import HostSpec
from geomx_cli.agent.outputs import folders_of
from geomx_cli.agent.stop import remains
from geomx_cli.core.conventions import START_FOLDER
from geomx_cli.core.errors import CheckFailed
from geomx_cli.core.jsonlines import encode

__all__ = ["ENTRIES", "main", "remove", "size_of"]

ENTRIES = ("events", "files", "hosts", "keys", "logs", "outputs", START_FOLDER)
"""What a job has in its directory on each host. Other files there are not the job's, and are never removed."""


def main(directory: Path, arguments: Sequence[str]) -> int:
    """Remove the entries of the job's directory, of which `directory` is hosts/HOST."""
    dry_run = "--dry-run" in arguments
    parts = (directory, *(Path(word) for word in arguments if word != "--dry-run"))
    running = sum(len(remains(part)()) for part in parts)
    job_dir = directory.parent.parent
    try:
        place = f"{job_dir} {job_dir.stat().st_ino}"
    except FileNotFoundError:
        place = str(job_dir)
    further = [folder for part in parts for folder in _elsewhere(part)]
    # Another host that shares the file system may read, at the same time, the list of its further folders in its own
    # folder.
    own = [*(name for name in ENTRIES if name != "hosts"), *(f"hosts/{part.name}" for part in parts)]
    size = size_of([*(job_dir / name for name in own), *further])
    left = "" if dry_run or running else remove(job_dir, own, further)
    if not dry_run:
        state_folder.remove_abandoned()
    if not left:
        for empty in (job_dir / "hosts", job_dir):
            with suppress(OSError):
                empty.rmdir()
    print(encode({"bytes": size, "place": place, "running": running, "left": left}).decode(), end="")
    return 0


def _elsewhere(directory: Path) -> list[Path]:
    """Return the folders on other disks in which the processes of a planned host have saved, and in memory."""
    state = state_folder.found(directory)
    try:
        host_spec = HostSpec.read(directory)
    except (OSError, CheckFailed):
        return state
    return [*state, *(folder for task in host_spec.tasks for folder in folders_of(task)[:-1])]


def size_of(paths: Iterable[Path]) -> int:
    """Return the bytes that these files and folders occupy on the disk; links are not followed."""
    total = 0
    for path in paths:
        for place in _below(path, []):
            with suppress(OSError):
                total += place.lstat().st_blocks * 512
    return total


def remove(folder: Path, names: Iterable[str], further: Iterable[Path] = ()) -> str:
    """Remove `further` folders, then these entries of a folder, and the folder if it is then empty. Return the first
    that is left and why.

    What another host that shares the file system removes at the same time is not left.
    """
    problems: list[OSError] = []
    for path in (*further, *(folder / name for name in names)):  # the job's entries tell the further ones
        for place in _below(path, problems):
            try:
                if stat.S_ISDIR(place.lstat().st_mode):
                    place.rmdir()
                else:
                    place.unlink()
            except OSError as error:
                problems.append(error)
    with suppress(OSError):
        folder.rmdir()
    left = [error for error in problems if not isinstance(error, FileNotFoundError)]
    return f"{left[0].filename} cannot be removed: {left[0].strerror}" if left else ""


def _below(path: Path, problems: list[OSError]) -> Iterator[Path]:
    """Yield everything below a path, and the path, contents before their folder."""
    if path.is_symlink() or not path.is_dir():
        if os.path.lexists(path):
            yield path
        return
    for at, folders, files in os.walk(path, topdown=False, onerror=problems.append):
        yield from (Path(at, name) for name in files)
        yield from (Path(at, name) for name in folders if Path(at, name).is_symlink())
        yield Path(at)
