"""The folder in which a host's processes keep what survives them, so that one that was killed can go on.

It lies in memory, or on a disk of this host. It is removed with the processes. If the agent and its keeper were killed,
it stays: `geomx stop` and `geomx jobs prune` remove it by the directory of the agent. If that directory is gone, the
next job of the account on this host removes it.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from geomx_cli.agent import processes
from geomx_cli.agent.diagnosis import LOCAL, file_system
from geomx_cli.core import state_notes
from geomx_cli.core.files import is_own_folder, write_atomic

__all__ = [
    "choose", "continues", "create", "environment", "forbid", "found", "keep_environment", "remove", "remove_abandoned",
]  # fmt: skip

_MEMORY = Path("/dev/shm")
_ROOM = 64 << 20  # bytes
_ENVIRONMENT = "environment.json"
_OWNER = "owner.json"
_NAME = 80  # characters of a job's id and of a host's name in that of the folder


def create(directory: Path, job: str) -> tuple[Path | None, str]:
    """Create the folder for the host whose agent has `directory`, without what an earlier agent has left there, and
    remove abandoned ones. No agent follows yet: see `state_notes.permit`.

    Returns it; or None, and why there is none, in words.
    """
    remove(directory)
    remove_abandoned()
    place, problem = choose(directory, job)
    if place is not None:
        try:
            place.mkdir(0o700)
        except OSError as error:
            return None, f"{place} cannot be created: {error.strerror}"
        with suppress(OSError):  # then only its directory leads to it
            write_atomic(place / _OWNER, json.dumps([str(directory), _view()]).encode(), 0o600)
    return place, problem


def choose(directory: Path, job: str) -> tuple[Path | None, str]:
    """Return where the folder is to lie: in memory if there is room, else on a local disk. A file system of another
    machine does not keep up with rounds. Returns None, and why, if neither is possible.
    """
    memory = _MEMORY / f"geomx-{os.geteuid()}-{job[:_NAME]}-{directory.name[:_NAME]}-{_digest(directory)}"
    problems = [_lack_of_memory(_MEMORY), _lack_of_disk(directory)]
    if not problems[0]:
        return memory, ""
    return (directory / "state", "") if not problems[1] else (None, " and ".join(problems))


def continues(directory: Path) -> Path | None:
    """Return the folder from which the processes go on if the agent is killed; None if no agent may follow."""
    return next(filter(state_notes.are_continued, found(directory)), None)


def forbid(directory: Path) -> None:
    """Let no agent follow this one: the job ends, or the data that the next agent needs cannot be written. Works on a
    full disk.
    """
    for place in found(directory):
        state_notes.forbid(place)


def keep_environment(folder: Path, variables: Mapping[str, str]) -> None:
    """Save the variables that processes inherit, which a next agent may not have. Does nothing on a full disk."""
    with suppress(OSError):
        write_atomic(folder / _ENVIRONMENT, json.dumps(variables).encode(), 0o600)


def environment(folder: Path) -> dict[str, str] | None:
    """Return the variables that were saved; None without any."""
    try:
        return {str(name): str(value) for name, value in json.loads((folder / _ENVIRONMENT).read_bytes()).items()}
    except (OSError, ValueError, AttributeError):
        return None


def found(directory: Path) -> list[Path]:
    """Return the folders that there are."""
    places = [*_MEMORY.glob(f"geomx-{os.geteuid()}-*-{_digest(directory)}"), directory / "state"]
    return [place for place in places if is_own_folder(place)]


def remove(directory: Path) -> None:
    """Remove them."""
    for place in found(directory):
        shutil.rmtree(place, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove the folders in memory of this account's agents whose directories are gone. They have the environment of
    these jobs, with its keys.

    A folder stays while a process of its job runs. One that was created in another container stays too: that may have
    its directory.
    """
    for place in _MEMORY.glob(f"geomx-{os.geteuid()}-*"):
        directory = _owner(place) if is_own_folder(place) else None
        if directory is not None and not os.path.lexists(directory) and not _is_used(directory):
            shutil.rmtree(place, ignore_errors=True)


def _owner(place: Path) -> Path | None:
    """Return the agent's directory to which a folder belongs; None if that cannot be known here."""
    try:
        directory, view = json.loads((place / _OWNER).read_bytes())
        return Path(directory) if view == _view() else None
    except (OSError, ValueError, TypeError):
        return None


def _view() -> str:
    """Return what identifies the file systems that this process sees, until the next boot."""
    return str(Path("/proc/self/ns/mnt").readlink())


def _is_used(directory: Path) -> bool:
    """Whether an agent, a keeper or a process of a host's part of a job runs."""
    part = {"GEOMX_JOB_DIR": str(directory.parent.parent), "GEOMX_HOST": directory.name}
    return bool(processes.marked(part) or processes.with_arguments("-m", "geomx_cli.agent", "run", str(directory)))


def _lack_of_memory(place: Path) -> str:
    if not place.is_dir() or file_system(place) != "tmpfs":
        return f"{place} is not in memory"
    return _lack_of_room(place)


def _lack_of_disk(place: Path) -> str:
    kind = file_system(place)
    return _lack_of_room(place) if kind in LOCAL else f"{place} is no local disk, but {kind or 'unknown'}"


def _lack_of_room(place: Path) -> str:
    system = os.statvfs(place)
    free = system.f_bavail * system.f_frsize
    return f"{place} has only {free >> 20} of {_ROOM >> 20} MiB free" if free < _ROOM else ""


def _digest(directory: Path) -> str:
    return hashlib.sha256(os.fsencode(directory)).hexdigest()[:12]
