"""`geomx fetch`: what a job's processes have saved, from its hosts."""

import shlex
import sys
import threading
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from geomx_cli.commands._command import json_option, print_json
from geomx_cli.commands._job import chosen, folder_option, job_argument
from geomx_cli.commands._report import MOST_REPORTED
from geomx_cli.core.errors import CheckFailed, DoneInPart, Interrupted
from geomx_cli.core.units import counted, format_bytes, some_of
from geomx_cli.core.untrusted import plain

if TYPE_CHECKING:
    from geomx_cli.jobs.actions.fetch import Fetched
    from geomx_cli.jobs.actions.streams import Listed
    from geomx_cli.jobs.view.waiting import SetStatus

__all__ = ["fetch"]


@click.command()
@job_argument
@folder_option(".")
@json_option
def fetch(name: str, folder: Path, json: bool) -> None:
    """Fetch the files that a job's processes have saved, such as the model, from all hosts of the job.

    The bundled job saves model.safetensors, optimizer.safetensors and manifest.json, and with --save-every
    checkpoints. A script saves files to the folder $GEOMX_OUTPUT_DIR. geomx writes the files to DIR/JOB/outputs/PROCESS
    and verifies them by SHA-256. It skips files that are already there, and continues interrupted transfers.

    The job may still run, or may have failed. geomx names and skips symbolic links and other files that are not plain.
    Exit code 5 means that the job has saved nothing. Exit code 7 means that a host could not be reached, or that a file
    could not be fetched; all other files have been fetched.

    \b
    Examples:
      geomx fetch                             the newest job's, to the current folder
      geomx fetch 20260729-17 --to results
    """
    from geomx_cli.jobs.actions.fetch import fetch as fetching

    job = chosen(name)
    try:
        with _Bar(lines=not json) as bar:
            found = fetching(job, folder.resolve(), bar)
    except KeyboardInterrupt:
        again = shlex.join(["geomx", "fetch", job.id, *([] if folder == Path() else ["--to", str(folder)])])
        raise Interrupted(f"interrupted; what has arrived of job {job.id} is kept", f"{again} continues") from None
    if json:
        print_json(found)
    elif found["files"]:
        size = format_bytes(sum(entry["size"] for entry in found["files"]))
        click.echo(f"{counted(len(found['files']), 'file')}, {size} in {found['folder']}")
    failure = job.state.failure if job.state is not None else None
    if failure is not None and any(entry["process"] == failure["process"] for entry in found["files"]):
        what = f"{failure['process']} failed ({failure['cause']})"
        click.echo(f"warning: {what}: a file that it was writing is incomplete", err=True)
    if found["problems"]:
        texts = [f"host {one['host']}: {one['problem']}" for one in found["problems"]]
        raise DoneInPart(f"not all was fetched: {some_of(texts, MOST_REPORTED)}", "fetch again to continue")
    if not found["files"]:
        hint = "the bundled job saves its model at its end, and with --save-every before"
        hint += "; a script saves to the folder $GEOMX_OUTPUT_DIR"
        yet = "" if job.state is not None and job.state.over else " yet"
        raise CheckFailed(f"job {job.id} has saved nothing{yet}", hint)


class _Bar:
    """A progress bar over all bytes if stderr is a terminal; else a line on stderr during waits of more than 2 s and,
    with `lines`, one on stdout for each file.
    """

    def __init__(self, *, lines: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed

        from geomx_cli.jobs.view.waiting import waiting

        columns = (TextColumn("fetching"), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn())
        console, shown = Console(stderr=True), sys.stderr.isatty()
        self._progress = Progress(*columns, console=console, disable=not shown, transient=True, redirect_stdout=False)
        self._task = self._progress.add_task("", total=None)
        self._lines = lines and not shown
        self._waiting = nullcontext(lambda text: None) if shown else waiting("asking the hosts for their files")
        self._set_status: SetStatus = lambda text: None
        self._lock = threading.Lock()
        self._total = 0
        self._done: dict[Listed, int] = {}

    def __enter__(self) -> "_Bar":
        self._progress.start()
        self._set_status = self._waiting.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.__exit__(None, None, None)
        self._progress.stop()

    def on_list(self, files: "Collection[Listed]") -> None:
        """See FetchProgress.on_list."""
        with self._lock:
            self._total += sum(file.size for file in files)
            self._progress.update(self._task, total=self._total)
            self._show("fetching")

    def on_bytes(self, file: "Listed", done: int) -> None:
        """See FetchProgress.on_bytes."""
        with self._lock:
            more = done - self._done.get(file, 0)
            self._done[file] = done
            self._progress.update(self._task, advance=more)
            self._show(f"fetching {file.path}")

    def warn(self, text: str) -> None:
        """See FetchProgress.warn."""
        with self._lock:
            self._progress.console.print(plain(text), markup=False, highlight=False, soft_wrap=True)

    def _show(self, what: str) -> None:
        self._set_status(f"{what}: {format_bytes(sum(self._done.values()))} of {format_bytes(self._total)}")

    def on_file(self, file: "Fetched") -> None:
        """See FetchProgress.on_file."""
        with self._lock:
            if self._lines:
                how = "" if file.how == "fetched" else f" ({file.how})"
                click.echo(f"{file.path}  {format_bytes(file.size)}{how}")
