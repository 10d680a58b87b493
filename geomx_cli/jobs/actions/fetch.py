"""Fetch what a job's processes have saved, from all its hosts: DIR/JOB/outputs/PROCESS/NAME."""

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Collection
from contextlib import closing as closing_one
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from geomx_cli.core.conventions import file_name, module_command
from geomx_cli.core.errors import CheckFailed, GeomxError, HostUnreachable
from geomx_cli.core.events import MAX_COUNT
from geomx_cli.core.files import locked_folder
from geomx_cli.core.jsonlines import encode
from geomx_cli.core.units import format_bytes
from geomx_cli.core.untrusted import decode, first_line, last_line
from geomx_cli.hosts import Connector, closing, everywhere
from geomx_cli.jobs.actions.agent_connection import ChannelInput
from geomx_cli.jobs.actions.reconnects import Reconnects
from geomx_cli.jobs.store.registry import KnownJob

__all__ = ["FETCH_VERSION", "FOLDER", "PARTIAL", "FetchProgress", "Fetched", "Listed", "fetch", "is_safe"]

FETCH_VERSION = 1
FOLDER, PARTIAL = "outputs", "outputs.part"
_MOST_FILES = 10_000  # per host
_LONGEST = 4096  # bytes of a name
_SHOWN = 500  # characters of a problem
_CHUNK = 1 << 18
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOCAL_HINT = "free disk space or fix permissions here, or choose another folder; fetch again to continue"


class Listed(msgspec.Struct, frozen=True):
    """A file that a host has: its process, name below the process's folder, and size."""

    process: str
    name: str
    size: int

    @property
    def path(self) -> str:
        """Its path below the folder of all outputs. No two processes of a job have the same file name."""
        return f"{file_name(self.process)}/{self.name}"


class _Listing(msgspec.Struct):
    files: list[Listed]
    left_out: list[str] = []


class _Answer(msgspec.Struct):
    size: int = -1
    problem: str = ""


class _Digest(msgspec.Struct):
    sha256: str


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

    def begin(self, files: Collection[Listed]) -> None:
        """A host has these files."""

    def advance(self, file: Listed, done: int) -> None:
        """The first `done` bytes of a file are here."""

    def end(self, file: Fetched) -> None:
        """A file is here and verified."""

    def warn(self, text: str) -> None:
        """A connection broke."""


