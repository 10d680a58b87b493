"""Checkpoints beyond the hosts, in a store (core/stores.py), and what a host does there; each verb prints one object.

    JOB/NUMBER/HOST/PROCESS/FILE  what the processes keep
    JOB/NUMBER/HOST/part.json     the lives of a host's processes, and size and digest of each file; written after these
    JOB/NUMBER/complete.json      the same of all hosts, and the job's description; written last, by one host

Without complete.json a checkpoint is none, however its writers have ended.
"""

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from geomx_cli.agent.checkpoint import (
    FETCHED,
    KEPT,
    Checkpoint,
    Part,
    check_format,
    folder_of,
    is_name,
    stamped,
)
from geomx_cli.agent.host_spec import HostSpec
from geomx_cli.core.conventions import file_name
from geomx_cli.core.errors import CheckFailed, GeomxError
from geomx_cli.core.files import make_folders
from geomx_cli.core.jsonlines import encode
from geomx_cli.core.stores import Store, TooLarge

__all__ = ["DESCRIPTION", "Record", "Unusable", "fetch", "publish", "upload"]

DESCRIPTION = "job.json"
"""The job's description, in the directory of the host that writes the record."""
_RECORD, _PART = "complete.json", "part.json"
_LARGEST = 64 << 20  # bytes of either


class Unusable(Exception):
    """Why a job cannot continue from these files: they are incomplete, damaged, or from another program."""


@dataclass(frozen=True)
class Record:
    """A whole checkpoint. description: of its job, as launch wrote it (jobs/store/stored_job.py)."""

    job: str
    number: int
    hosts: Mapping[str, Part]
    description: Mapping[str, Any]

    @classmethod
    def read(cls, store: Store, job: str, number: int) -> "Record":
        """Read the record of JOB/NUMBER, whose files are there in full length. Raises Unusable, and the store's errors.
        """
        fields = _read(store, f"{job}/{number}/{_RECORD}")
        if fields is None:
            raise Unusable(f"it is half written: there is no {_RECORD}")
        try:
            check_format(fields)
        except ValueError as error:
            raise Unusable(str(error)) from None
        if fields.get("job") != job or fields.get("number") != number:
            raise Unusable(f"it is a copy of checkpoint {fields.get('number')} of job {fields.get('job')!r}")
        hosts, description = fields.get("hosts"), fields.get("description")
        if not isinstance(hosts, dict) or not isinstance(description, dict) or not all(map(is_name, hosts)):
            raise Unusable("its record is damaged")
        try:
            parts = {host: Part.of(part) for host, part in hosts.items()}
        except ValueError as error:
            raise Unusable(f"its record is damaged: {error}") from None
        found = cls(job, number, parts, description)
        found.check_sizes(store)
        return found

    @property
    def processes(self) -> dict[str, str]:
        """The host of each process, by name."""
        return {name: host for host, part in self.hosts.items() for name in part.incarnations}

    def check_sizes(self, store: Store) -> None:
        """Raise Unusable if a file is missing or has another size, and the store's errors."""
        sizes = store.sizes(f"{self.job}/{self.number}")
        for host, part in self.hosts.items():
            for name, (size, _) in part.files.items():
                if (there := sizes.get(f"{host}/{name}")) != size:
                    how = "is missing" if there is None else f"has {there} bytes instead of {size}"
                    raise Unusable(f"{host}/{name} {how}")


def upload(directory: Path, arguments: Sequence[str]) -> int:
    """Upload this host's part of the checkpoint NUMBER."""

    def do(spec: HostSpec, store: Store, number: int) -> str:
        found = Checkpoint.read(folder_of(directory) / str(number))
        for name, about in found.part.files.items():
            if store.put(found.path / name, f"{spec.job}/{number}/{spec.host}/{name}") != about:
                raise Unusable(f"{found.path / name} is damaged: its digest is another")
        part = asdict(found.part)
        store.write(f"{spec.job}/{number}/{spec.host}/{_PART}", json.dumps(part).encode())
        return ""

    return _answer(directory, arguments, do)


