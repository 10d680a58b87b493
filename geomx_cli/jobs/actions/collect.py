"""Collect a job's logs from its hosts into one folder, verified, with a manifest."""

import errno
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing as closing_one
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from geomx_cli.agent.status import FILE_NAME
from geomx_cli.core.errors import CheckFailed, GeomxError, InvalidSettings
from geomx_cli.core.files import write_atomic
from geomx_cli.core.units import format_bytes
from geomx_cli.core.untrusted import decode, first_line
from geomx_cli.hosts import Connector, closing, everywhere
from geomx_cli.jobs.actions.fetch import FOLDER, PARTIAL
from geomx_cli.jobs.actions.streams import Changed, FileStream, Listed, Received, Refused
from geomx_cli.jobs.store.registry import KnownJob

__all__ = ["MANIFEST_VERSION", "collect"]

MANIFEST_VERSION = 1
MANIFEST = "manifest.json"
_AHEAD = 32  # files asked for at a time
_MOST_BYTES = 4 << 30  # per file
_MOST_FILES = 10_000  # per host, in the manifest
_MOST_NAMED = 4
_HERE = "free disk space or fix permissions here, or choose another folder"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class _Listing(msgspec.Struct):
    """What a host has: logs, event logs and the agent's files; and what its processes have saved."""

    files: list[Listed]
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
    """Put events/, logs/ and hosts/HOST/ of all hosts into `folder`; return the content of its manifest.json. For files
    that are there already, only new bytes are transferred.

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
            entries, listing = _fetch(job, host, folder, status.received)
            problems.extend({"host": host.name, "problem": what} for what in listing.left_out[:_MOST_FILES])
            outputs.extend({"host": host.name, **msgspec.to_builtins(one)} for one in listing.outputs[:_MOST_FILES])
            return entries
        except (GeomxError, OSError, ValueError) as error:
            if isinstance(error, OSError) and _is_here(error, folder):
                raise CheckFailed(f"cannot write to {folder}: {error.strerror}", _HERE) from None
            problems.append({"host": host.name, "problem": first_line(error, host.name)})
            return [entry for entry in kept if entry.host == host.name]
        finally:
            status.finish(host.name)

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

    def finish(self, host: str) -> None:
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
    job: KnownJob, host: Connector, folder: Path, received_bytes: Callable[[int], None]
) -> tuple[list[_Entry], _Listing]:
    """Fetch one host's files, verify and place them; return them and the host's list."""
    expected = _expected(job, host.name)
    with closing_one(FileStream(host, job.directory_on(host.name), "records", received_bytes, _MOST_BYTES)) as stream:
        try:
            found = stream.listing(_Listing, packed=True)
            if wrong := next((one for one in found.files if one.name not in expected), None):
                raise CheckFailed(f"it sent {wrong.name!r}, which is no file of this job")
            received: list[tuple[Listed, Received]] = []
            asked = 0
            for place, listed in enumerate(found.files):
                for ahead in found.files[asked : place + _AHEAD]:  # a round trip for each file would take long
                    stream.ask(ahead, folder / ahead.name)
                    asked += 1
                try:
                    received.append((listed, stream.receive(_part(folder, listed.name))))
                except Changed:
                    raise CheckFailed(f"checksum mismatch of {listed.name}") from None
                except Refused as error:  # it has been removed in the meantime
                    found.left_out.append(f"{listed.name}: {error}")
            when = time.time()
            for listed, one in received:
                if one.is_new:
                    _part(folder, listed.name).replace(folder / listed.name)
            entries = [
                _Entry(listed.name, host.name, listed.process, one.size, one.sha256, when) for listed, one in received
            ]
            return entries, found
        finally:
            for name in expected:
                with suppress(FileNotFoundError, NotADirectoryError):
                    _part(folder, name).unlink()


def _expected(job: KnownJob, host: str) -> set[str]:
    """Names of all files this host may send; anything else is rejected."""
    stems = [process.file_name for process in job.plan.on_host(host)]
    logs = {f"logs/{stem}.log{older}" for stem in stems for older in ("", ".1")}
    logs |= {f"events/{stem}.jsonl" for stem in stems}
    return logs | {f"hosts/{host}/agent.log", f"hosts/{host}/{FILE_NAME}"}


def _part(folder: Path, name: str) -> Path:
    return folder / f"{name}.part"
