"""Collect a job's logs from its hosts into one folder, verified, with a manifest."""

import errno
import hashlib
import json
import tarfile
import threading
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from geomx_cli.agent.pack import HELD, MANIFEST
from geomx_cli.agent.status import FILE_NAME
from geomx_cli.core.conventions import module_command
from geomx_cli.core.errors import CheckFailed, GeomxError, InvalidSettings
from geomx_cli.core.files import write_atomic
from geomx_cli.core.units import format_bytes
from geomx_cli.core.untrusted import decode, first_line, last_line
from geomx_cli.hosts import Channel, Connector, closing, everywhere
from geomx_cli.jobs.actions.fetch import FOLDER, PARTIAL, Listed
from geomx_cli.jobs.store.registry import KnownJob

__all__ = ["MANIFEST_VERSION", "collect"]

MANIFEST_VERSION = 1
_CHUNK = 1 << 18
_MOST_BYTES = 4 << 30  # per file
_MOST_FILES = 10_000  # per host
_MOST_NAMED = 4
_MANIFEST_BYTES = 16 << 20
_HEADER_BYTES = 1 << 20  # tar overhead: before each file and after the last
_HERE = "free disk space or fix permissions here, or choose another folder"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_TOO_LARGE = "its data exceed the log limits: check what that host runs as geomx"


class _Sent(msgspec.Struct):
    """A file in the host's manifest; see agent/pack.py."""

    file: str
    process: str
    size: int
    sha256: str


class _HostManifest(msgspec.Struct):
    files: list[_Sent]
    left_out: list[str] = []
    outputs: list[Listed] = []


@dataclass(frozen=True)
class _Entry:
    """A collected file; `when`: time of sending, Unix seconds."""

    file: str
    host: str
    process: str
    size: int
    sha256: str
    when: float


class _Manifest(msgspec.Struct):
    """What has been collected already."""

    job: str
    files: list[_Entry]


