"""A checkpoint of a host's part of a job: a copy of what its processes keep, from which another job goes on.

A checkpoint is the folder NUMBER in `checkpoints`, with a folder for each process and about.json, which has the size
and the digest of each file. It gets this name once it is whole and on disk; until then it ends in ".part".
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from geomx_cli import __version__
from geomx_cli.agent import agent_lock
from geomx_cli.agent.child import Child
from geomx_cli.core.files import make_private
from geomx_cli.core.jsonlines import encode

__all__ = [
    "ABOUT", "FETCHED", "KEPT", "Checkpoint", "Part", "check_format", "folder_of", "is_name", "main", "newest",
    "remove_all", "stamped", "whole",
]  # fmt: skip

ABOUT = "about.json"
KEPT = 2
"""Newest ones, as of several hosts one may lack the newest."""
FETCHED = "resumed"
"""Folder of a host's part of the checkpoint, fetched from elsewhere, from which its job goes on."""
_FORMAT: Mapping[str, Any] = {"format": 2, "geomx": __version__}
"""Of a checkpoint and of the state in it, with the version that writes it. Other versions may have other formats."""
_FOLDER, _PART = "checkpoints", ".part"
_LIVES = 1 << 20  # more than a process can have had
_LONGEST = 255  # characters of a name


@dataclass(frozen=True)
class Part:
    """What a host has of a checkpoint.

    incarnations: of each process, by name.
    files: size in bytes and SHA-256 of each file, by PROCESS/FILE.
    """

    incarnations: Mapping[str, int]
    files: Mapping[str, tuple[int, str]]

    @classmethod
    def of(cls, fields: Any) -> "Part":
        """Check the fields of a record. Raises ValueError."""
        if not isinstance(fields, dict):
            raise ValueError("it has no fields")
        lives, described = fields.get("incarnations"), fields.get("files")
        if not isinstance(lives, dict) or not all(type(life) is int and 0 <= life < _LIVES for life in lives.values()):
            raise ValueError("its lives are no numbers")
        if not isinstance(described, dict):
            raise ValueError("it lists no files")
        files: dict[str, tuple[int, str]] = {}
        for name, about in described.items():
            words = name.split("/")
            if len(words) != 2 or not all(map(is_name, words)):
                raise ValueError(f"it names a file {name!r}")
            match about:
                case [int(size), str(digest)] if type(size) is int and size >= 0:
                    files[name] = size, digest
                case _:
                    raise ValueError(f"it describes the file {name} as {about!r}")
        return cls(lives, files)

    @classmethod
    def describe(cls, folder: Path, incarnations: Mapping[str, int]) -> "Part":
        """Describe the files of the processes' folders in a folder. Raises OSError."""
        paths = sorted(folder.glob("*/*"))
        return cls(incarnations, {path.relative_to(folder).as_posix(): _digest(path) for path in paths})

    def write(self, folder: Path) -> None:
        """Write the record of the folder. Raises OSError."""
        (folder / ABOUT).write_text(json.dumps(stamped(asdict(self))))

    def of_process(self, own: str) -> list[str]:
        """Return the names of the files of a process, whose folder has the name `own`."""
        return [name for name in self.files if name.startswith(f"{own}/")]


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint of a host's part.

    number: equal on all hosts.
    path: its folder.
    """

    number: int
    path: Path
    part: Part

    @classmethod
    def read(cls, path: Path) -> "Checkpoint":
        """Read the one in a folder, whose files have their full length. Raises OSError if it is not there, and
        ValueError if it is not whole, or of a version of geomx whose state this one cannot read.
        """
        try:
            fields = json.loads((path / ABOUT).read_bytes())
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise ValueError(f"its {ABOUT} is damaged")
        check_format(fields)
        found = cls(int(path.name), path, Part.of(fields))
        for name, (size, _) in found.part.files.items():
            try:
                there = (path / name).stat().st_size
            except FileNotFoundError:
                raise ValueError(f"{name} is missing") from None
            if there != size:
                raise ValueError(f"{name} has {there} bytes instead of {size}")
        return found

    def verify(self, names: Iterable[str]) -> None:
        """Raise ValueError if one of these files is not as it was written, and OSError."""
        for name in names:
            if _digest(self.path / name) != self.part.files[name]:
                raise ValueError(f"{name} is damaged: its digest is another")

    @staticmethod
    def write(
        directory: Path, number: int, sources: Iterable[Path], incarnations: Mapping[str, int],
        on_copied: Callable[[], None], kept: Callable[[], Collection[int]],
    ) -> None:  # fmt: skip
        """Write one from the folders of processes, which are suspended until `on_copied` is called, and remove older
        ones. Raises OSError, and what `on_copied` raises; then nothing of it is left.

        kept: returns the numbers of older ones that stay.
        """
        folder = folder_of(directory)
        part = folder / f"{number}{_PART}"
        try:
            folder.mkdir(0o700, exist_ok=True, parents=True)
            make_private(folder)
            _remove(folder.glob(f"*{_PART}"))
            part.mkdir(0o700)
            for source in sources:
                _copy(source, part / source.name)
            on_copied()
            Part.describe(part, incarnations).write(part)
            for path in (*part.rglob("*"), part):
                _sync(path)
            part.rename(folder / str(number))
            _sync(folder)
        except BaseException:
            _remove([part])
            raise
        _remove(each.path for each in whole(directory)[KEPT:] if each.number not in kept())

    def restore(self, child: Child) -> None:
        """Give a process what it had, before its start, and the number of its next life. Raises OSError, and ValueError
        for damaged files.
        """
        assert child.state_dir is not None
        if child.task.role.endswith("scheduler"):  # all join anew, from other addresses
            return
        names = self.part.of_process(child.task.file_name)
        self.verify(names)
        child.state_dir.mkdir(0o700, parents=True)
        for name in names:
            shutil.copyfile(self.path / name, child.state_dir / Path(name).name)
        child.begin_after(self.part.incarnations[child.name])


def stamped(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record with the format."""
    return {**_FORMAT, **fields}


