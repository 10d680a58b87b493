"""`geomx logs`: the output of a job's processes; `geomx logs collect`: all logs in one folder."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from geomx_cli.commands._command import json_option, print_json
from geomx_cli.commands._completion import of_processes
from geomx_cli.commands._job import ParentCommand, chosen, folder_option, job_argument
from geomx_cli.commands._report import MOST_REPORTED
from geomx_cli.core.errors import DoneInPart, Interrupted, UsageError
from geomx_cli.core.standard_streams import has_reader
from geomx_cli.core.units import counted, format_bytes, some_of

if TYPE_CHECKING:
    from geomx_cli.observe.report.collected import Layout

__all__ = ["logs"]

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")


@click.command(cls=ParentCommand)
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Follow until the job has ended, or Ctrl-C.")
@click.option("--party", default="", metavar="NAME", shell_complete=of_processes("party"), help="Only this party.")
@click.option("--host", default="", metavar="NAME", shell_complete=of_processes("host"), help="Only this host.")
@click.option(
    "--role", default="", metavar="ROLE", shell_complete=of_processes("role"),
    help="Only this role: worker, server, global_server, ...",
)  # fmt: skip
@click.option("--rank", type=int, default=None, metavar="NUMBER", help="Only this rank in its role.")
@click.option(
    "-n", "--lines", type=click.IntRange(0), default=None, metavar="LINES", help="Only the last lines of each process."
)
def logs(name: str, follow: bool, party: str, host: str, role: str, rank: int | None, lines: int | None) -> int:
    """Print the output of a job's processes from all its hosts; each line begins with the name of the process.

    Exit code 7 means that a host could not be reached; the lines of the other hosts are printed. Exit code 130 means
    Ctrl-C. For whole files and event logs see geomx logs collect -h.

    \b
    Examples:
      geomx logs                              all output of the newest job
      geomx logs -f --role worker -n 10
      geomx logs 20260729-17 --party B --role server --rank 0
    """
    try:
        _print(name, (party, host, role, rank), -1 if lines is None else lines, follow=follow)
    except KeyboardInterrupt:
        if not follow:
            raise
        return Interrupted.exit_code  # and no error: this is how following ends
    return 0


def _print(name: str, which: tuple[str, str, str, int | None], count: int, *, follow: bool) -> None:
    """Print the last `count` lines of each process, -1 for all, and with `follow` new ones. which: see `select`."""
    from geomx_cli.jobs.actions.logs import LogReader, select

    job = chosen(name)
    processes = select(job.plan, *which)
    colours = {process.name: _COLOURS[index % len(_COLOURS)] for index, process in enumerate(processes)}
    reader = LogReader(job, processes)
    is_empty = True
    try:
        for line in reader.follow(count) if follow else reader.read(count):
            is_empty = False
            click.echo(f"{click.style(f'{line.process} |', fg=colours[line.process])} {line.text}")
            if not has_reader():
                return
        problems = dict(reader.problems)
    finally:
        reader.close()
    if problems:
        texts = "; ".join(f"host {host}: {problem}" for host, problem in problems.items())
        raise DoneInPart(f"not all logs could be read: {texts}", "the output of the others is above")
    if is_empty and count:
        over = job.state is not None and job.state.over
        hint = "" if job.plan.spec.script else "; geomx status shows how they train"
        click.echo(f"the processes have printed nothing{'' if over else ' yet'}{hint}", err=True)


@click.command()
@job_argument
@folder_option()
@click.option(
    "--layout", type=click.Choice(["runs", "esync"]), default="runs", show_default=True,
    help="runs: a folder for each job. esync: ESync's layout, with room for one job of each network and mode.",
)  # fmt: skip
@click.option("--replace", is_flag=True, help="With --layout esync: replace another job's records.")
@json_option
def collect(name: str, folder: Path, layout: "Layout", replace: bool, json: bool) -> None:
    """Collect the logs, event logs and agents' logs of all hosts of a job, and the records of its workers' rounds.

    geomx transfers files compressed, verifies them, and writes them to DIR/JOB, with a list in manifest.json. It writes
    the records to DIR/NETWORK/MODE/JOB/HOST/DEVICE.jsonl, for geomx summarize, draw and compare. MODE is the algorithm
    (dcasgd if the optimizer compensates for delay), with the suffix -niid unless --split is iid. With --layout esync
    the records are in DIR/NETWORK/MODE/HOST/DEVICE/iter-1.txt, iter-2.txt, ..., as the tools of ESync expect.

    geomx lists outputs, such as the model, but does not copy them: see geomx fetch.

    The job may still run. If you collect again, the current files replace the previous ones. Exit code 7 means that a
    host could not be reached, or that a record is damaged; geomx has collected the other files.

    \b
    Examples:
      geomx logs collect --to results
      geomx logs collect 20260729-17 --to results --json
    """
    from geomx_cli.jobs.view.waiting import waiting
    from geomx_cli.observe.report.collected import collect as collecting

    if replace and layout != "esync":
        raise UsageError("--replace is for --layout esync", "leave it out: each job has a folder of its own")
    job = chosen(name)
    with waiting(f"collecting from {counted(len(job.plan.hosts), 'host')}") as set_status:
        manifest = collecting(job, folder.resolve(), layout=layout, overwrite=replace, say=set_status)
    if json:
        print_json(manifest)
    else:
        size = sum(entry["size"] for entry in manifest["files"])
        click.echo(f"{len(manifest['files'])} files, {format_bytes(size)} in {manifest['folder']}")
        if manifest["records"]:
            click.echo(f"records in {manifest['records']}")
        for line in _outputs(manifest):
            click.echo(line)
    if manifest["problems"]:
        texts = [f"host {one['host']}: {one['problem']}" for one in manifest["problems"]]
        hint = "collect again into the same folder when the hosts can be reached"
        raise DoneInPart(f"partially collected: {some_of(texts, MOST_REPORTED)}", hint)


def _outputs(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about what the job has saved."""
    found = manifest["outputs"]
    if found:
        yield f"saved by its processes; geomx fetch {manifest['job']} --to DIR brings it:"
    for one in found[:MOST_REPORTED]:
        yield f"  {one['process']}  {one['name']}  {format_bytes(one['size'])}  on {one['host']}"
    if len(found) > MOST_REPORTED:
        yield f"  and {counted(len(found) - MOST_REPORTED, 'more file')}"


logs.commands["collect"] = collect
