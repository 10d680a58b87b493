"""`geomx jobs`: the jobs launched from this machine."""

import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from geomx_cli.commands._command import json_option, print_json
from geomx_cli.commands._completion import job_ids
from geomx_cli.commands._job import Duration, ParentCommand
from geomx_cli.commands._report import MOST_REPORTED
from geomx_cli.core.errors import UsageError
from geomx_cli.core.units import counted, format_bytes, some_of

if TYPE_CHECKING:
    from geomx_cli.jobs.actions.prune import Pruned

__all__ = ["jobs"]

JOBS_VERSION = 1
_LONGEST, _LONGEST_HOW = 48, 28  # characters shown of what a job runs, and in that of algorithm and codec
_FOLDERS = re.compile(r"[^\s/]*/\S+/")


@click.command(cls=ParentCommand)
@json_option
def jobs(json: bool) -> None:
    """List the jobs launched from this machine, newest first.

    This command contacts no host, so a detached job in the list may have ended. geomx status JOB asks the hosts.
    "running" means that a geomx process follows the job. "orphaned" means that this process was killed. To remove jobs,
    see geomx jobs prune -h.

    \b
    Examples:
      geomx jobs
      geomx status 2026       the job whose name begins with 2026
      geomx stop              the newest running job
      geomx jobs prune        remove jobs that have ended
    """
    from geomx_cli.core.errors import CheckFailed, InvalidSettings
    from geomx_cli.jobs.store.registry import all_jobs

    known, damaged = [], []
    for job in all_jobs():
        try:
            known.append(job.to_json())
        except (InvalidSettings, CheckFailed) as error:
            damaged.append(error.message)
    if damaged:
        what = f"{len(damaged)} more cannot be read, the newest: " if len(damaged) > 1 else ""
        click.echo(f"warning: {what}{damaged[0]}", err=True)
    if json:
        print_json({"schema_version": JOBS_VERSION, "jobs": known})
    else:
        _print(known)


@click.command()
@click.argument("names", nargs=-1, metavar="[JOB]...", shell_complete=job_ids)
@click.option(
    "--older-than",
    type=Duration(0.0, 3650 * 86_400.0, bare=False),
    default=0.0,
    metavar="DURATION",
    help="Only jobs that ended at least this long ago, such as 12h or 30d.",
)
@click.option("--keep", type=click.IntRange(0), default=0, metavar="N", help="Keep the N jobs that ended last.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@click.option(
    "--forget-unreachable",
    is_flag=True,
    help="Also remove jobs if some hosts do not answer. Files and processes on these hosts stay.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def prune(
    names: tuple[str, ...],
    older_than: float,
    keep: int,
    dry_run: bool,
    forget_unreachable: bool,
    yes: bool,
    json: bool,
) -> None:
    """Remove jobs that have ended, here and on the hosts that ran them: logs, events, copied files and outputs.

    Shows the size of each job and asks for confirmation. Never removes a running job. The age of a job counts from its
    end. Files that the job did not write stay. Exit code 7 means that a host could not be reached, or that a file could
    not be removed. The job then stays in the list of geomx jobs, so that you can prune it later.

    \b
    Examples:
      geomx jobs prune --dry-run
      geomx jobs prune --older-than 30d --keep 10 --yes
      geomx jobs prune 20260729-17
    """
    from contextlib import closing

    from geomx_cli.core.errors import DoneInPart
    from geomx_cli.jobs.actions.prune import PRUNE_VERSION, Pruner, select
    from geomx_cli.jobs.view.waiting import waiting

    if names and (older_than or keep):
        raise UsageError("--older-than and --keep choose among all jobs", "leave them out, or name no job")
    with closing(Pruner(dry_run=dry_run, forget_unreachable=forget_unreachable)) as pruner:
        with waiting("looking for jobs that have ended") as set_status:
            chosen = select(pruner.ended(names), older_than=older_than, keep=keep)
            if chosen and not (dry_run or yes):
                _check_that_it_can_ask(len(chosen), json=json)
            for number, one in enumerate(chosen, 1):
                set_status(f"measuring job {one.job.id}, {number} of {len(chosen)}")
                pruner.measure(one)
        if not json:
            _print_sizes(chosen)
        agreed = bool(chosen) and not dry_run and (yes or _confirmed(len(chosen)))
        if agreed:
            with waiting("removing jobs") as set_status:
                for number, one in enumerate(chosen, 1):
                    set_status(f"removing job {one.job.id}, {number} of {len(chosen)}")
                    pruner.remove(one)
    removed = [one for one in chosen if one.removed]
    if json:
        found = [one.to_json() for one in chosen]
        print_json({"schema_version": PRUNE_VERSION, "jobs": found, "problems": pruner.problems})
    elif agreed:
        click.echo(f"removed {counted(len(removed), 'job')}, {format_bytes(sum(one.bytes for one in removed))}")
    problems = [*pruner.problems, *(f"job {one.job.id}: {what}" for one in chosen for what in one.problems)]
    if problems:
        what = "not all was removed" if agreed else "not all is known"
        hint = "prune again later; if a host is gone for good, use --forget-unreachable"
        raise DoneInPart(f"{what}: {some_of(problems, MOST_REPORTED)}", hint)