def check_format(fields: Mapping[str, Any]) -> None:
    """Raise ValueError for a record of another format than this version of geomx writes."""
    found, wanted = fields.get("format"), _FORMAT["format"]
    if type(found) is not int or found != wanted:
        raise ValueError(f"its format is {found!r}, of geomx {fields.get('geomx')!r}, not {wanted}")


def is_name(name: str) -> bool:
    """Whether a text from a record is the name of a file or folder, and no path."""
    return bool(name) and name not in (".", "..") and not set(name) & {"/", "\0"} and len(name) <= _LONGEST


def folder_of(directory: Path) -> Path:
    """Return the folder of the checkpoints of the host whose agent has `directory`."""
    return directory / _FOLDER


def whole(directory: Path) -> list[Checkpoint]:
    """Return the whole checkpoints of the host whose agent had `directory`, the newest first."""
    return _found(directory)[0]


def newest(directory: Path) -> int:
    """Return the highest number that a checkpoint there has had, so that no number is used twice; 0 for none."""
    names = [path.stem for path in folder_of(directory).glob("*")]
    return max((int(name) for name in names if _is_number(name)), default=0)


def remove_all(directory: Path) -> None:
    """Remove all checkpoints of a host: the job is done."""
    folder = folder_of(directory)
    gone = folder.with_name(f"{_FOLDER}{_PART}")
    with suppress(OSError):  # so a copy that is being written fails, and leaves nothing
        folder.rename(gone)
    _remove([gone, folder, directory / FETCHED])


def main(directory: Path, arguments: Sequence[str]) -> int:
    """Print the whole checkpoints of a host, by number the names of the processes; what else is in the folder; and
    whether the host's agent or its keeper runs.
    """
    running = bool(agent_lock.holders(directory))
    found, others = _found(directory, verified=True)
    names = {str(each.number): sorted(each.part.incarnations) for each in found}
    answer = {"running": running, "folder": str(folder_of(directory)), "whole": names, "others": sorted(others)}
    print(encode(answer).decode(), end="")
    return 0


def _found(directory: Path, *, verified: bool = False) -> tuple[list[Checkpoint], list[str]]:
    """The whole checkpoints, the newest first, and the names of what else is there, with the reason if that helps.

    verified: the content of each file is compared with its digest too.
    """
    found, others = [], []
    for path in folder_of(directory).glob("*"):
        if not _is_number(path.name):
            others.append(path.name)
            continue
        try:
            checkpoint = Checkpoint.read(path)
            if verified:
                checkpoint.verify(checkpoint.part.files)
            found.append(checkpoint)
        except OSError:  # incomplete, or of another program
            others.append(path.name)
        except ValueError as error:
            others.append(f"{path.name} ({error})")
    return sorted(found, key=lambda each: each.number, reverse=True), others


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal()


def _copy(source: Path, target: Path) -> None:
    """Copy the files of a folder, which has no others. Raises OSError, also if the folder has been removed: an empty
    copy would take the place of good ones.
    """
    target.mkdir(0o700)
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, target / path.name)


def _digest(path: Path) -> tuple[int, str]:
    """The size and the SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
