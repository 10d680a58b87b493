"""This host's end of resumable streams: the files of the job that the control machine reads.

A reader says what it has, an offset and a hash of what lies before it, and gets the rest; if the file here does not
begin so, it gets all of it. The verb "files" sends whole files, and "tail" (tail.py) lines as they are written.

`python -m geomx_cli.agent files DIRECTORY records` is for logs and event logs, `... outputs` for what processes saved.
It prints {"files": [{"process", "name", "size"}], "left_out": [...]}, for records also {"outputs"} as the files, and
then answers each line {"process", "name", "offset", "sha256"} on its stdin with {"size", "offset"}, the bytes from that
offset on, and {"sha256"} of the whole file; or with {"problem"} alone. It ends with its stdin. What follows the list of
records is compressed, as logs shrink to a tenth.
"""

import hashlib
import os
import sys
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol

from geomx_cli.agent.host_spec import HostSpec
from geomx_cli.agent.outputs import folders_of, outputs
from geomx_cli.agent.status import FILE_NAME
from geomx_cli.core.errors import CheckFailed
from geomx_cli.core.files import open_below, open_record
from geomx_cli.core.jsonlines import decode, encode

__all__ = ["Outputs", "Records", "answer", "hash_of_start", "fingerprint", "main"]

_CHUNK = 1 << 18
_LEVEL = 6
_MARK = 1 << 10  # bytes before an offset that tell one log from another


def fingerprint(file: IO[bytes], offset: int) -> str:
    """Return a hash of the bytes before `offset`, by which a reader of a growing log recognises it after a rotation."""
    file.seek(max(0, offset - _MARK))
    data = file.read(min(offset, _MARK))
    return hashlib.sha256(data).hexdigest()[:16] if len(data) == min(offset, _MARK) else ""


def hash_of_start(file: IO[bytes], size: int) -> Any:
    """Read the first `size` bytes, as far as they are there, and return their SHA-256 object."""
    file.seek(0)
    digest = hashlib.sha256()
    while size > 0 and (data := file.read(min(_CHUNK, size))):
        size -= len(data)
        digest.update(data)
    return digest


class _Source(Protocol):
    """One kind of files that are sent."""

    def listing(self) -> dict[str, Any]:
        """The first message."""

    def open(self, process: str, name: str) -> tuple[BinaryIO, int]:
        """Open a file; return it and how much of it is sent. Raises CheckFailed and OSError."""


class Outputs:
    """What this host's processes have saved."""

    def __init__(self, host_spec: HostSpec) -> None:
        self._tasks = host_spec.tasks
        self._host_spec = host_spec

    def listing(self) -> dict[str, Any]:
        """See _Source.listing."""
        files, left_out = outputs(self._host_spec)
        return {"files": files, "left_out": left_out}

    def open(self, process: str, name: str) -> tuple[BinaryIO, int]:
        """See _Source.open: below the first of the process's folders that has it."""
        folders = [folder for task in self._tasks if task.name == process for folder in folders_of(task)]
        if not folders:
            raise CheckFailed("it belongs to no process of this host")
        for folder in folders[:-1]:
            with suppress(FileNotFoundError):
                return _sized(open_below(folder, name))
        return _sized(open_below(folders[-1], name))


class Records:
    """This host's logs and event logs, and the agent's own."""

    def __init__(self, directory: Path, host_spec: HostSpec) -> None:
        job_dir = Path(host_spec.job_dir)
        self._host_spec = host_spec
        self._paths: dict[tuple[str, str], Path] = {}
        for task in host_spec.tasks:
            log = f"logs/{task.file_name}.log"
            for name in (f"events/{task.file_name}.jsonl", f"{log}.1", log):
                self._paths[task.name, name] = job_dir / name
        for file in ("agent.log", FILE_NAME):
            self._paths["", f"hosts/{host_spec.host}/{file}"] = directory / file

    def listing(self) -> dict[str, Any]:
        """See _Source.listing. Files that do not exist yet are not listed."""
        files, left_out = [], []
        for (process, name), path in self._paths.items():
            try:
                with open_record(path) as file:
                    files.append({"process": process, "name": name, "size": os.fstat(file.fileno()).st_size})
            except FileNotFoundError:
                continue
            except CheckFailed as error:
                left_out.append(error.message)
        return {"files": files, "left_out": left_out, "outputs": outputs(self._host_spec)[0]}

    def open(self, process: str, name: str) -> tuple[BinaryIO, int]:
        """See _Source.open. Event logs are sent to the end of their last complete line."""
        if (path := self._paths.get((process, name))) is None:
            raise CheckFailed("it belongs to no process of this host")
        file = open_record(path)
        return (file, _whole_lines(file)) if name.endswith(".jsonl") else _sized(file)