def _check_that_it_can_ask(count: int, *, json: bool) -> None:
    if json or not sys.stdin.isatty():
        what = "--json does not ask" if json else "stdin is not a terminal, so nobody can be asked"
        raise UsageError(f"{what} whether to remove {counted(count, 'job')}", "write --yes, or --dry-run to see sizes")


def _print_sizes(chosen: "Sequence[Pruned]") -> None:
    if not chosen:
        click.echo("no job to remove", err=True)
        return
    lines = [("JOB", "ENDED", "SIZE", "HOSTS")]
    for one in chosen:
        unknown = [host for host, size in one.sizes.items() if size is None]
        size = format_bytes(one.bytes) + (f" + {', '.join(unknown)}?" if unknown else "")
        ended = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.ended))
        lines.append((one.job.id, ended, size, "?" if one.hosts is None else str(one.hosts)))
    _print_table(lines)
    click.echo(f"{counted(len(chosen), 'job')}, {format_bytes(sum(one.bytes for one in chosen))}")


def _print(known: list[dict[str, Any]]) -> None:
    if not known:
        click.echo("no jobs yet; geomx launch starts one", err=True)
        return
    lines = [("JOB", "STARTED", "STATE", "EXIT", "ACCURACY", "HOSTS", "WHAT"), *map(_cells, known)]
    _print_table(lines, shutil.get_terminal_size().columns if sys.stdout.isatty() else 0)


def _print_table(lines: "Sequence[tuple[str, ...]]", most: int = 0) -> None:
    """Print columns; where that is wider than `most`, if given, the last one goes to lines of its own."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    folds = 0 < most < sum(widths) + 2 * len(widths) - 2
    for number, line in enumerate(lines):
        cells = [f"{text:<{width}}" for text, width in zip(line, widths, strict=True)]
        click.echo("  ".join(cells[:-1] if folds else cells).rstrip())
        if folds and number:
            click.echo(f"  {line[-1]}")


def _cells(job: Mapping[str, Any]) -> tuple[str, ...]:
    exit_code, accuracy = job["exit_code"], (job["result"] or {}).get("accuracy")
    return (
        job["job"],
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job["started"])),
        job["state"],
        "" if exit_code is None else str(exit_code),
        "" if accuracy is None else f"{accuracy:.4f}",
        str(len(job["hosts"])),
        _shortened(str(job["what"])),
    )


def _shortened(what: str) -> str:
    """Cut what is too long: the end of algorithm and codec, folders in the script, then its end."""
    script, by, how = what.rpartition(" by ") if " by " in what else (what, "", "")
    how = _cut(how, _LONGEST_HOW)
    most = _LONGEST - len(by + how)
    return _cut(script if len(script) <= most else _FOLDERS.sub(".../", script), most) + by + how


def _cut(text: str, most: int) -> str:
    return f"{text[: most - 3]}..." if len(text) > most else text


jobs.commands["prune"] = prune


def _confirmed(count: int) -> bool:
    """Ask whether to remove so many jobs; only "y" and "yes" agree."""
    click.echo(f"Remove {'it' if count == 1 else 'them'}? [y/N]: ", nl=False, err=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
