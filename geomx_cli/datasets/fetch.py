"""Data sets on their way into a data directory: by download, or in an archive for a host that cannot download."""

import gzip
import hashlib
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from geomx_cli.core.errors import CheckFailed, HostUnreachable, InvalidSettings
from geomx_cli.core.option import nearest
from geomx_cli.datasets import catalog, sources
from geomx_cli.datasets.sources import SOURCES, Progress, SourceError

__all__ = ["LIMIT", "Progress", "ensure", "fetch", "pack", "receive", "verified"]

LIMIT = 900.0
"""Seconds for a download, by default."""


def ensure(name: str, data_dir: str | Path = "", progress: Progress | None = None, limit: float = LIMIT) -> Path:
    """Return the directory with the data set, downloading it if not found; see `fetch` for the errors.

    A `data_dir` that does not exist raises InvalidSettings, as it is probably mistyped.
    """
    _require_directory(name, data_dir)
    found = catalog.find(name, data_dir)
    return found if found is not None else fetch(name, data_dir, progress, limit)


def fetch(name: str, data_dir: str | Path = "", progress: Progress | None = None, limit: float = LIMIT) -> Path:
    """Download the data set into `data_dir` or the user's own data directory within `limit` seconds, and return that
    directory.

    Does nothing if it is complete. Files are verified before they appear, even if this is interrupted or runs
    concurrently. Raises HostUnreachable with the cause for each source if all fail, and InvalidSettings for an unknown
    data set or an unwritable directory.
    """
    if name not in SOURCES:
        raise InvalidSettings(f"there is no data set {name!r}", nearest(name, SOURCES))
    target = Path(data_dir).expanduser() if data_dir else catalog.own_directory(name)
    digests = SOURCES[name].digests
    if all(_intact(target / file, digest) for file, digest in digests.items()):
        return target
    other = sources.other_than(name, target)
    if other:
        hint = "name another directory with --data-dir"
        raise InvalidSettings(f"{target} has {other}, whose files have the same names", hint)
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target) as scratch:
            _from_any_source(name, Path(scratch), progress or (lambda what, done, total: None), limit)
            for file in digests:
                (Path(scratch) / file).replace(target / file)
    except OSError as error:
        raise InvalidSettings(
            f"{target} cannot take the data set: {error}", "name another directory with --data-dir"
        ) from None
    return target


def verified(name: str, data_dir: str | Path = "") -> Path | None:
    """Return the directory in which all files of the data set are found and have the known SHA-256, else None."""
    found = catalog.find(name, data_dir)
    intact = found and all(_intact(found / file, digest) for file, digest in SOURCES[name].digests.items())
    return found if intact else None


def _require_directory(name: str, data_dir: str | Path) -> None:
    """Raise InvalidSettings if a `data_dir` is named that does not exist: it is mistyped, or not mounted."""
    if data_dir and not Path(data_dir).expanduser().is_dir():
        hint = f"correct it, or put the data there: geomx data fetch {name} --data-dir {data_dir}"
        raise InvalidSettings(f"--data-dir {data_dir}: there is no such directory", hint)


def _from_any_source(name: str, scratch: Path, progress: Progress, limit: float) -> None:
    source, causes, deadline = SOURCES[name], [], time.monotonic() + limit
    for url, files in source.places:
        try:
            sources.download(source, url, files, scratch, progress, deadline)
        except SourceError as cause:
            causes.append(f"{url}: {cause}")
            progress(f"cannot download from {causes[-1]}", 0, 0)
        else:
            return
    name_of_package = source.package.rpartition("/")[2].partition("_")[0]
    package = f" or install Debian's {name_of_package}," if name_of_package else ""
    raise HostUnreachable(
        f"{name} cannot be fetched. " + ". ".join(causes),
        f"on a machine with Internet access download {', '.join(source.packed)} from {source.url},{package} and pass"
        " the directory of the unpacked files with --data-dir",
    )


def _intact(path: Path, digest: str) -> bool:
    packed = path.with_name(f"{path.name}.gz")
    try:
        with path.open("rb") if path.exists() else gzip.open(packed) as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == digest
    except (OSError, EOFError, zlib.error):
        return False


# Archives.

_PIECE = 1 << 20
_MOST_BYTES = 1 << 30  # of a file


@contextmanager
def pack(name: str, directory: Path) -> Iterator[IO[bytes]]:
    """Yield a compressed archive of the data set in `directory`, at its start. Raises CheckFailed for a file whose
    SHA-256 is not the known one, or if the archive cannot be written: a copy of the data set, in the folder for
    temporary files.
    """
    with ExitStack() as stack:
        try:
            made = stack.enter_context(tempfile.TemporaryFile())
            with tarfile.open(fileobj=made, mode="w:gz", compresslevel=1) as archive:
                for file, digest in SOURCES[name].digests.items():
                    _add(archive, directory / file, digest)
            made.seek(0)
        except OSError as error:
            what = f"{directory} cannot be packed in {tempfile.gettempdir()}: {error}"
            raise CheckFailed(what, "make room there, or name another folder in the variable TMPDIR") from None
        yield made


def _add(archive: tarfile.TarFile, path: Path, digest: str) -> None:
    with (
        tempfile.TemporaryFile() as plain,
        gzip.open(f"{path}.gz") if not path.exists() else path.open("rb") as source,
    ):
        if _copy(source, plain) != digest:
            raise CheckFailed(f"{path} is not as published: its SHA-256 differs", "remove it, and run geomx data fetch")
        entry = tarfile.TarInfo(path.name)
        entry.size = plain.tell()
        plain.seek(0)
        archive.addfile(entry, plain)


def receive(name: str, data_dir: str, stream: BinaryIO, *, existing: bool = False) -> Path:
    """Unpack an archive of `pack` into `data_dir`, by default the user's own data directory, and return the directory.

    Files appear once all have been verified; a broken stream leaves nothing. Raises CheckFailed for a damaged archive,
    InvalidSettings for a directory that cannot be written, has another data set with the same file names, or, with
    `existing`, does not exist.
    """
    if existing:
        _require_directory(name, data_dir)
    target = Path(data_dir).expanduser() if data_dir else catalog.own_directory(name)
    if other := sources.other_than(name, target):
        raise InvalidSettings(f"{target} has {other}, whose files have the same names", "name another --data-dir")
    digests = dict(SOURCES[name].digests)
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".push-", dir=target) as scratch:
            with tarfile.open(fileobj=stream, mode="r|gz") as archive:
                for entry in archive:
                    content = archive.extractfile(entry) if entry.name in digests and entry.isfile() else None
                    if content is None or entry.size > _MOST_BYTES:
                        raise CheckFailed(f"{entry.name[:100]!r} is no file of {name}", "send it again")
                    with Path(scratch, entry.name).open("xb") as file:
                        if _copy(content, file) != digests.pop(entry.name):
                            raise CheckFailed(f"{entry.name} arrived damaged", "send it again")
            if digests:
                raise CheckFailed(f"{', '.join(digests)} did not arrive", "send it again")
            for name_ in SOURCES[name].digests:
                Path(scratch, name_).replace(target / name_)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile) as error:
        raise CheckFailed(f"the data set arrived damaged: {error}", "send it again") from None
    except OSError as error:
        raise InvalidSettings(f"{target} cannot take the data set: {error}", "make room, or name another") from None
    return target


def _copy(source: IO[bytes] | gzip.GzipFile, target: IO[bytes]) -> str:
    """Copy to the end and return the SHA-256 of the content."""
    digest = hashlib.sha256()
    while data := source.read(_PIECE):
        digest.update(data)
        target.write(data)
    return digest.hexdigest()
