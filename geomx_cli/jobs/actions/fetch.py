"""Fetch what a job's processes have saved, from all its hosts: DIR/JOB/outputs/PROCESS/NAME."""

import errno
import os
import threading
from collections.abc import Callable, Collection
from contextlib import closing as closing_one
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from geomx_cli.core.errors import CheckFailed, GeomxError
from geomx_cli.core.events import MAX_COUNT
from geomx_cli.core.files import locked_folder
from geomx_cli.core.untrusted import first_line
from geomx_cli.hosts import Connector, closing, everywhere
from geomx_cli.jobs.actions.streams import Changed, FileStream, Listed, Reconnects, Refused, no_room
from geomx_cli.jobs.store.registry import KnownJob

__all__ = ["FETCH_VERSION", "FOLDER", "PARTIAL", "FetchProgress", "Fetched", "fetch", "is_safe"]

FETCH_VERSION = 1
FOLDER, PARTIAL = "outputs", "outputs.part"
_MOST_FILES = 10_000  # per host
_LONGEST = 4096  # bytes of a name
_SHOWN = 500  # characters of a problem
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOCAL_HINT = "free disk space or fix permissions here, or choose another folder; fetch again to continue"


class _Listing(msgspec.Struct):
    files: list[Listed]
    left_out: list[str] = []


@dataclass(frozen=True)
class Fetched:
    """A file that is here and verified. how: whether it had been fetched before, or in part."""

    host: str
    process: str
    name: str
    size: int
    sha256: str
    path: str
    how: Literal["fetched", "continued", "present"]


class FetchProgress(Protocol):
    """Receives the progress of a fetch, from the threads of several hosts."""

    def on_list(self, files: Collection[Listed]) -> None:
        """A host has these files."""

    def on_bytes(self, file: Listed, done: int) -> None:
        """The first `done` bytes of a file are here."""

    def on_file(self, file: Fetched) -> None:
        """A file is here and verified."""

    def warn(self, text: str) -> None:
        """A connection broke."""


def fetch(
    job: KnownJob, base: Path, progress: FetchProgress, wanted: Callable[[Listed], bool] = lambda _: True
) -> dict[str, Any]:
    """Fetch all files of a job's outputs, or those `wanted`, to BASE/JOB/outputs; may be repeated, also while the job
    runs.

    Each file is the host's, by SHA-256, or is not replaced. What has arrived of an interrupted transfer is kept in
    BASE/JOB/outputs.part and continued; that is also done at once where a connection breaks, for up to 60 s without
    progress. Hosts and files that could not be fetched are among the "problems". Raises CheckFailed if BASE cannot be
    written.
    """
    folder = base / job.plan.job
    problems: list[dict[str, str]] = []
    interrupted = threading.Event()

    def all_of(host: Connector, reconnects: Reconnects, got: list[Fetched], tried: set[str]) -> None:
        """Fetch what has not been tried; `tried`: the paths of files, and "" once the host's list is known."""
        if interrupted.is_set():
            return
        with closing_one(_Transfer(job, host, folder, progress, reconnects)) as transfer:
            files, left_out = transfer.listing()
            files = list(filter(wanted, files))
            if "" not in tried:
                problems.extend({"host": host.name, "problem": what} for what in left_out)
                progress.on_list(files)
            tried.add("")
            for listed in sorted(files, key=lambda one: one.size):  # an interrupt costs only the largest
                if listed.path not in tried and not interrupted.is_set():
                    try:
                        got.append(transfer.file(listed))
                        progress.on_file(got[-1])
                    except Refused as error:
                        problems.append({"host": host.name, "problem": f"{listed.path}: {error}"})
                    tried.add(listed.path)

    def one(host: Connector) -> list[Fetched]:
        got: list[Fetched] = []
        reconnects = Reconnects(progress.warn, interrupted)
        tried: set[str] = set()
        try:
            reconnects.repeat(lambda: all_of(host, reconnects, got, tried))
        except OSError as error:
            if error.errno in _FULL or str(error.filename or "").startswith(str(folder)):
                raise CheckFailed(f"cannot write to {folder}: {error.strerror}", _LOCAL_HINT) from None
            problems.append({"host": host.name, "problem": first_line(error, host.name)})
        except (GeomxError, ValueError) as error:
            problems.append({"host": host.name, "problem": first_line(error, host.name)})
        return got

    with locked_folder(base), closing(job.open_hosts()) as hosts:
        try:
            found = [entry for entries in everywhere(one, hosts.values()) for entry in entries]
        except BaseException:
            interrupted.set()
            raise
        finally:
            _remove_empty(folder / PARTIAL)
    return {
        "schema_version": FETCH_VERSION,
        "job": job.plan.job,
        "folder": str(folder / FOLDER),
        "complete": not problems,
        "files": [asdict(entry) for entry in found],
        "problems": problems,
    }


def is_safe(name: str) -> bool:
    """Whether a file name from a host stays below the folder that it is put into, and can be printed."""
    parts = name.split("/")
    printable = name.isprintable() and "\N{REPLACEMENT CHARACTER}" not in name  # see `plain`
    return printable and len(name.encode()) <= _LONGEST and not {"", ".", ".."}.intersection(parts)


class _Transfer:
    """The outputs of one host."""

    def __init__(
        self, job: KnownJob, host: Connector, folder: Path, progress: FetchProgress, reconnects: Reconnects
    ) -> None:
        self._host = host.name
        self._own = {process.name for process in job.plan.on_host(host.name)}
        self._folder = folder
        self._progress = progress
        self._files = FileStream(host, job.directory_on(host.name), "outputs", reconnects.progress)

    def close(self) -> None:
        self._files.close()

    def listing(self) -> tuple[list[Listed], list[str]]:
        """Return the files that the host has, and problems with others. Raises CheckFailed if it sends no list."""
        found = self._files.listing(_Listing, packed=False)
        good, bad = [], []
        for listed in found.files[:_MOST_FILES]:
            if listed.process in self._own and is_safe(listed.name) and 0 <= listed.size < MAX_COUNT:
                good.append(listed)
            else:
                bad.append(f"{listed.path!r} cannot be put below the folder of its process: it is left out")
        return good, [what[:_SHOWN] for what in (*bad, *found.left_out[:_MOST_FILES])]

    def file(self, listed: Listed) -> Fetched:
        """Fetch a file. Raises Refused for it alone, CheckFailed for the rest of this host, OSError for this disk."""
        target, part = self._folder / FOLDER / listed.path, self._folder / PARTIAL / listed.path
        try:
            for path in (target, part):
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if target.is_dir() or part.is_dir():
                raise IsADirectoryError
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            raise Refused("a file and a folder have this name") from None
        held = target if target.is_file() and target.stat().st_size == listed.size else part
        if problem := no_room(part, listed.size, held.stat().st_size if held.is_file() else 0):
            raise Refused(problem)
        self._files.ask(listed, held)
        try:
            got = self._files.receive(part, lambda done: self._progress.on_bytes(listed, done))
        except Changed:
            part.unlink()
            raise
        if got.is_new:
            part.replace(target)
        else:
            part.unlink(missing_ok=True)
        self._progress.on_bytes(listed, got.size)
        how: Literal["fetched", "continued", "present"] = "continued" if got.offset else "fetched"
        return Fetched(
            self._host, listed.process, listed.name, got.size, got.sha256, str(target), how if got.is_new else "present"
        )


def _remove_empty(folder: Path) -> None:
    """Remove a folder, and those below it, as far as they are empty."""
    for at, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            Path(at).rmdir()
