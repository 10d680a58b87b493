"""Places for files beyond a host: a folder of a shared file system, or a URL that fsspec knows, as s3://bucket/prefix.

Names of files are relative to the place, with "/" between folders. A URL holds no credentials: on each machine fsspec
finds the account's credentials, as other programs there do. All errors of fsspec and its clients become GeomxErrors
that name the place. So does the hang of a client, or of a mounted file system.
"""

import hashlib
import importlib
import io
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

from geomx_cli.core.errors import CheckFailed, GeomxError, HostUnreachable, InvalidSettings
from geomx_cli.core.files import make_folders, open_atomic, write_atomic
from geomx_cli.core.units import format_bytes, format_duration

__all__ = ["EXTRAS", "Copied", "Store", "TooLarge", "is_url", "normal_place"]

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""geomx's extra that installs the packages for each kind of URL. The extra "remote" has fsspec itself."""
_WITHOUT_FOLDERS = {*EXTRAS, "abfs", "abfss", "az", "adl", "oci", "ocilake", "oss", "r2"}
_HERE_ONLY = {"memory", "data", "local", "cached", "filecache", "simplecache", "blockcache", "http", "https"}
_SHOWN = 300  # characters of a client's message
_PATIENCE = 60.0  # seconds
_BLOCK = 8 << 20  # bytes; a slow link sends them within the patience
_BLOCKS = 5000  # the most of a file; S3 allows 10000
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

_Result = TypeVar("_Result")


class Copied(NamedTuple):
    """What was copied: bytes, and their SHA-256."""

    size: int
    digest: str


class TooLarge(Exception):
    """A file of a store is larger than it may be."""


class Store:
    """Files at a place of `normal_place`. `name` and `folder` are relative, and "" is the place itself.

    Every method, and the constructor, raises CheckFailed. Raises HostUnreachable if the store is silent for `patience`
    seconds, however large a file is. Raises InvalidSettings if the kind of place is unknown, or a package for it is not
    installed.
    """

    def __init__(self, place: str, patience: float = _PATIENCE) -> None:
        self._place = place
        self._patience = patience
        self._heard = 0.0
        kind = _UrlFiles if is_url(place) else _FolderFiles
        self._files: _Files = self._call(lambda: kind(place, self._hear))

    def put(self, source: Path, name: str) -> Copied:
        """Copy a file of this machine to the store."""
        return self._call(lambda: self._files.put(source, name))

    def write(self, name: str, content: bytes) -> None:
        """Write a small file. Readers see all of it or nothing, if the store can do that."""
        self._call(lambda: self._files.write(name, content))

    def read(self, name: str, limit: int) -> bytes | None:
        """Return a small file; None if there is none. Raises TooLarge for more than `limit` bytes."""
        content = io.BytesIO()
        found = self._call(lambda: self._files.get(name, content, limit), None)
        return None if found is None else content.getvalue()

    def get(self, name: str, target: Path, limit: int) -> Copied | None:
        """Copy a file of the store to this machine; return None if there is none. Raises TooLarge for more than `limit`
        bytes, of which the target has the first then.
        """

        def do() -> Copied:
            with target.open("wb") as file:
                return self._files.get(name, file, limit)

        return self._call(do, None)

    def names(self, folder: str = "") -> list[str]:
        """Return the names of the files and folders directly in a folder; none if the folder does not exist."""
        none: list[str] = []
        return sorted(self._call(lambda: self._files.names(folder), none))

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size in bytes of each file below a folder, by its name relative to the folder."""
        return self._call(lambda: self._files.sizes(folder), {})

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its contents, if it exists."""
        self._call(lambda: self._files.remove(name), None)

    def _hear(self) -> None:
        self._heard = time.monotonic()

    def _call(self, do: Callable[[], _Result], *absent: _Result) -> _Result:
        """Return what `do` returns. If it finds no file and `absent` is given, return `absent`. `do` runs in a thread,
        which is left behind if it hangs.
        """
        ended: SimpleQueue[Callable[[], _Result]] = SimpleQueue()

        def run() -> None:
            try:
                result = do()
            except BaseException as error:
                ended.put(_raising(error))
            else:
                ended.put(lambda: result)

        self._hear()
        threading.Thread(target=run, name="store", daemon=True).start()
        with _explained(self._place):
            try:
                return self._result(ended)()
            except _ABSENT:
                if not absent:
                    raise
                return absent[0]

    def _result(self, ended: "SimpleQueue[Callable[[], _Result]]") -> Callable[[], _Result]:
        while (left := self._heard + self._patience - time.monotonic()) > 0:
            try:
                return ended.get(timeout=left)
            except Empty:  # there may have been progress meanwhile
                continue
        what = f"{self._place} has not answered for {format_duration(self._patience)}"
        raise HostUnreachable(what, "check the network and the address")