def publish(directory: Path, arguments: Sequence[str]) -> int:
    """Write the record of the checkpoint NUMBER, which the hosts that follow have uploaded, and remove older ones."""

    def do(spec: HostSpec, store: Store, number: int) -> str:
        parts = {}
        for host in arguments[1:]:
            fields = _read(store, f"{spec.job}/{number}/{host}/{_PART}")
            if fields is None:
                hint = "all hosts must share that file system, or give a URL"
                raise CheckFailed(f"{spec.checkpoint_to} on host {spec.host} lacks what host {host} has written", hint)
            parts[host] = Part.of(fields)
        description = json.loads((directory / DESCRIPTION).read_bytes())
        record = Record(spec.job, number, parts, description)
        record.check_sizes(store)
        store.write(f"{spec.job}/{number}/{_RECORD}", json.dumps(stamped(asdict(record))).encode())
        try:
            _remove_older(store, spec.job, number)
        except GeomxError as error:
            return f"older checkpoints cannot be removed: {error}"
        return ""

    return _answer(directory, arguments, do)


def _remove_older(store: Store, job: str, newest: int) -> None:
    """Remove all but the newest whole ones, first what makes them whole; of a job, one host does that at a time."""
    numbers = sorted((int(name) for name in store.names(job) if name.isascii() and name.isdecimal()), reverse=True)
    whole = [number for number in numbers if number <= newest and _RECORD in store.names(f"{job}/{number}")]
    for number in numbers:
        if number < newest and number not in whole[:KEPT]:
            store.remove(f"{job}/{number}/{_RECORD}")
            store.remove(f"{job}/{number}")


def fetch(directory: Path, arguments: Sequence[str]) -> int:
    """Fetch what the processes that follow PLACE, JOB and NUMBER had, for a job that begins here. Print the folder, or
    why no job can go on from there ("damaged"), or what else is wrong ("problem").
    """
    place, job, number, *names = arguments
    folder = directory / FETCHED / number
    answer = {"folder": str(folder), "damaged": "", "problem": ""}
    try:
        _fetch(Store(place), job, int(number), names, folder)
    except Unusable as error:
        answer["damaged"] = str(error)
    except GeomxError as error:
        answer["problem"] = str(error)
    except OSError as error:
        answer["problem"] = f"{folder} cannot be written: {error.strerror}"
    if answer["damaged"] or answer["problem"]:
        shutil.rmtree(folder, ignore_errors=True)
    print(encode(answer).decode(), end="", flush=True)
    return 0


def _fetch(store: Store, job: str, number: int, names: Collection[str], folder: Path) -> None:
    record = Record.read(store, job, number)
    shutil.rmtree(folder, ignore_errors=True)
    make_folders(folder)
    had = Part({}, {})
    for name in names:
        if (host := record.processes.get(name)) is None:
            raise Unusable(f"it has no process {name}")
        part = record.hosts[host]
        (folder / file_name(name)).mkdir(0o700)
        files = {file: part.files[file] for file in part.of_process(file_name(name))}
        for file, described in files.items():
            _fetch_file(store, f"{job}/{number}/{host}/{file}", folder / file, described)
        had = Part({**had.incarnations, name: part.incarnations[name]}, {**had.files, **files})
    had.write(folder)


def _fetch_file(store: Store, source: str, target: Path, described: tuple[int, str]) -> None:
    try:
        copied = store.get(source, target, described[0])
    except TooLarge as error:
        raise Unusable(f"{source} is damaged: {error}") from None
    if copied is None:
        raise Unusable(f"{source} is missing")
    if copied != described:
        raise Unusable(f"{source} is damaged: its digest is another")


def _answer(directory: Path, arguments: Sequence[str], do: Any) -> int:
    """Print what `do` returns, or raises, as the problem. done: whether it has returned."""
    answer = {"done": False, "problem": ""}
    try:
        spec = HostSpec.read(directory)
        answer["problem"] = do(spec, Store(spec.checkpoint_to, spec.timeout), int(arguments[0]))
        answer["done"] = True
    except (GeomxError, Unusable, ValueError) as error:
        answer["problem"] = str(error)
    except OSError as error:
        answer["problem"] = f"{error.filename or directory}: {error.strerror}"
    print(encode(answer).decode(), end="", flush=True)
    return 0


def _read(store: Store, name: str) -> dict[str, Any] | None:
    """Return the fields of a record; None if it is not there. Raises Unusable."""
    try:
        content = store.read(name, _LARGEST)
        if content is None:
            return None
        found = json.loads(content)
    except TooLarge as error:
        raise Unusable(f"its record is damaged: {error}") from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Unusable("its record is damaged")
    return found
