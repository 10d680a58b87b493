"""A folder of collected jobs: each job's raw logs, and the records of its workers for comparison.

    BASE/JOB/                        manifest.json, events/, logs/, hosts/
    BASE/NETWORK/MODE/job.json       the job of the records below, its options and the traffic between parties
    BASE/NETWORK/MODE/HOST/DEVICE/iter-1.txt, iter-2.txt, ...
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from geomx_cli.core.errors import CheckFailed, InvalidSettings
from geomx_cli.jobs.actions.collect import collect as collect_logs
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.observe.report.job_records import JobRecords, mode_of, network_of
from geomx_cli.observe.report.metadata import Metadata
from geomx_cli.observe.report.run_records import RunRecords

__all__ = ["collect", "fetched"]


def collect(job: KnownJob, base: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Collect a job into `base`; return the content of BASE/JOB/manifest.json, with "folder" and "records" (a folder,
    or None if no worker has recorded a round).

    May be repeated while the job runs. Raises InvalidSettings if the records of another job are in the same place,
    unless `overwrite` is set, and the errors of jobs.actions.collect.
    """
    place = (base / network_of(job.plan) / mode_of(job.plan.spec.options)).resolve()
    folder = base / job.plan.job
    with _alone(base):
        if not overwrite:
            _check(place, job.plan.job)
        manifest = collect_logs(job, folder)
        trial = JobRecords.read(job.plan, folder / "events")
        written = _write_records(trial, place)
    for process in job.plan.processes:
        if (folder / "events" / f"{process.file_name}.jsonl").exists():
            problems = trial.logs[process.name].problems
            manifest["problems"] += [{"host": process.host, "problem": problem} for problem in problems]
    return {**manifest, "folder": str(folder), "records": str(place) if written else None}


@contextmanager
def _alone(base: Path) -> Iterator[None]:
    """Lock the folder against concurrent collection. Raises CheckFailed if it is locked."""
    try:
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckFailed(f"cannot write to {base}: {error.strerror}", "choose another folder") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        hint = "wait until it is done, or choose another folder"
        raise CheckFailed(f"another geomx collects into {base}", hint) from None
    finally:
        os.close(lock)


def fetched(job: KnownJob) -> RunRecords:
    """Return a job's trial from its hosts' current logs; nothing is kept. Files that a host could not provide are among
    the problems. Raises the errors of jobs.actions.collect.
    """
    with tempfile.TemporaryDirectory(prefix="geomx-") as folder:
        manifest = collect_logs(job, Path(folder, "job"))
        trial = JobRecords.read(job.plan, Path(folder, "job", "events")).trial(job.directory)
    problems = [f"host {one['host']}: {one['problem']}" for one in manifest["problems"]]
    return replace(trial, unread=tuple(problems))


def _check(place: Path, job: str) -> None:
    try:
        metadata = Metadata.read(place)
        if metadata is None and (not place.exists() or not any(place.iterdir())):
            return
        whose = f"job {metadata.job}" if metadata is not None else "somebody else"
    except (InvalidSettings, OSError):
        whose = "a job that cannot be identified"
    if whose != f"job {job}":
        hint = "collect into another folder, or replace them with --replace"
        raise InvalidSettings(f"{place} has the records of {whose}", hint)


def _write_records(trial: JobRecords, place: Path) -> bool:
    """Replace all records and return True; without any, keep the existing ones and return False. Raises CheckFailed on
    failure.
    """
    part, old = (place.with_name(f".{place.name}.{what}") for what in ("part", "old"))
    written = False
    try:
        for path in (part, old):
            shutil.rmtree(path, ignore_errors=True)
        for name, (host, device) in trial.places.items():
            folder = part / host / device
            for record in trial.logs[name].records():
                if not folder.exists():
                    folder.mkdir(parents=True)
                (folder / f"iter-{record.num_iters}.txt").write_bytes(record.encode())
                written = True
        if written:
            trial.metadata.write(part)
            if place.exists():
                place.rename(old)
            part.rename(place)
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise CheckFailed(f"cannot write to {place}: {error.strerror}", "free space or fix permissions") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return written