def fetch(job: KnownJob, base: Path, progress: FetchProgress) -> dict[str, Any]:
    """Fetch all files of a job's outputs to BASE/JOB/outputs; may be repeated, also while the job runs.

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
            if "" not in tried:
                problems.extend({"host": host.name, "problem": what} for what in left_out)
                progress.begin(files)
            tried.add("")
            for listed in sorted(files, key=lambda one: one.size):  # an interrupt costs only the largest
                if listed.path not in tried and not interrupted.is_set():
                    try:
                        got.append(transfer.file(listed))
                        progress.end(got[-1])
                    except _Refused as error:
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


class _Refused(Exception):
    """A file that cannot be fetched, for a reason that concerns no other."""


class _Transfer:
    """The files of one host over one channel; see agent/outputs.py for the protocol."""

    def __init__(
        self, job: KnownJob, host: Connector, folder: Path, progress: FetchProgress, reconnects: Reconnects
    ) -> None:
        self._host = host.name
        self._own = {process.name for process in job.plan.on_host(host.name)}
        self._folder = folder
        self._progress = progress
        command = module_command(host.python, "geomx_cli.agent", "outputs", job.directory_on(host.name))
        self._channel = host.open(command)
        self._input = ChannelInput(self._channel, reconnects.progress)

    def close(self) -> None:
        self._channel.close()

    def listing(self) -> tuple[list[Listed], list[str]]:
        """Return the files that the host has, and problems with others. Raises CheckFailed if it sends no list."""
        try:
            found = decode(self._input.line(objects=True), _Listing)
        except EOFError:
            what = last_line(self._channel.errors(), "it has sent no list of outputs")
            raise CheckFailed(what) from None
        good, bad = [], []
        for listed in found.files[:_MOST_FILES]:
            if listed.process in self._own and is_safe(listed.name) and 0 <= listed.size < MAX_COUNT:
                good.append(listed)
            else:
                bad.append(f"{listed.path!r} cannot be put below the folder of its process: it is left out")
        return good, [what[:_SHOWN] for what in (*bad, *found.left_out[:_MOST_FILES])]

    def file(self, listed: Listed) -> Fetched:
        """Fetch a file. Raises _Refused for it alone, CheckFailed for the rest of this host, OSError for this disk."""
        target, part = self._folder / FOLDER / listed.path, self._folder / PARTIAL / listed.path
        if target.is_file() and target.stat().st_size == listed.size:
            with suppress(_Changed):
                digest = self._receive(listed, target, listed.size, keep=False)
                return self._done(listed, digest, target, "present")
        try:
            for path in (target, part):
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if target.is_dir() or part.is_dir():
                raise IsADirectoryError
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            raise _Refused("a file and a folder have this name") from None
        at = part.stat().st_size if part.exists() else 0
        if problem := _no_room(part, listed.size, at):
            raise _Refused(problem)
        if 0 < at <= listed.size:
            with suppress(_Changed):
                return self._place(listed, part, target, at)
        try:
            return self._place(listed, part, target, 0)
        except _Changed:
            part.unlink()
            raise _Refused("it has changed while it was sent") from None

    def _place(self, listed: Listed, part: Path, target: Path, at: int) -> Fetched:
        digest = self._receive(listed, part, at)
        part.replace(target)
        return self._done(listed, digest, target, "continued" if at else "fetched")

    def _done(
        self, listed: Listed, digest: str, target: Path, how: Literal["continued", "fetched", "present"]
    ) -> Fetched:
        size = target.stat().st_size
        self._progress.advance(listed, size)
        return Fetched(self._host, listed.process, listed.name, size, digest, str(target), how)

    def _receive(self, listed: Listed, path: Path, at: int, *, keep: bool = True) -> str:
        """Receive a file's bytes from `at` on into `path`, which has those before; return the SHA-256 of all.

        Raises _Changed if the host's file is another. Without `keep` the bytes only count for that.
        """
        self._channel.send(encode({"process": listed.process, "name": listed.name, "offset": at}))
        try:
            answer = decode(self._input.line(), _Answer)
            if answer.problem or answer.size < at:
                raise _Refused(answer.problem[:_SHOWN] or "it has become shorter")
            if problem := _no_room(path, answer.size, at):
                raise CheckFailed(f"{listed.path}: {problem}")
            digest, done = hashlib.sha256(), at
            with path.open("r+b" if at else "wb") as file:
                while at > file.tell():
                    digest.update(file.read(min(_CHUNK, at - file.tell())))
                while done < answer.size:
                    data = self._input.some(answer.size - done)
                    digest.update(data)
                    done += len(data)
                    if keep:
                        file.write(data)
                        self._progress.advance(listed, done)
            claimed = decode(self._input.line(), _Digest).sha256
        except EOFError:
            if what := last_line(self._channel.errors(), ""):
                raise CheckFailed(what) from None
            raise HostUnreachable(f"host {self._host}: the connection broke") from None
        if claimed != digest.hexdigest() or (not keep and done > at):  # it may have grown
            raise _Changed
        return claimed


class _Changed(Exception):
    """The bytes that are here are not the beginning of the host's file."""


def _no_room(path: Path, size: int, at: int) -> str:
    """Why a file of `size` bytes, of which `at` are here, cannot be put at `path`, or ""."""
    room = shutil.disk_usage(path.parent).free
    if size - at <= room:
        return ""
    return f"its host says that it has {format_bytes(size)}, and {path.parent} has room for {format_bytes(room)}"


def _remove_empty(folder: Path) -> None:
    """Remove a folder, and those below it, as far as they are empty."""
    for at, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            Path(at).rmdir()
