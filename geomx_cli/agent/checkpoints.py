"""Checkpoints of a host's part of a job: copies of what its processes keep, from which another job goes on.

What survives a process (state_folder.py) is at every moment a point from which it goes on as if it was killed then. So
a checkpoint needs no help of the processes: they are stopped by SIGSTOP, on all hosts of the job, their folders are
copied, and they go on. What they say between the stop of the first and of the last changes nothing: the same would be
on its way if they were killed at these moments.

A checkpoint is the folder NUMBER in `checkpoints`, with a folder for each process and about.json. It gets this name
once it is whole and on disk; until then it ends in ".part".
"""

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from geomx_cli.agent import processes
from geomx_cli.agent.child import Child
from geomx_cli.core.files import make_private
from geomx_cli.core.jsonlines import encode

__all__ = ["ABOUT", "BUSY", "FETCHED", "KEPT", "NO_STATE", "Checkpoint", "Checkpoints", "folder_of", "main", "whole"]

ABOUT = "about.json"
KEPT = 2
"""Newest ones, as of several hosts one may lack the newest."""
BUSY = "another checkpoint is being taken"
NO_STATE = "keeps no state (a script does with geomx.state)"
FETCHED = "resumed"
"""Folder of a host's part of the checkpoint, fetched from elsewhere, from which its job goes on."""
_FOLDER, _PART = "checkpoints", ".part"
_STOPPING = 2.0  # seconds for all threads to stop
_FROZEN = 15.0  # seconds until processes continue, if no order arrives


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
        """Read the one in a folder. Raises OSError if it is not there, and ValueError if it is not whole."""
        try:
            incarnations = json.loads((path / ABOUT).read_bytes())["incarnations"]
            return cls(int(path.name), path, {name: int(life) for name, life in incarnations.items()})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path / ABOUT} is damaged: {error!r}") from None

    def restore(self, child: Child) -> None:
        """Give a process what it had, before its start, and the number of its next life. Raises OSError."""
        assert child.state_dir is not None
        if child.task.role.endswith("scheduler"):  # all join anew, from other addresses
            return
        _copy(self.path / child.task.file_name, child.state_dir)
        child.begin_after(self.incarnations[child.name])


def folder_of(directory: Path) -> Path:
    """Return the folder of the checkpoints of the host whose agent has `directory`."""
    return directory / _FOLDER


def whole(directory: Path) -> list[Checkpoint]:
    """Return the whole checkpoints of the host whose agent had `directory`, the newest first."""
    found = []
    for path in (directory / _FOLDER).glob("*"):
        with suppress(OSError, ValueError):  # incomplete, or of another program
            found.append(Checkpoint.read(path))
    return sorted(found, key=lambda each: each.number, reverse=True)


def main(directory: Path, arguments: Sequence[str]) -> int:
    """Print the whole checkpoints of a host, by number the names of the processes; and what else is in the folder."""
    found = {str(each.number): sorted(each.incarnations) for each in whole(directory)}
    others = sorted(path.name for path in (directory / _FOLDER).glob("*") if path.name not in found)
    print(encode({"folder": str(directory / _FOLDER), "whole": found, "others": others}).decode(), end="")
    return 0


