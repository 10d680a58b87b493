"""Data sets on their way to a host that cannot download them."""

import gzip
import hashlib
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from geomx_cli.core.errors import CheckFailed, InvalidSettings
from geomx_cli.runtime.data import catalog, sources
from geomx_cli.runtime.data.fetch import require_directory
from geomx_cli.runtime.data.sources import SOURCES

__all__ = ["pack", "receive"]

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
        require_directory(name, data_dir)
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