def collect(job: KnownJob, folder: Path, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Put events/, logs/ and hosts/HOST/ of all hosts into `folder`; return the content of its manifest.json. Of files
    that are there already, only what has been added is transferred.

    Each file is a complete, verified copy from one moment, or is not replaced: a host that fails half-way changes
    nothing. Failed hosts are listed in "problems". "outputs" has what processes have saved, which `geomx fetch` brings.
    `say` receives what is waited for, from the threads of several hosts. Raises InvalidSettings if the folder contains
    anything else, CheckFailed if it cannot be written.
    """
    kept = _prepare(folder, job)
    problems: list[dict[str, str]] = []
    outputs: list[dict[str, Any]] = []
    status = _Status(job.plan.hosts, say)

    def fetch(host: Connector) -> list[_Entry]:
        try:
            entries, manifest = _fetch(job, host, folder, kept, status.received)
            problems.extend({"host": host.name, "problem": what} for what in manifest.left_out[:_MOST_FILES])
            outputs.extend({"host": host.name, **msgspec.to_builtins(one)} for one in manifest.outputs[:_MOST_FILES])
            return entries
        except (GeomxError, OSError, ValueError) as error:
            if isinstance(error, OSError) and _is_here(error, folder):
                raise CheckFailed(f"cannot write to {folder}: {error.strerror}", _HERE) from None
            problems.append({"host": host.name, "problem": first_line(error, host.name)})
            return [entry for entry in kept if entry.host == host.name]
        finally:
            status.end(host.name)

    with closing(job.open_hosts()) as hosts:
        entries = [entry for found in everywhere(fetch, hosts.values()) for entry in found]
    return _write(folder, job, entries, problems, outputs)


class _Status:
    """Reports the hosts that are waited for, and how many bytes have come from all. Thread-safe."""

    def __init__(self, hosts: Sequence[str], say: Callable[[str], None]) -> None:
        self._hosts, self._say = dict.fromkeys(hosts), say
        self._bytes = 0
        self._lock = threading.Lock()
        self._show()

    def received(self, count: int) -> None:
        with self._lock:
            self._bytes += count
            self._show()

    def end(self, host: str) -> None:
        with self._lock:
            self._hosts.pop(host, None)
            self._show()

    def _show(self) -> None:
        if self._hosts:
            names = ", ".join([*self._hosts][:_MOST_NAMED])
            more = f" and {len(self._hosts) - _MOST_NAMED} more" if len(self._hosts) > _MOST_NAMED else ""
            self._say(f"collecting from {names}{more}, {format_bytes(self._bytes)} so far")


def _is_here(error: OSError, folder: Path) -> bool:
    """Return whether `error` is a local write failure rather than a failure of the host."""
    return error.errno in _FULL or (error.filename is not None and str(error.filename).startswith(str(folder)))


def _prepare(folder: Path, job: KnownJob) -> list[_Entry]:
    """Create the folder; return the entries of this job that it has already."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if all(entry.name in (FOLDER, PARTIAL) for entry in folder.iterdir()):
            _write(folder, job, [], [{"host": "", "problem": "nothing is collected yet"}])
            return []
    except OSError as error:
        raise CheckFailed(f"cannot write to {folder}: {error.strerror}", _HERE) from None
    try:
        manifest = decode((folder / MANIFEST).read_bytes(), _Manifest)
    except (OSError, ValueError):
        raise InvalidSettings(f"{folder} has something else in it", "choose a new folder, or an empty one") from None
    if manifest.job != job.plan.job:
        raise InvalidSettings(f"{folder} has the logs of job {manifest.job}", "choose another folder")
    return manifest.files


def _write(
    folder: Path, job: KnownJob, entries: list[_Entry], problems: list[dict[str, str]],
    outputs: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:  # fmt: skip
    manifest = {
        "schema_version": MANIFEST_VERSION,
        "job": job.plan.job,
        "complete": not problems,
        "files": [asdict(entry) for entry in entries],
        "problems": problems,
        "outputs": list(outputs),
    }
    try:
        write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    except OSError as error:
        raise CheckFailed(f"cannot write to {folder}: {error.strerror}", _HERE) from None
    return manifest


def _fetch(
    job: KnownJob, host: Connector, folder: Path, kept: Sequence[_Entry], received_bytes: Callable[[int], None]
) -> tuple[list[_Entry], _HostManifest]:
    """Fetch one host's files, verify and place them; return them and the host's manifest."""
    channel = host.open(module_command(host.python, "geomx_cli.agent", "pack", job.directory_on(host.name)))
    expected = _expected(job, host.name)
    held = {entry.file: (entry.size, entry.sha256) for entry in kept if _is_held(entry, host.name, folder)}
    try:
        with suppress(OSError):  # it ended early; stderr says why
            channel.send(json.dumps(held).encode() + b"\n")
        try:
            received, manifest = _unpack(_Stream(channel, received_bytes), expected, held, folder)
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise CheckFailed(last_line(channel.errors(), f"incomplete: {error}").removeprefix("error: ")) from None
        if manifest is None:
            raise CheckFailed("the connection broke before the end")
        return _settle(folder, host.name, received, manifest), manifest
    finally:
        channel.close()
        for name in expected:
            with suppress(FileNotFoundError, NotADirectoryError):
                _part(folder, name).unlink()


def _unpack(
    stream: "_Stream", expected: Collection[str], held: Mapping[str, tuple[int, str]], folder: Path
) -> tuple[dict[str, tuple[int, str]], _HostManifest | None]:
    """Return the size and hash of each file received, and the manifest received with them."""
    received: dict[str, tuple[int, str]] = {}
    manifest: _HostManifest | None = None
    with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r|") as tar:
        for member in tar:
            stream.room = member.size + _HEADER_BYTES
            source = tar.extractfile(member) if member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) else None
            is_manifest = member.name == MANIFEST and manifest is None
            if member.size > (_MANIFEST_BYTES if is_manifest else _MOST_BYTES) or len(received) >= _MOST_FILES:
                raise CheckFailed(_TOO_LARGE)
            if source is not None and is_manifest:
                manifest = decode(source.read(), _HostManifest)
            elif source is not None and member.name in expected and member.name not in received:
                begins = int(member.pax_headers.get(HELD, 0))
                if begins not in (0, held.get(member.name, (0,))[0]):
                    raise CheckFailed(f"it sent {member.name!r} from byte {begins} on")
                place, part = folder / member.name, _part(folder, member.name)
                received[member.name] = _receive(source, part, place if begins else None)
            else:
                raise CheckFailed(f"it sent {member.name!r}, which is no file of this job")
    return received, manifest


def _settle(folder: Path, host: str, received: Mapping[str, tuple[int, str]], manifest: _HostManifest) -> list[_Entry]:
    """Compare received files with the manifest and move them into place."""
    if {entry.file: (entry.size, entry.sha256) for entry in manifest.files} != received:
        raise CheckFailed("checksum mismatch")
    when = time.time()
    for name in received:
        _part(folder, name).replace(folder / name)
    return [_Entry(entry.file, host, entry.process, entry.size, entry.sha256, when) for entry in manifest.files]


def _expected(job: KnownJob, host: str) -> set[str]:
    """Names of all files this host may send; anything else is rejected."""
    stems = [process.file_name for process in job.plan.on_host(host)]
    logs = {f"logs/{stem}.log{older}" for stem in stems for older in ("", ".1")}
    logs |= {f"events/{stem}.jsonl" for stem in stems}
    return logs | {f"hosts/{host}/agent.log", f"hosts/{host}/{FILE_NAME}"}


def _is_held(entry: _Entry, host: str, folder: Path) -> bool:
    """Whether a file of the host is here as it was collected."""
    with suppress(OSError), (folder / entry.file).open("rb") as file:
        return entry.host == host and hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
    return False


def _part(folder: Path, name: str) -> Path:
    return folder / f"{name}.part"


def _receive(source: IO[bytes], path: Path, before: Path | None) -> tuple[int, str]:
    """Write the bytes of `before` and those received; return their size and SHA-256."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    size, digest = 0, hashlib.sha256()
    with ExitStack() as stack:
        parts = [source] if before is None else [stack.enter_context(before.open("rb")), source]
        file = stack.enter_context(path.open("wb"))
        for part in parts:
            while data := part.read(_CHUNK):
                size += len(data)
                digest.update(data)
                file.write(data)
    return size, digest.hexdigest()


class _Stream:
    """The decompressed bytes of a channel, as a file for tarfile. Raises CheckFailed after more than `room` bytes: tar
    headers may claim any length, and a small archive may decompress to any size.
    """

    def __init__(self, channel: Channel, received: Callable[[int], None]) -> None:
        self.room = _HEADER_BYTES
        self._channel = channel
        self._received = received
        self._inflate = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        self._rest = b""

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes; b"" at EOF. Raises zlib.error, or EOFError for a truncated stream."""
        while not self._inflate.eof:
            packed = self._rest
            if not packed:
                packed = self._channel.receive()
                self._received(len(packed))
            if not packed:
                raise EOFError("its end is missing")
            data = self._inflate.decompress(packed, size)
            self._rest = self._inflate.unconsumed_tail
            if data:
                self.room -= len(data)
                if self.room < 0:
                    raise CheckFailed(_TOO_LARGE)
                return data
        return b""