def _raising(error: BaseException) -> Callable[[], Any]:
    def do() -> Any:
        raise error

    return do


def is_url(place: str) -> bool:
    """Whether `place` is a URL, as opposed to a folder."""
    return "://" in place


def normal_place(place: str) -> str:
    """Return a place in the form in which it is kept and shown: a URL, or the absolute path of a folder. Raises
    InvalidSettings for a text that is no place, or contains credentials.
    """
    if not is_url(place):
        return str(Path(place).expanduser().absolute())
    scheme, _, rest = place.partition("://")
    if scheme == "file":
        return str(Path(f"/{rest.lstrip('/')}"))
    hint = "give a folder that all hosts share, or a URL such as s3://bucket/prefix"
    if scheme in _HERE_ONLY or "::" in place:
        raise InvalidSettings(f"{place}: nothing can be kept there for other machines", hint)
    try:
        parts = urlsplit(place)
        has_secret = parts.password is not None or (parts.username is not None and scheme in EXTRAS)
    except ValueError:
        parts, has_secret = None, False
    if has_secret:
        shown = f"{scheme}://...@{rest.rpartition('@')[2]}"
        hint = "leave them out: fsspec finds them on each host, as in ~/.aws"
        raise InvalidSettings(f"{shown} has credentials, which others could read", hint)
    if parts is None or not scheme or not rest.strip("/") or parts.query or parts.fragment:
        raise InvalidSettings(f"{place} is no URL of a folder", hint)
    return place.rstrip("/")


class _Files(Protocol):
    """The operations that a Store needs on files at a place. Methods raise the errors of their clients."""

    def put(self, source: Path, name: str) -> Copied: ...

    def write(self, name: str, content: bytes) -> None: ...

    def get(self, name: str, file: IO[bytes], limit: int) -> Copied: ...

    def names(self, folder: str) -> list[str]: ...

    def sizes(self, folder: str) -> dict[str, int]: ...

    def remove(self, name: str) -> None: ...


class _FolderFiles:
    """A folder of this machine, or of a file system that it mounts. on_progress: called while a file is copied."""

    def __init__(self, place: str, on_progress: Callable[[], None]) -> None:
        self._folder = Path(place)
        self._on_progress = on_progress

    def put(self, source: Path, name: str) -> Copied:
        target = self._folder / name
        make_folders(target.parent)
        with source.open("rb") as found, open_atomic(target, 0o600) as file:
            return _copy(found, file, _BLOCK, self._on_progress)

    def write(self, name: str, content: bytes) -> None:
        make_folders((self._folder / name).parent)
        write_atomic(self._folder / name, content, 0o600)

    def get(self, name: str, file: IO[bytes], limit: int) -> Copied:
        with (self._folder / name).open("rb") as found:
            return _copy(found, file, _BLOCK, self._on_progress, limit)

    def names(self, folder: str) -> list[str]:
        return [path.name for path in (self._folder / folder).iterdir()]

    def sizes(self, folder: str) -> dict[str, int]:
        top = self._folder / folder
        files = (path for path in top.rglob("*") if path.is_file())
        return {path.relative_to(top).as_posix(): path.stat().st_size for path in files}

    def remove(self, name: str) -> None:
        path = self._folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


