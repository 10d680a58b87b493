"""Writes this host's logs and event logs to stdout as a gzip-compressed tar with the manifest as its last entry."""

import gzip
import hashlib
import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from geomx_cli.agent.host_spec import HostSpec
from geomx_cli.agent.outputs import outputs
from geomx_cli.agent.safe_open import open_record
from geomx_cli.agent.status import FILE_NAME
from geomx_cli.core.errors import CheckFailed

__all__ = ["HELD", "MANIFEST", "main"]

MANIFEST = "manifest.json"
HELD = "GEOMX.held"
"""PAX header of a file of which the reader has so many bytes already: only the rest follows."""
_LEVEL = 6
_CHUNK = 1 << 16


def main(directory: Path, arguments: Sequence[str]) -> int:
    """Write the tar. Growing files are cut at their current size, event logs after their last complete line. Files
    that are not regular are skipped and listed in the manifest. A line on stdin, a JSON object, has the size and
    SHA-256 that the reader holds of each file: of one that still begins so only the rest is written, see HELD.
    """
    held = json.loads(sys.stdin.buffer.readline() or b"{}")
    try:
        host_spec = HostSpec.read(directory)
    except FileNotFoundError:
        raise CheckFailed("the job was never started there: nothing to collect") from None
    files, left_out = [], []
    stream = gzip.GzipFile(fileobj=sys.stdout.buffer, mode="wb", compresslevel=_LEVEL)
    with stream, tarfile.open(fileobj=stream, mode="w|") as tar:
        for name, process, path in _sources(directory, host_spec):
            try:
                with open_record(path) as file:
                    files.append({"file": name, "process": process, **_add(tar, name, file, held.get(name))})
            except FileNotFoundError:  # not created yet
                continue
            except CheckFailed as error:
                left_out.append(error.message)
        manifest = {"host": host_spec.host, "files": files, "left_out": left_out, "outputs": outputs(host_spec)[0]}
        content = json.dumps(manifest).encode()
        tar.addfile(_entry(MANIFEST, len(content)), io.BytesIO(content))
    return 0


def _sources(directory: Path, host_spec: HostSpec) -> Iterator[tuple[str, str, Path]]:
    """Yield (name in the tar, process, path)."""
    job_dir = Path(host_spec.job_dir)
    for task in host_spec.tasks:
        log = f"logs/{task.file_name}.log"
        for name in (f"events/{task.file_name}.jsonl", f"{log}.1", log):
            yield name, task.name, job_dir / name
    for file in ("agent.log", FILE_NAME):
        yield f"hosts/{host_spec.host}/{file}", "", directory / file


def _add(tar: tarfile.TarFile, name: str, file: IO[bytes], held: tuple[int, str] | None) -> dict[str, Any]:
    size = _whole_lines(file) if name.endswith(".jsonl") else os.fstat(file.fileno()).st_size
    prefix = _Prefix(file)
    skipped = held[0] if held is not None and held[0] <= size and prefix.begins_with(*held) else 0
    entry = _entry(name, size - skipped)
    entry.pax_headers = {HELD: str(skipped)} if skipped else {}
    tar.addfile(entry, prefix)  # type: ignore[arg-type]  # tarfile only calls read()
    return {"size": size, "sha256": prefix.hash.hexdigest()}


def _entry(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = size, 0o600, int(time.time())
    return entry


def _whole_lines(file: IO[bytes]) -> int:
    """Return the size up to the end of the last complete line; rewinds the file."""
    offset = file.seek(0, os.SEEK_END)
    found = 0
    while offset > 0 and not found:
        size = min(_CHUNK, offset)
        offset -= size
        file.seek(offset)
        newline = file.read(size).rfind(b"\n")
        found = offset + newline + 1 if newline >= 0 else 0
    file.seek(0)
    return found


class _Prefix:
    """File wrapper that hashes what is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.hash = hashlib.sha256()

    def begins_with(self, size: int, sha256: str) -> bool:
        """Read `size` bytes of this hash; rewind if they have another."""
        while size > 0 and (data := self.read(min(_CHUNK, size))):
            size -= len(data)
        if size == 0 and self.hash.hexdigest() == sha256:
            return True
        self._file.seek(0)
        self.hash = hashlib.sha256()
        return False

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        data = self._file.read(size)
        self.hash.update(data)
        return data
