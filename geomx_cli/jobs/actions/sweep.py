"""Run the jobs of a sweep one after another, and resume one that was interrupted."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geomx_cli.core.errors import CheckFailed, GeomxError, Interrupted, InvalidSettings
from geomx_cli.core.files import locked_folder
from geomx_cli.core.units import format_duration, some_of
from geomx_cli.core.untrusted import first_line
from geomx_cli.jobs.actions.sweep_jobs import FILE_NAME, Cell, State, SweepManifest, SweepSettings
from geomx_cli.jobs.store.registry import KnownJob, find
from geomx_cli.jobs.view.result import Conclusion
from geomx_cli.plan.job_spec import new_job_id

__all__ = ["Runner", "sweep", "unfinished"]

_LOCK = ".lock"  # not the folder itself, which is locked to collect a job into it
_FIGURES = "figures"
_MOST_PROBLEMS = 3
_RESUME = "repeat the command to continue"
_STATES: Mapping[Any, State] = {
    "done in part": "done in part", "interrupted": "interrupted", "stopped": "interrupted",
}  # fmt: skip
"""Of a cell, by the status of its job; "failed" for others."""


@dataclass(frozen=True)
class Runner:
    """How a sweep runs its jobs. launch: runs one to its end, and raises the errors of jobs.actions.launch; attach:
    follows one that a killed sweep has left; collect: puts a job's records into the sweep's folder and returns its
    manifest. settings: returns the settings as a job launched now would have them. note: shows a line.
    """

    launch: Callable[[Cell], Conclusion]
    attach: Callable[[KnownJob], Conclusion]
    collect: Callable[[KnownJob], Mapping[str, Any]]
    settings: Callable[[], SweepSettings]
    note: Callable[[str], None]


def sweep(
    folder: Path, algorithms: list[str], seeds: range, runner: Runner, *, target: float, restart: bool = False
) -> list[Cell]:
    """Run all jobs that are not done yet, and return the cells. Call it from the main thread.

    sweep.json is written before and after each job, so that the same command continues after any end, even that of the
    machine. Failed jobs do not stop the others; they run again in the next sweep of the folder. Raises InvalidSettings
    if the sweep of the folder has other settings, unless `restart` is set, or if they change while it runs (the script
    is edited), CheckFailed if another process runs it, and Interrupted. target: accuracy, for later reports.
    """
    settings = runner.settings()
    with locked_folder(folder, _LOCK):
        manifest = _opened(folder, settings, target, restart=restart)
        cells = manifest.wanted(algorithms, seeds)
        manifest.write(folder)
        one = _Sweep(folder, manifest, runner)
        for number, cell in enumerate(cells, 1):
            one.finish(cell, f"[{number}/{len(cells)}] {cell.name}")
    return cells


def _opened(folder: Path, settings: SweepSettings, target: float, *, restart: bool) -> SweepManifest:
    if restart:
        _set_aside(folder)
    manifest = SweepManifest.read(folder)
    if manifest is None:
        return SweepManifest(settings, target=target)
    _refuse_changes(folder, manifest, settings)
    manifest.target = target
    return manifest


def _refuse_changes(folder: Path, manifest: SweepManifest, settings: SweepSettings) -> None:
    if changes := manifest.settings.changes(settings):
        hint = "choose another folder with --to, or discard what was done with --restart"
        raise InvalidSettings(f"{folder} has a sweep with other settings: {'; '.join(changes)}", hint)


def _set_aside(folder: Path) -> None:
    """Move what the sweep has written to old-TIME/ in its folder, so that reports do not mix both sweeps. Files of the
    user, who may have chosen a folder that is in use, stay. Raises InvalidSettings while a job of the sweep may run.
    """
    manifest = SweepManifest.read(folder)
    if manifest is None:
        return
    for cell in manifest.cells:
        job = _job_of(cell) if cell.state == "running" else None
        if job is not None and job.state is not None and not job.state.over:
            raise InvalidSettings(f"job {job.id} of the sweep may still run", f"stop it first: geomx stop {job.id}")
    old = folder / f"old-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        for name in _written(manifest):
            if (folder / name).exists():
                (old / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).rename(old / name)
                with suppress(OSError):  # not empty
                    for parent in Path(name).parents[:-1]:
                        (folder / parent).rmdir()
    except OSError as error:
        raise CheckFailed(f"cannot write to {folder}: {error.strerror}", "choose another folder with --to") from None


def _written(manifest: SweepManifest) -> Iterator[str]:
    """Yield the sweep's files and folders in its folder; its manifest last, so that a failure can be repeated."""
    for cell in manifest.cells:
        yield from filter(None, (cell.records, cell.job))
    yield from (_FIGURES, FILE_NAME)


def _job_of(cell: Cell) -> KnownJob | None:
    """Return the cell's newest job; None if it was not started, or its directory has been removed."""
    try:
        return find(cell.job) if cell.job else None
    except InvalidSettings:
        return None


