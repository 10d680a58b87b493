"""A checkpoint of a host's part of a job: a copy of what its processes keep, from which another job goes on.

A checkpoint is the folder NUMBER in `checkpoints`, with a folder for each process and about.json. It gets this name
once it is whole and on disk; until then it ends in ".part".
"""

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geomx_cli import __version__
from geomx_cli.agent.child import Child
from geomx_cli.core.files import make_private
from geomx_cli.core.jsonlines import encode

__all__ = [
    "ABOUT", "FETCHED", "KEPT", "Checkpoint", "about", "check_format", "checked_lives", "folder_of", "main",
    "newest", "remove_all", "stamped", "whole",
]  # fmt: skip

ABOUT = "about.json"
KEPT = 2
"""Newest ones, as of several hosts one may lack the newest."""
FETCHED = "resumed"
"""Folder of a host's part of the checkpoint, fetched from elsewhere, from which its job goes on."""
_FORMAT: Mapping[str, Any] = {"format": 1, "geomx": __version__}
"""Of a checkpoint and of the state in it, with the version that writes it. Other versions may have other formats."""
_FOLDER, _PART = "checkpoints", ".part"
_LIVES = 1 << 20  # more than a process can have had


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint of a host's part.

    number: equal on all hosts.
    path: its folder.
    incarnations: of each process, by name.
    """

    number: int
    path: Path
    incarnations: Mapping[str, int]

    @classmethod
    def read(cls, path: Path) -> "Checkpoint":
        """Read the one in a folder. Raises OSError if it is not there, and ValueError if it is not whole, or of a
        version of geomx whose state this one cannot read.
        """
        try:
            fields = json.loads((path / ABOUT).read_bytes())
        except RecursionError:
            fields = None
        if not isinstance(fields, dict):
            raise ValueError(f"its {ABOUT} is damaged")
        check_format(fields)
        return cls(int(path.name), path, checked_lives(fields.get("incarnations")))

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
            (part / ABOUT).write_text(about(incarnations))
            for path in (*part.rglob("*"), part):
                _sync(path)
            part.rename(folder / str(number))
            _sync(folder)
        except BaseException:
            _remove([part])
            raise
        _remove(each.path for each in whole(directory)[KEPT:] if each.number not in kept())

    def restore(self, child: Child) -> None:
        """Give a process what it had, before its start, and the number of its next life. Raises OSError."""
        assert child.state_dir is not None
        if child.task.role.endswith("scheduler"):  # all join anew, from other addresses
            return
        _copy(self.path / child.task.file_name, child.state_dir)
        child.begin_after(self.incarnations[child.name])


def about(incarnations: Mapping[str, int]) -> str:
    """Return the content of about.json."""
    return json.dumps(stamped({"incarnations": dict(incarnations)}))


def stamped(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record with the format."""
    return {**_FORMAT, **fields}


def check_format(fields: Mapping[str, Any]) -> None:
    """Raise ValueError for a record of another format than this version of geomx writes."""
    found, wanted = fields.get("format"), _FORMAT["format"]
    if type(found) is not int or found != wanted:
        raise ValueError(f"its format is {found!r}, of geomx {fields.get('geomx')!r}, not {wanted}")


def checked_lives(found: Any) -> dict[str, int]:
    """Return the incarnation of each process, as a file tells it. Raises ValueError for anything else."""
    if not isinstance(found, dict) or not all(type(life) is int and 0 <= life < _LIVES for life in found.values()):
        raise ValueError("it is damaged: its lives are no numbers")
    return found


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
    _remove([folder_of(directory), directory / FETCHED])


def main(directory: Path, arguments: Sequence[str]) -> int:
    """Print the whole checkpoints of a host, by number the names of the processes; and what else is in the folder."""
    found, others = _found(directory)
    names = {str(each.number): sorted(each.incarnations) for each in found}
    print(encode({"folder": str(folder_of(directory)), "whole": names, "others": sorted(others)}).decode(), end="")
    return 0


def _found(directory: Path) -> tuple[list[Checkpoint], list[str]]:
    """The whole checkpoints, the newest first, and the names of what else is there, with the reason if that helps."""
    found, others = [], []
    for path in folder_of(directory).glob("*"):
        if not _is_number(path.name):
            others.append(path.name)
            continue
        try:
            found.append(Checkpoint.read(path))
        except OSError:  # incomplete, or of another program
            others.append(path.name)
        except ValueError as error:
            others.append(f"{path.name} ({error})")
    return sorted(found, key=lambda each: each.number, reverse=True), others


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal()


def _copy(source: Path, target: Path) -> None:
    """Copy the files of a folder, which has no others; there may be none yet."""
    target.mkdir(0o700, parents=True)
    for path in source.glob("*"):
        shutil.copyfile(path, target / path.name)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