class Checkpoints:
    """Takes checkpoints. Not thread-safe; copies are made by a thread, during which all processes are stopped.

    directory: the agent's. uploading: the number of the one that is not to be removed, as it is being uploaded.
    """

    def __init__(
        self, directory: Path, children: Sequence[Child], uploading: Callable[[], int] = lambda: 0
    ) -> None:
        self._directory = directory
        self._folder = folder_of(directory)
        self._uploading = uploading
        self._children = children
        self._frozen_at: float | None = None
        self._stopped: list[processes.ProcessId] = []
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._problem = ""

    @property
    def frozen(self) -> bool:
        """Whether processes are stopped."""
        return self._frozen_at is not None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being taken."""
        return self.frozen or self._thread is not None

    @property
    def newest(self) -> int:
        """The highest number that a checkpoint here has had, so that no number is used twice; 0 for none."""
        names = [path.stem for path in self._folder.glob("*")]
        return max((int(name) for name in names if name.isascii() and name.isdecimal()), default=0)

    def obstacle(self) -> str:
        """Return why no checkpoint can be taken now; "" if one can."""
        if self.busy:
            return BUSY
        for child in self._children:
            if child.life.status not in (None, 0):
                return f"{child.name} has just died"
            if child.lacks_state and not child.task.role.endswith("scheduler"):
                return f"{child.name} {NO_STATE}"
        return ""

    def freeze(self) -> str:
        """Stop all processes. Return why that is impossible; "" if they are."""
        if problem := self.obstacle():
            return problem
        self._copied.clear()
        self._frozen_at = time.monotonic()
        sessions = [child.life.identity.pid for child in self._children if child.life.running and child.life.identity]
        until = self._frozen_at + _STOPPING
        while time.monotonic() < until:
            self._stopped = processes.session_members(sessions)
            processes.send_signal(self._stopped, signal.SIGSTOP)
            is_complete = {*processes.session_members(sessions)} <= {*self._stopped}
            if is_complete and all(map(processes.is_stopped, self._stopped)):
                return self._late_obstacle()
            time.sleep(0.002)
        self.thaw()
        return f"processes did not stop within {_STOPPING:g} s"

    def _late_obstacle(self) -> str:
        """Why there can be no checkpoint, if a process has died or stopped saving its state before it was suspended."""
        for child in self._children:
            child.life.check_end()
        frozen_at, self._frozen_at = self._frozen_at, None
        problem = self.obstacle()
        self._frozen_at = frozen_at
        if problem:
            self.thaw()
        return problem

    def keep(self, number: int) -> None:
        """Begin to copy the state of the stopped processes, which continue when it is copied. `check` returns the
        outcome.
        """
        sources = [child.state_dir for child in self._children if child.state_dir is not None]
        incarnations = {child.name: child.incarnation for child in self._children}
        self._problem = ""
        self._thread = threading.Thread(target=self._write, args=(number, sources, incarnations), daemon=True)
        self._thread.start()

    def thaw(self) -> None:
        """Let the processes go on."""
        processes.send_signal(self._stopped, signal.SIGCONT)
        self._stopped, self._frozen_at = [], None

    def check(self, now: float) -> str | None:
        """Call regularly. Return the problem of a checkpoint that has ended, "" for none; None if none has."""
        waits_in_vain = self._thread is None and now - (self._frozen_at or now) > _FROZEN
        if self.frozen and (self._copied.is_set() or waits_in_vain):
            self.thaw()
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        if self.frozen:
            self.thaw()
        return self._problem

    def remove(self) -> None:
        """Remove all checkpoints: the job is done."""
        self._remove([self._folder, self._directory / FETCHED])

    def _write(self, number: int, sources: Sequence[Path], incarnations: Mapping[str, int]) -> None:
        part = self._folder / f"{number}{_PART}"
        try:
            self._folder.mkdir(0o700, exist_ok=True, parents=True)
            make_private(self._folder)
            self._remove(path for path in self._folder.glob(f"*{_PART}"))
            part.mkdir(0o700)
            for source in sources:
                _copy(source, part / source.name)
            self._copied.set()
            (part / ABOUT).write_text(json.dumps({"incarnations": dict(incarnations)}))
            for path in (*part.rglob("*"), part):
                _sync(path)
            part.rename(self._folder / str(number))
            _sync(self._folder)
            old = whole(self._folder.parent)[KEPT:]
            self._remove(each.path for each in old if each.number != self._uploading())
        except OSError as error:
            self._problem = f"{part} cannot be written: {error.strerror}"
            self._remove([part])
        except Exception as error:  # otherwise the thread would hide it
            self._problem = f"{part} cannot be written: {error!r}"
            print(self._problem, file=sys.stderr, flush=True)

    @staticmethod
    def _remove(folders: Iterable[Path]) -> None:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


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