@dataclass(frozen=True)
class _Sweep:
    folder: Path
    manifest: SweepManifest
    runner: Runner

    def finish(self, cell: Cell, title: str) -> None:
        """Run a cell's job, or what is missing of it."""
        collected = bool(cell.records) and (self.folder / cell.records).is_dir()
        if cell.state == "done" and (collected or not cell.records):
            self.runner.note(f"{title}: done already (job {cell.job})")
            return
        job = _job_of(cell)
        if cell.state == "collected in part" and collected and job is None:
            self.runner.note(f"{title}: collected in part ({cell.why}), and job {cell.job} is no longer there")
            return
        began = time.monotonic()
        conclusion = (self._left(cell, job, title) if job is not None else None) or self._launched(cell, title)
        status = conclusion.result.get("status")
        if conclusion.error is None or status == "done":
            self._collect(cell)
        else:
            self._set(cell, _STATES.get(status, "failed"), first_line(conclusion.error).removesuffix(":"))
        took = format_duration(time.monotonic() - began)
        accuracy = conclusion.result.get("accuracy")
        why = cell.why.removeprefix(f"job {cell.job} was ")  # which is named before
        words = [cell.state, f"job {cell.job}", took, "" if accuracy is None else f"accuracy {accuracy:.4f}", why]
        self.runner.note(f"{title}: {', '.join(filter(None, words))}")
        for warning in conclusion.result.get("warnings", ()):
            self.runner.note(f"warning: {cell.name}: {warning}")
        if isinstance(conclusion.error, Interrupted):
            raise Interrupted(conclusion.error.message, _RESUME)

    def _left(self, cell: Cell, job: KnownJob, title: str) -> Conclusion | None:
        """Return the end of `job` if an earlier sweep has started it; None if another one must be launched. Raises
        Interrupted if the job continues without this sweep.
        """
        if cell.state in ("done", "collected in part"):
            self.runner.note(f"{title}: collecting job {cell.job} again")
            return Conclusion()
        if cell.state != "running":
            return None
        over = job.state is not None and job.state.over  # by geomx stop, perhaps
        self.runner.note(f"{title}: job {cell.job} was left by an earlier sweep")
        try:
            end = self.runner.attach(job)
        except (CheckFailed, InvalidSettings) as error:
            if job.state is not None and job.state.followed:
                raise
            what = f"job {cell.job} cannot be followed ({error.message})"
            self.runner.note(f"warning: {what}; geomx stop {cell.job} ends what runs of it")
            return None
        if not end.result and end.error is None:  # Ctrl-C has detached, or another geomx has taken over
            raise Interrupted(f"job {job.id} continues without this sweep", _RESUME)
        interrupted = isinstance(end.error, Interrupted) and not over
        return end if end.result.get("status") == "done" or interrupted else None

    def _launched(self, cell: Cell, title: str) -> Conclusion:
        _refuse_changes(self.folder, self.manifest, self.runner.settings())
        cell.job, cell.records = new_job_id(), ""
        self._set(cell, "running")
        self.runner.note(f"{title}: job {cell.job}")
        try:
            return self.runner.launch(cell)
        except (Interrupted, KeyboardInterrupt) as error:
            raise self._interrupted(cell, error) from None
        except GeomxError as error:
            if "\n" in error.message:  # of which the line of a failed job shows the first one only
                self.runner.note(f"{title}: error: {error}")
            return Conclusion(error=error)

    def _interrupted(self, cell: Cell, error: BaseException) -> Interrupted:
        """Return the error of a launch that was interrupted. If its job has a plan it may still run, and the next sweep
        follows it; otherwise it is to be launched again.
        """
        job = _job_of(cell)
        if job is None or (job.state is not None and job.state.over):
            name, cell.job = cell.job, cell.job if job is not None else ""
            self._set(cell, "interrupted" if job is not None else "pending")
            return Interrupted(f"interrupted; job {name} ({cell.name}) was not started", _RESUME)
        how = error.message if isinstance(error, Interrupted) else f"interrupted; job {cell.job} may still run"
        return Interrupted(how, _RESUME)

    def _collect(self, cell: Cell) -> None:
        """Collect the job's records. A job that is done is never run again because they are incomplete."""
        try:
            manifest = self.runner.collect(find(cell.job))
        except (Interrupted, KeyboardInterrupt):
            self._set(cell, "collected in part", "interrupted")
            what = f"interrupted; job {cell.job} is done, and its records are not collected"
            raise Interrupted(what, _RESUME) from None
        except GeomxError as error:
            self._set(cell, "collected in part", first_line(error))
            return
        if manifest["records"]:
            cell.records = str(Path(manifest["records"]).relative_to(self.folder.resolve()))
        problems = [f"host {one['host']}: {one['problem']}" for one in manifest["problems"]]
        self._set(cell, "collected in part" if problems else "done", some_of(problems, _MOST_PROBLEMS))

    def _set(self, cell: Cell, state: State, why: str = "") -> None:
        cell.state, cell.why = state, why
        self.manifest.write(self.folder)


def unfinished(cells: Sequence[Cell]) -> list[str]:
    """Return a sentence for each cell that is not done."""
    return [
        f"{cell.name}: {cell.state}" + (f" (job {cell.job}: {cell.why})" if cell.why else "")
        for cell in cells
        if cell.state != "done"
    ]