def main(directory: Path, arguments: Sequence[str]) -> int:
    """List the files of the kind that is named, and send those that are asked for."""
    try:
        host_spec = HostSpec.read(directory)
    except FileNotFoundError:
        raise CheckFailed("the job was never started there: nothing to collect") from None
    records = list(arguments) == ["records"]
    source: _Source = Records(directory, host_spec) if records else Outputs(host_spec)
    out: BinaryIO | _Deflated = sys.stdout.buffer
    out.write(encode(source.listing()))
    out.flush()
    if records:
        out = _Deflated(sys.stdout.buffer)
    for line in sys.stdin.buffer:
        answer(source, line, out)
        out.flush()
    return 0


class _Deflated:
    """A stream that is compressed on its way to another. Each flush ends a zlib stream, and a newline follows it: srun
    holds back what ends without one.
    """

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._packer = zlib.compressobj(_LEVEL)

    def write(self, data: bytes) -> None:
        self._out.write(self._packer.compress(data))

    def flush(self) -> None:
        self._out.write(self._packer.flush() + b"\n")
        self._packer = zlib.compressobj(_LEVEL)
        self._out.flush()


def answer(source: _Source, request: bytes, out: "BinaryIO | _Deflated") -> None:
    """Write the answer to a request."""
    asked = decode(request)
    try:
        file, size = source.open(str(asked["process"]), str(asked["name"]))
        with file:
            _send(out, file, size, int(asked["offset"]), str(asked["sha256"]))
    except CheckFailed as error:
        out.write(encode({"problem": error.message}))
    except OSError as error:
        out.write(encode({"problem": error.strerror or str(error)}))


def _send(out: "BinaryIO | _Deflated", file: BinaryIO, size: int, offset: int, sha256: str) -> None:
    """Send the first `size` bytes of a file, without those before `offset` if their hash is this. Raises OSError if it
    cannot be read.

    One that shrinks or becomes unreadable meanwhile is padded with zeros, and has no digest: the receiver rejects it.
    """
    digest = hash_of_start(file, offset) if 0 < offset <= size else hashlib.sha256()
    at = offset if offset and digest.hexdigest() == sha256 and file.tell() == offset else 0
    if not at:
        digest = hashlib.sha256()
    file.seek(at)
    data = file.read(min(_CHUNK, size - at))  # an error is still a problem of this file alone
    out.write(encode({"size": size, "offset": at}))
    while data:
        digest.update(data)
        out.write(data)
        at += len(data)
        try:
            data = file.read(min(_CHUNK, size - at))
        except OSError:
            data = b""
    complete = at == size
    for start in range(at, size, _CHUNK):
        out.write(bytes(min(_CHUNK, size - start)))
    out.write(encode({"sha256": digest.hexdigest() if complete else ""}))


def _sized(file: BinaryIO) -> tuple[BinaryIO, int]:
    return file, os.fstat(file.fileno()).st_size


def _whole_lines(file: BinaryIO) -> int:
    """Return the size up to the end of the last complete line."""
    offset = file.seek(0, os.SEEK_END)
    while offset > 0:
        size = min(_CHUNK, offset)
        offset -= size
        file.seek(offset)
        if (newline := file.read(size).rfind(b"\n")) >= 0:
            return offset + newline + 1
    return 0
