"""Places for files beyond a host: a folder of a shared file system, or a URL that fsspec knows, as s3://bucket/prefix.

Names of files are relative to the place, with "/" between folders. A URL holds no credentials: fsspec finds those of
the account on each machine, as other programs there do. All errors of fsspec and its clients become GeomxErrors that
name the place.
"""

import importlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from geomx_cli.core.errors import CheckFailed, GeomxError, HostUnreachable, InvalidSettings
from geomx_cli.core.files import make_folders, open_atomic, write_atomic

__all__ = ["EXTRAS", "Store", "is_url", "normal_place", "open_store"]

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""Our extra that installs what a kind of URL needs, beside fsspec itself, which the extra "remote" has."""
_WITHOUT_FOLDERS = {*EXTRAS, "abfs", "abfss", "az", "adl", "oci", "ocilake", "oss", "r2"}
_HERE_ONLY = {"memory", "data", "local", "cached", "filecache", "simplecache", "blockcache", "http", "https"}
_SHOWN = 300  # characters of a client's message


class Store(Protocol):
    """Files at a place. `name` and `folder` are relative, and "" is the place itself. Every method raises CheckFailed
    and HostUnreachable, and InvalidSettings if a package is missing.
    """

    def put(self, source: Path, name: str) -> None:
        """Copy a file of this machine to the store."""

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, of which readers see all or nothing where the store can do that."""

    def read(self, name: str) -> bytes | None:
        """Return a small file; None if there is none."""

    def get(self, name: str, target: Path) -> bool:
        """Copy a file of the store to this machine; return False if there is none."""

    def names(self, folder: str = "") -> list[str]:
        """Return the names of the files and folders directly in a folder, without any if it is not there."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size in bytes of each file below a folder, by its name relative to that."""

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that it holds, if it is there."""


def is_url(place: str) -> bool:
    """Whether `place` is a URL, as opposed to a folder."""
    return "://" in place


def normal_place(place: str) -> str:
    """Return a place as it is kept and shown: a URL, or the absolute path of a folder. Raises InvalidSettings for what
    is none, or contains credentials.
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


def open_store(place: str) -> Store:
    """Return the store at a place of `normal_place`. Raises InvalidSettings if its kind is unknown, or if a package for
    it is not installed here.
    """
    return _UrlStore(place) if is_url(place) else _FolderStore(place)


class _FolderStore:
    """A folder of this machine, or of a file system that it mounts."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._folder = Path(place)

    def put(self, source: Path, name: str) -> None:
        with _explained(self._place):
            target = self._folder / name
            make_folders(target.parent)
            with source.open("rb") as found, open_atomic(target, 0o600) as file:
                shutil.copyfileobj(found, file, 1 << 20)

    def write(self, name: str, content: bytes) -> None:
        with _explained(self._place):
            make_folders((self._folder / name).parent)
            write_atomic(self._folder / name, content, 0o600)

    def read(self, name: str) -> bytes | None:
        with _explained(self._place):
            try:
                return (self._folder / name).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def get(self, name: str, target: Path) -> bool:
        with _explained(self._place):
            try:
                shutil.copyfile(self._folder / name, target)
            except (FileNotFoundError, NotADirectoryError):
                return False
        return True

    def names(self, folder: str = "") -> list[str]:
        with _explained(self._place):
            try:
                return sorted(path.name for path in (self._folder / folder).iterdir())
            except (FileNotFoundError, NotADirectoryError):
                return []

    def sizes(self, folder: str) -> dict[str, int]:
        top = self._folder / folder
        with _explained(self._place):
            files = (path for path in top.rglob("*") if path.is_file())
            return {path.relative_to(top).as_posix(): path.stat().st_size for path in files}

    def remove(self, name: str) -> None:
        path = self._folder / name
        with _explained(self._place):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


class _UrlStore:
    """A URL, through fsspec."""

    def __init__(self, place: str) -> None:
        self._place = place
        scheme = place.partition("://")[0]
        self._has_folders = scheme not in _WITHOUT_FOLDERS
        with _explained(place, EXTRAS.get(scheme, "remote")):
            try:
                found = importlib.import_module("fsspec.core").url_to_fs(place)  # an agent starts without it
            except ValueError as error:
                raise InvalidSettings(f"{place}: fsspec does not know it: {error}", "correct the URL") from None
        self._fs: Any = found[0]
        self._root: str = found[1].rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _make_parent(self, name: str) -> None:
        if self._has_folders:
            self._fs.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    def put(self, source: Path, name: str) -> None:
        with _explained(self._place):
            self._make_parent(name)
            self._fs.put_file(str(source), self._path(name))

    def write(self, name: str, content: bytes) -> None:
        with _explained(self._place):
            self._make_parent(name)
            self._fs.pipe_file(self._path(name), content)

    def read(self, name: str) -> bytes | None:
        with _explained(self._place):
            try:
                return bytes(self._fs.cat_file(self._path(name)))
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return None

    def get(self, name: str, target: Path) -> bool:
        with _explained(self._place):
            try:
                self._fs.get_file(self._path(name), str(target))
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return False
        return True

    def names(self, folder: str = "") -> list[str]:
        with _explained(self._place):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._path(folder), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        base = self._path(folder)
        names = {path.rstrip("/").rpartition("/")[2] for path in found if path.rstrip("/") != base}
        return sorted(names - {""})

    def sizes(self, folder: str) -> dict[str, int]:
        top = f"{self._path(folder)}/"
        with _explained(self._place):
            self._fs.invalidate_cache()
            found = self._fs.find(self._path(folder), detail=True)
        return {path.partition(top)[2]: int(facts["size"] or 0) for path, facts in found.items() if top in path}

    def remove(self, name: str) -> None:
        with _explained(self._place):
            self._fs.invalidate_cache()
            try:
                self._fs.rm(self._path(name), recursive=True)
            except FileNotFoundError:
                pass


@contextmanager
def _explained(place: str, extra: str = "remote") -> Iterator[None]:
    """Turn what the block raises into a GeomxError: clients of clouds have exceptions of their own, of any class."""
    try:
        yield
    except GeomxError:
        raise
    except ImportError as error:
        hint = f"pip install 'geomx-cli[{extra}]' there"
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
