"""Fetch a data set into the user's own data directory: from its authors, or else out of Debian's package.

Every source is limited in time, what comes is checked against known digests, and nothing is ever installed.
"""

import gzip
import hashlib
import queue
import subprocess
import tempfile
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from geomx_cli.errors import HostUnreachable, InvalidSettings
from geomx_cli.runtime.training import data

__all__ = ["DATA_SETS", "Progress", "ensure", "fetch"]

Progress = Callable[[str, int, int], None]
"""Told (what is being done, bytes done, bytes in all); the last is 0 where only the message matters."""

DATA_SETS = ("fashion-mnist",)
_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_PACKAGE = "dataset-fashion-mnist"
_CONNECT_LIMIT = 5.0
_DOWNLOAD_LIMIT = 900.0
_APT_LIMIT = 300.0
_PIECE = 1 << 18
# SHA-256 of the unpacked files: the two sources pack the same bytes differently.
_DIGESTS: Mapping[str, str] = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


class _SourceError(Exception):
    """One source cannot give the data; the text says why."""


def ensure(name: str, data_dir: str | Path = "", progress: Progress | None = None) -> Path:
    """The directory that holds the data set, fetched if no place has it; see `fetch` for the errors.

    A `data_dir` that does not exist is refused (InvalidSettings), for it is likely mistyped.
    """
    if data_dir and not Path(data_dir).expanduser().is_dir():
        hint = f"correct it, or put the data there: geomx data fetch {name} --data-dir {data_dir}"
        raise InvalidSettings(f"--data-dir {data_dir}: there is no such directory", hint)
    found = data.find(name, data_dir)
    return found if found is not None else fetch(name, data_dir, progress)


def fetch(name: str, data_dir: str | Path = "", progress: Progress | None = None) -> Path:
    """Put the data set into `data_dir` or the user's own data directory, and return that directory.

    Does nothing if it is there whole. A file appears only when it is complete and checked, also if this is
    interrupted or runs twice at once. Raises HostUnreachable with the cause at each source when none can give
    it, and InvalidSettings for an unknown data set or a directory that cannot be written.
    """
    if name not in DATA_SETS:
        raise InvalidSettings(f"there is no data set {name!r}", f"choose one of {', '.join(DATA_SETS)}")
    target = Path(data_dir).expanduser() if data_dir else data.own_directory(name)
    tell = progress or (lambda what, done, total: None)
    if all(_intact(target / file) for file in _DIGESTS):
        return target
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target) as scratch:
            _from_any_source(name, Path(scratch), tell)
            for file in _DIGESTS:
                (Path(scratch) / file).replace(target / file)
    except OSError as error:
        raise InvalidSettings(
            f"{target} cannot take the data set: {error}", "name another directory with --data-dir"
        ) from None
    return target


def _from_any_source(name: str, scratch: Path, tell: Progress) -> None:
    causes = []
    for where, source in ((_URL, _from_authors), (f"Debian's package {_PACKAGE}", _from_debian)):
        try:
            source(scratch, tell)
        except _SourceError as cause:
            causes.append(f"{where}: {cause}")
            tell(causes[-1], 0, 0)
        else:
            return
    raise HostUnreachable(
        f"{name} cannot be fetched. " + ". ".join(causes),
        f"on a machine with a way out download {', '.join(f'{file}.gz' for file in _DIGESTS)} from {_URL},"
        " or install the package, and name their directory with --data-dir",
    )


def _from_authors(scratch: Path, tell: Progress) -> None:
    deadline = time.monotonic() + _DOWNLOAD_LIMIT
    for file in _DIGESTS:
        try:
            packed = _download(f"{_URL}{file}.gz", f"{file}.gz", deadline, tell)
        except HTTPError as error:
            error.close()
            raise _SourceError(f"{file}.gz: HTTP status {error.code}") from None
        except (OSError, HTTPException) as error:
            raise _SourceError(str(getattr(error, "reason", error)) or type(error).__name__) from None
        _unpack(packed, scratch / file)


def _download(url: str, what: str, deadline: float, tell: Progress) -> bytes:
    with _open(url) as answer:
        total = int(answer.headers.get("Content-Length") or 0)
        content = bytearray()
        while piece := answer.read(_PIECE):
            content += piece
            tell(what, len(content), total)
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done within {_DOWNLOAD_LIMIT:.0f} s")
    return bytes(content)


def _open(url: str) -> Any:
    # Looking up a name takes no time limit, and without a network it may wait for half a minute: a thread of
    # its own can be left behind.
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(urllib.request.urlopen(url, timeout=_CONNECT_LIMIT))
        except (OSError, HTTPException) as error:
            answers.put(error)

    threading.Thread(target=ask, name="fetch", daemon=True).start()
    try:
        answer = answers.get(timeout=_CONNECT_LIMIT)
    except queue.Empty:
        raise TimeoutError(f"no answer within {_CONNECT_LIMIT:.0f} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _from_debian(scratch: Path, tell: Progress) -> None:
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        work = Path(name)
        tell(f"apt-get download {_PACKAGE} (31 MB)", 0, 0)
        try:
            _run(work, "apt-get", "download", _PACKAGE)
        except _SourceError:
            # Without package lists, as in many containers, apt knows no package: let it fetch them for us
            # alone.
            tell("apt-get update, into a directory of our own", 0, 0)
            private = _private_apt(work)
            _run(work, "apt-get", *private, "update")
            _run(work, "apt-get", *private, "download", _PACKAGE)
        package = next(work.glob(f"{_PACKAGE}_*.deb"), None)
        if package is None:
            raise _SourceError("apt-get download left no file")
        _run(work, "dpkg-deb", "-x", str(package), "content")
        for file in _DIGESTS:
            packed = work / "content/usr/share/datasets/fashion-mnist" / f"{file}.gz"
            if not packed.is_file():
                raise _SourceError(f"{package.name} has no {file}.gz")
            _unpack(packed.read_bytes(), scratch / file)


def _private_apt(work: Path) -> list[str]:
    options = ["-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User="]
    for directory, path in (
        ("State::lists", "lists"),
        ("Cache", "cache"),
        ("Cache::archives", "cache/archives"),
    ):
        (work / path / "partial").mkdir(parents=True, exist_ok=True)
        options += ["-o", f"Dir::{directory}={work / path}"]
    return options


def _run(work: Path, *command: str) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=work,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_APT_LIMIT,
            check=False,
        )
    except FileNotFoundError:
        raise _SourceError(f"this machine has no {command[0]}") from None
    except subprocess.TimeoutExpired:
        raise _SourceError(f"{command[0]} was not done within {_APT_LIMIT:.0f} s") from None
    if done.returncode != 0:
        lines = done.stdout.decode(errors="replace").strip().splitlines()
        problems = [line for line in lines if line.startswith("E:")] or lines[-1:]
        raise _SourceError(f"{command[0]} failed: {' '.join(problems) or f'status {done.returncode}'}")


def _unpack(packed: bytes, target: Path) -> None:
    try:
        content = gzip.decompress(packed)
    except (OSError, EOFError, zlib.error) as error:
        raise _SourceError(f"{target.name}.gz is damaged: {error}") from None
    if hashlib.sha256(content).hexdigest() != _DIGESTS[target.name]:
        raise _SourceError(f"{target.name}.gz is not the file that it should be (SHA-256 differs)")
    target.write_bytes(content)


def _intact(path: Path) -> bool:
    packed = path.with_name(f"{path.name}.gz")
    try:
        with path.open("rb") if path.exists() else gzip.open(packed) as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == _DIGESTS[path.name]
    except (OSError, EOFError, zlib.error):
        return False
