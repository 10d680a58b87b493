"""`geomx logs`: the output of a job's processes; `geomx logs collect`: all logs in one folder."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from geomx_cli.commands._job import chosen, job_argument
from geomx_cli.commands._json import json_option, print_json
from geomx_cli.commands._report import MOST_REPORTED
from geomx_cli.core.errors import DoneInPart
from geomx_cli.core.units import format_bytes

__all__ = ["logs"]

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")


class _Logs(click.Command):
    """`logs [JOB]`, with `logs collect ...` as a separate command."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """See click.Command.make_context."""
        if args[:1] == ["collect"]:
            return collect.make_context("logs collect", args[1:], parent=parent, **extra)
        return super().make_context(info_name, args, parent=parent, **extra)


@click.command(cls=_Logs)
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Follow until the job has ended, or Ctrl-C.")
@click.option("--party", default="", metavar="NAME", help="Only processes of this party.")
@click.option("--role", default="", metavar="ROLE", help="Only this role: worker, server, global_server, ...")
@click.option("--rank", type=int, default=None, metavar="NUMBER", help="Only those with this rank in their role.")
@click.option("-n", "--lines", type=click.IntRange(0), default=None, metavar="LINES", help="Only the last of each.")
def logs(name: str, follow: bool, party: str, role: str, rank: int | None, lines: int | None) -> None:
    """Print the output of a job's processes from all its hosts; each line begins with the process.

    Exit code 7: a host could not be reached; the others' lines are printed. For whole files and event logs see
    geomx logs collect -h.

    \b
    Examples:
      geomx logs                              all output of the newest job
      geomx logs -f --role worker -n 10
      geomx logs 20260729-17 --party B --role server --rank 0
    """
    from geomx_cli.jobs.actions.logs import LogReader, select

    job = chosen(name)
    processes = select(job.plan, party, role, rank)
    colours = {process.name: _COLOURS[index % len(_COLOURS)] for index, process in enumerate(processes)}
    reader = LogReader(job, processes)
    count = -1 if lines is None else lines
    try:
        for line in reader.follow(count) if follow else reader.read(count):
            click.echo(f"{click.style(f'{line.process} |', fg=colours[line.process])} {line.text}")
        problems = dict(reader.problems)
    except KeyboardInterrupt:  # ends following
        problems = {}
    except BrokenPipeError:  # the reader has closed the pipe
        problems = {}
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        reader.close()
    if problems:
        texts = "; ".join(f"host {host}: {problem}" for host, problem in problems.items())
        raise DoneInPart(f"not all logs could be read: {texts}", "the output of the others is above")


@click.command()
@job_argument
@click.option(
    "--to",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="DIR",
    help="Target folder; may already contain other jobs.",
)
@click.option("--replace", is_flag=True, help="Replace another job's records of the same network and mode.")
@json_option
def collect(name: str, folder: Path, replace: bool, json: bool) -> None:
    """Collect the logs, event logs and agents' logs of all hosts of a job, and the records of its workers' rounds.

    Files are transferred compressed, verified, and written to DIR/JOB, with a list in manifest.json. The records are
    written to DIR/NETWORK/MODE/HOST/DEVICE/iter-1.txt, iter-2.txt, ..., for geomx summarize and geomx draw. MODE is
    the algorithm (dcasgd if the optimizer compensates for delay), with the suffix -niid if the workers' data are not
    identically distributed.

    Works while the job runs, and repeatedly: each run replaces the files by their current state. Exit code 7: a host
    could not be reached, or a record is damaged; the files of the others are collected.

    \b
    Examples:
      geomx logs collect --to results
      geomx logs collect 20260729-17 --to results --json
    """
    from geomx_cli.observe.report.collected import collect as collecting

    manifest = collecting(chosen(name), folder.absolute(), overwrite=replace)
    if json:
        print_json(manifest)
    else:
        size = sum(entry["size"] for entry in manifest["files"])
        click.echo(f"{len(manifest['files'])} files, {format_bytes(size)} in {manifest['folder']}")
        if manifest["records"]:
            click.echo(f"records in {manifest['records']}")
    if manifest["problems"]:
        texts = [f"host {one['host']}: {one['problem']}" for one in manifest["problems"]]
        more = f"; and {len(texts) - MOST_REPORTED} more" if len(texts) > MOST_REPORTED else ""
        hint = "collect again into the same folder when the hosts can be reached"
        raise DoneInPart(f"partially collected: {'; '.join(texts[:MOST_REPORTED])}{more}", hint)
