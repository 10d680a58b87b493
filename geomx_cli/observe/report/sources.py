"""The runs that a user names: jobs, and folders with records."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.jobs.store.registry import KnownJob, UnknownJob, find
from geomx_cli.observe.report.collected import fetched
from geomx_cli.observe.report.run_folders import runs_below
from geomx_cli.observe.report.run_records import OnProgress, RunRecords

__all__ = ["Found", "opened", "read"]


@dataclass
class Found:
    """The readable runs. `unreadable`: a sentence for each other run."""

    runs: list[RunRecords] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """The unreadable runs and records, and unfinished runs of which nothing is recorded."""
        empty = [f"{run.name}: no worker has recorded a round" for run in self._empty() if run.unfinished]
        return self.unreadable + [problem for run in self.runs for problem in run.problems] + empty

    @property
    def notes(self) -> list[str]:
        """Finished runs of which nothing is recorded."""
        why = "its script has reported nothing; geomx.report in it gives samples, loss and accuracy"
        return [f"{run.name}: {why}" for run in self._empty() if not run.unfinished]

    def _empty(self) -> list[RunRecords]:
        return [run for run in self.runs if not any(worker.samples for worker in run.each())]


def read(folders: Sequence[Path], on_progress: OnProgress) -> Found:
    """Read the runs in these folders."""
    found = Found()
    for folder in folders:
        try:
            found.runs.append(RunRecords.read(folder, on_progress))
        except InvalidSettings as error:
            found.unreadable.append(error.message)
    return found


@contextmanager
def opened(names: Sequence[str], on_progress: OnProgress) -> Iterator[Found]:
    """Read the runs `names`. A name is a job's id, a prefix of an id, or a job directory; then the event logs are read
    from the job's hosts. Or it is a folder with records, of one run or of several. The runs can be used within the
    block.

    Raises InvalidSettings for any other name, and the errors of jobs.actions.collect.
    """
    found = Found()
    with tempfile.TemporaryDirectory(prefix="geomx-") as copies:
        for name in names:
            folder = Path(name).absolute()
            is_folder = folder.is_dir() and not (folder / "plan.json").exists()
            if is_folder and (below := runs_below(folder)):
                more = read(below, on_progress)
                found.runs += more.runs
                found.unreadable += more.unreadable
            else:
                found.runs.append(fetched(_job(name, is_folder=is_folder), Path(copies)))
        yield found


def _job(name: str, *, is_folder: bool) -> KnownJob:
    try:
        return find(name)
    except UnknownJob:
        if is_folder:  # in a folder of collected jobs, a folder with logs has a job's id as its name
            hint = "name a job, or a folder of records as in results, results/cnn or results/cnn/hfa"
            raise InvalidSettings(f"{name} has no records of runs", hint) from None
        hint = "name one as in geomx jobs, or a folder of records as geomx logs collect and geomx sweep make them"
        raise InvalidSettings(f"there is no job and no folder {name!r}", hint) from None