class _UrlFiles:
    """A URL, through fsspec. on_progress: called while a file is copied."""

    def __init__(self, place: str, on_progress: Callable[[], None]) -> None:
        self._on_progress = on_progress
        self._has_folders = place.partition("://")[0] not in _WITHOUT_FOLDERS
        try:
            # Imported here, because an agent starts without it. A client is closed with its store.
            self._fs, root = importlib.import_module("fsspec.core").url_to_fs(place, skip_instance_cache=True)
        except ValueError as error:
            raise InvalidSettings(f"{place}: fsspec does not know it: {error}", "correct the URL") from None
        self._root: str = root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _make_parent(self, name: str) -> None:
        if self._has_folders:
            self._fs.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    def put(self, source: Path, name: str) -> Copied:
        self._make_parent(name)
        # Not put_file, which reports no progress until it has sent up to 500 MB at once.
        block = max(1, -(-source.stat().st_size // (_BLOCK * _BLOCKS))) * _BLOCK
        with source.open("rb") as found, self._fs.open(self._path(name), "wb", block_size=block) as file:
            return _copy(found, file, block, self._on_progress)

    def write(self, name: str, content: bytes) -> None:
        self._make_parent(name)
        self._fs.pipe_file(self._path(name), content)

    def get(self, name: str, file: IO[bytes], limit: int) -> Copied:
        self._fs.invalidate_cache()
        with self._fs.open(self._path(name), "rb", block_size=_BLOCK) as found:
            return _copy(found, file, _BLOCK, self._on_progress, limit)

    def names(self, folder: str) -> list[str]:
        self._fs.invalidate_cache()
        base = self._path(folder)
        found = {path.rstrip("/") for path in self._fs.ls(base, detail=False)} - {base}
        return list({path.rpartition("/")[2] for path in found} - {""})

    def sizes(self, folder: str) -> dict[str, int]:
        top = f"{self._path(folder)}/"
        self._fs.invalidate_cache()
        found = self._fs.find(self._path(folder), detail=True)
        return {path.partition(top)[2]: int(facts["size"] or 0) for path, facts in found.items() if top in path}

    def remove(self, name: str) -> None:
        self._fs.invalidate_cache()
        self._fs.rm(self._path(name), recursive=True)


def _copy(
    found: IO[bytes], file: IO[bytes], block: int, on_progress: Callable[[], None], limit: int | None = None
) -> Copied:
    """Copy block by block. Raises TooLarge after `limit` bytes."""
    size, digest = 0, hashlib.sha256()
    while data := found.read(block):
        on_progress()
        if limit is not None and size + len(data) > limit:
            raise TooLarge(f"it has more than {format_bytes(limit)}")
        file.write(data)
        digest.update(data)
        size += len(data)
        on_progress()
    return Copied(size, digest.hexdigest())


@contextmanager
def _explained(place: str) -> Iterator[None]:
    """Convert exceptions of the block to a GeomxError. Clients of clouds have exceptions of their own, of any class."""
    try:
        yield
    except (GeomxError, TooLarge):
        raise
    except ImportError as error:
        hint = f"pip install 'geomx-cli[{EXTRAS.get(place.partition('://')[0], 'remote')}]' there"
        raise InvalidSettings(f"{place} needs a package: {error}", hint) from None
    except Exception as error:
        text = f"{getattr(error, 'strerror', None) or error}"[:_SHOWN] or type(error).__name__
        names = {kind.__name__ for kind in type(error).__mro__}
        words = f"{' '.join(names)} {text}".lower()
        if isinstance(error, PermissionError) or any(word in words for word in ("credential", "forbidden", "denied")):
            hint = "check the credentials of this account, and its rights to list, read, write and remove there"
            raise CheckFailed(f"{place}: no permission: {text}", hint) from None
        if isinstance(error, FileNotFoundError):
            raise CheckFailed(f"{place} is not there: {text}", "create the bucket or folder, or correct it") from None
        if isinstance(error, ConnectionError | TimeoutError) or any(word in words for word in ("connect", "timeout")):
            raise HostUnreachable(f"{place} cannot be reached: {text}", "check the network and the address") from None
        raise CheckFailed(f"{place}: {text}", "see what is wrong there, or choose another place") from None
