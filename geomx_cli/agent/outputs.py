"""What processes save: `GEOMX_OUTPUT_DIR` of each, below outputs/ in the job's directory, and what they saved on other
disks because that one was full.

`record` reports a process's files at its end; streams.py sends them.
"""

import hashlib
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from geomx_cli.agent.host_spec import HostSpec, Task
from geomx_cli.core.files import NotPlain, is_own_folder, open_record
from geomx_cli.core.jsonlines import append_object

__all__ = ["fallback_folders", "find", "folder_of", "folders_of", "outputs", "record", "told_of"]

DISKS = ("/tmp", "/var/tmp", os.path.expanduser("~"))  # noqa: PTH111
_NAMED = 8  # files that an event names
_LONGEST = 400  # characters of a name in an event
_MOST = 10_000  # files of a host
_WALK = 1.0  # seconds that the agent spends on the files of a process that has ended; geomx fetch finds all of them
_PART = re.compile(r".*\.[0-9a-f]{8}\.part")  # an atomic write that was killed


def outputs(host_spec: HostSpec) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the files of all processes of this host, {"process", "name", "size"}, and what cannot be sent, in words:
    links, pipes, unreadable folders, names that are no text, more than 10 000 files.
    """
    files: list[dict[str, Any]] = []
    left_out: list[str] = []
    for task in host_spec.tasks:
        known = set[str]()
        for folder in folders_of(task):
            for name, size, problem in find(folder):
                if problem:
                    left_out.append(f"{folder}/{os.fsencode(name).decode(errors='replace')}: {problem}")
                elif len(files) == _MOST:
                    return files, [*left_out, f"there are more than {_MOST} files"]
                elif name not in known:
                    known.add(name)
                    files.append({"process": task.name, "name": name, "size": size})
                if len(left_out) > _MOST:
                    return files, left_out
    return files, left_out


def folder_of(task: Task) -> Path | None:
    """Return a process's output folder, if it has one."""
    path = task.env.get("GEOMX_OUTPUT_DIR")
    return Path(path) if path else None


def folders_of(task: Task) -> list[Path]:
    """Return the folders in which a process may have saved files: the `fallback_folders` that it has made, then its
    output folder. If two folders have a file of one name, the first folder's counts: it was saved last.
    """
    if (folder := folder_of(task)) is None:
        return []
    return [*filter(is_own_folder, fallback_folders(folder)), folder]


def fallback_folders(folder: Path) -> list[Path]:
    """Return where a process whose output folder cannot be written saves what it cannot save later: a folder of its own
    on each of the other disks, in this order. Whoever looks for it later may have another environment, so
    neither TMPDIR nor the working directory counts.
    """
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]  # another job's process may have its name
    own = f"geomx-{folder.parent.parent.name}-{folder.name}-{digest}"
    return [Path(disk, own) for disk in DISKS]


def find(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (name below the folder, size, problem) of each entry, sorted; links are not followed. Entries that cannot
    be sent have a problem. Unfinished atomic writes are skipped.
    """
    if folder.is_symlink():
        yield "", 0, "it is a link, not a folder"
        return
    problems: list[OSError] = []
    for path, folders, names in os.walk(folder, onerror=problems.append):
        folders.sort()
        for name in sorted([*names, *(sub for sub in folders if Path(path, sub).is_symlink())]):
            place = Path(path, name)
            relative = str(place.relative_to(folder))
            if _PART.fullmatch(name):
                continue
            try:
                with open_record(place) as file:
                    size = os.fstat(file.fileno()).st_size
                relative.encode()
                yield relative, size, ""
            except FileNotFoundError:  # removed meanwhile
                continue
            except NotPlain as error:
                yield relative, 0, error.what
            except OSError as error:
                yield relative, 0, f"cannot be read: {error.strerror}"
            except UnicodeEncodeError:
                yield relative, 0, "its name is not valid UTF-8"
    for wrong in problems:
        if not isinstance(wrong, FileNotFoundError):
            yield os.path.relpath(wrong.filename, folder), 0, f"cannot be read: {wrong.strerror}"


def record(task: Task, events: Path, when: float) -> dict[str, Any] | None:
    """At a process's end, append an event "outputs" with time `when` to its event log, or remove its empty folder.

    The event lists the files that are found within a second. Return it if the log cannot take it, as on a full disk.
    """
    folders, deadline = folders_of(task), time.monotonic() + _WALK
    own = dict(islice(_plain_files(folders[-1], deadline), _MOST)) if folders else {}
    other = [dict(islice(_plain_files(folder, deadline), _MOST)) for folder in folders[:-1]]
    if not (own or any(other)):
        with suppress(OSError):
            for folder in folders[-1:]:
                folder.rmdir()
                folder.parent.rmdir()
        return None
    # Named are those in the folder that readers know.
    found = sorted(own.items(), key=lambda item: (not item[0].startswith("model."), item[0]))
    named = [item for item in found if len(item[0]) <= _LONGEST][:_NAMED]
    event = {
        **told_of(task, "outputs", when),
        "files": dict(named),
        "count": len(found) + sum(map(len, other)),
        "bytes": sum(sum(each.values()) for each in (own, *other)),
    }
    return None if append_object(events, event) else event


def told_of(task: Task, kind: str, when: float) -> dict[str, Any]:
    """Return the fields of an event that the agent writes about a process."""
    who = {"party": task.env.get("GEOMX_PARTY", ""), "role": task.role, "rank": int(task.env.get("GEOMX_RANK", "-1"))}
    return {"schema_version": 1, "time": when, **who, "event": kind}


def _plain_files(folder: Path, deadline: float) -> Iterator[tuple[str, int]]:
    """Yield (name, size) of the plain files below a folder, those at its top first, until the deadline (monotonic)."""
    for path, _, names in os.walk(folder) if not folder.is_symlink() else ():
        for name in names:
            if time.monotonic() > deadline:
                return
            with suppress(OSError, UnicodeEncodeError):
                name.encode()
                info = Path(path, name).lstat()
                if stat.S_ISREG(info.st_mode) and not _PART.fullmatch(name):
                    yield os.path.relpath(Path(path, name), folder), info.st_size

