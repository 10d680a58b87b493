"""Downloads a data set into the user's data directory: from its authors, else from Debian's package."""

import gzip
import hashlib
import tempfile
import time
import zlib
from pathlib import Path

from geomx_cli.core.errors import HostUnreachable, InvalidSettings
from geomx_cli.core.nearest import nearest
from geomx_cli.runtime.data import catalog, sources
from geomx_cli.runtime.data.sources import SOURCES, Progress, SourceError

__all__ = ["LIMIT", "Progress", "ensure", "fetch", "require_directory", "verified"]

LIMIT = 900.0
"""Seconds for a download, by default."""


def ensure(name: str, data_dir: str | Path = "", progress: Progress | None = None, limit: float = LIMIT) -> Path:
    """Return the directory with the data set, downloading it if not found; see `fetch` for the errors.

    A `data_dir` that does not exist raises InvalidSettings, as it is probably mistyped.
    """
    require_directory(name, data_dir)
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


def require_directory(name: str, data_dir: str | Path) -> None:
    """Raise InvalidSettings if a `data_dir` is named that does not exist: it is mistyped, or not mounted."""
    if data_dir and not Path(data_dir).expanduser().is_dir():
        hint = f"correct it, or put the data there: geomx data fetch {name} --data-dir {data_dir}"
        raise InvalidSettings(f"--data-dir {data_dir}: there is no such directory", hint)


def _from_any_source(name: str, scratch: Path, progress: Progress, limit: float) -> None:
    source, causes, deadline = SOURCES[name], [], time.monotonic() + limit
    for where, way in sources.ways(source):
        try:
            way(source, scratch, progress, deadline)
        except SourceError as cause:
            causes.append(f"{where}: {cause}")
            progress(f"cannot download from {causes[-1]}", 0, 0)
        else:
            return
    package = f" or install Debian's {source.package}," if source.package else ""
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
