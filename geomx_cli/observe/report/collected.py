"""A folder of collected jobs: each job's raw logs, and the records of its workers for comparison.

    BASE/JOB/                            manifest.json, events/, logs/, hosts/
    BASE/NETWORK/MODE/JOB/job.json       the job, its options and the traffic between parties
    BASE/NETWORK/MODE/JOB/HOST/DEVICE.jsonl

In ESync's layout the records of one job are in BASE/NETWORK/MODE/HOST/DEVICE/iter-1.txt, iter-2.txt, ..., and job.json
in BASE/NETWORK/MODE.
"""

import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from geomx_cli.core.errors import CheckFailed, InvalidSettings
from geomx_cli.core.files import locked_folder
from geomx_cli.core.units import counted
from geomx_cli.jobs.actions.collect import collect as collect_logs
from geomx_cli.jobs.store.job_state import JobState
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.observe.report.metadata import Metadata
from geomx_cli.observe.report.record import SUFFIX, RoundRecord
from geomx_cli.observe.report.run_folders import runs_below
from geomx_cli.observe.report.run_records import JobRecords, RunRecords, mode_of, network_of

__all__ = ["Layout", "collect", "fetched"]

Layout = Literal["runs", "esync"]


def collect(
    job: KnownJob, base: Path, *, layout: Layout = "runs", overwrite: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Collect a job into `base`. Return the content of BASE/JOB/manifest.json, with "folder" and "records" (a folder,
    or None if nothing is recorded).

    overwrite: replace the records of another job in the same place. Only ESync's layout has one place for several jobs.
    say: receives texts about what the collection waits for.

    May be repeated while the job runs. Without `overwrite`, raises InvalidSettings for records of another job. Raises
    the errors of jobs.actions.collect.
    """
    mode = (base / network_of(job.plan) / mode_of(job.plan.spec.options)).resolve()
    place = mode if layout == "esync" else mode / job.plan.job
    folder = base / job.plan.job
    with locked_folder(base):
        _check(place, job.plan.job, overwrite=overwrite)
        state = _state(job)
        manifest = collect_logs(job, folder, say)
        say("reading the records of the workers' rounds")
        records = JobRecords.read(job.plan, folder / "events", state)
        written = _write_records(records, place, layout)
    for process in job.plan.processes:
        if (folder / "events" / f"{process.file_name}.jsonl").exists():
            problems = records.logs[process.name].problems
            manifest["problems"] += [{"host": process.host, "problem": problem} for problem in problems]
    return {**manifest, "folder": str(folder), "records": str(place) if written else None}


def fetched(job: KnownJob, folder: Path) -> RunRecords:
    """Return a job's run from its hosts' current logs, copied to `folder`, which must remain while the run is used.
    Files that a host could not provide are among the problems. Raises the errors of jobs.actions.collect.
    """
    state = _state(job)
    manifest = collect_logs(job, folder / job.plan.job)
    records = JobRecords.read(job.plan, folder / job.plan.job / "events", state)
    place = folder / "records" / job.plan.job
    _write_records(records, place, "runs", empty=True)
    problems = [f"host {one['host']}: {one['problem']}" for one in manifest["problems"]]
    return replace(RunRecords.read(place), unread=(*problems, *records.problems))


def _state(job: KnownJob) -> str:
    """Return the job's state now. It is read before the logs are copied, because a job may end meanwhile."""
    state = JobState.read(job.directory)
    return state.shown if state is not None else "orphaned"


def _check(place: Path, job: str, *, overwrite: bool) -> None:
    """Raise InvalidSettings if `place` has anything but this job's records. `overwrite` allows records of another job,
    but never folders of runs.
    """
    if below := [path for path in runs_below(place) if path != place]:
        hint = "collect into another folder, or without --layout esync"
        raise InvalidSettings(f"{place} has the records of {counted(len(below), 'run')} in folders of their own", hint)
    if overwrite:
        return
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


def _write_records(records: JobRecords, place: Path, layout: Layout, *, empty: bool = False) -> bool:
    """Replace all records and return True. If nothing is recorded, not even traffic, keep the existing records and
    return False, unless `empty` is set. Raises CheckFailed on failure.
    """
    part, old = (place.with_name(f".{place.name}.{what}") for what in ("part", "old"))
    metadata, written = records.metadata, empty
    try:
        for path in (part, old):
            shutil.rmtree(path, ignore_errors=True)
        for name, (host, device) in records.places.items():
            (part / host).mkdir(parents=True, exist_ok=True)
            write = _write_files if layout == "esync" else _write_lines
            written |= write(records.logs[name].records(), part / host / device)
        if written or metadata.has_traffic:
            metadata.write(part)
            if place.exists():
                place.rename(old)
            place.parent.mkdir(parents=True, exist_ok=True)
            part.rename(place)
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise CheckFailed(f"cannot write to {place}: {error.strerror}", "free space or fix permissions") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return written or metadata.has_traffic


def _write_lines(rounds: Iterable[RoundRecord], path: Path) -> bool:
    """Write a worker's rounds to one file; return whether there are any."""
    with path.with_name(path.name + SUFFIX).open("wb") as file:
        file.writelines(record.encode() + b"\n" for record in rounds)
        return file.tell() > 0


def _write_files(rounds: Iterable[RoundRecord], folder: Path) -> bool:
    """Write a file for each round of a worker; return whether there are any."""
    any_round = False
    for record in rounds:
        if not any_round:
            folder.mkdir()
        (folder / f"iter-{record.num_iters}.txt").write_bytes(record.encode())
        any_round = True
    return any_round
