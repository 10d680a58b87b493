"""`geomx status`: the status of a job, process by process."""

import sys
import time
from typing import TYPE_CHECKING

import click

from geomx_cli.commands._command import json_option, print_json
from geomx_cli.commands._job import chosen, job_argument

if TYPE_CHECKING:
    from geomx_cli.jobs.store.registry import KnownJob
    from geomx_cli.jobs.view.job_view import JobView

__all__ = ["status"]

_EVERY = 1.0  # seconds
_WIDTH = 160  # columns if stdout is not a terminal


@click.command()
@job_argument
@click.option("--watch", is_flag=True, help="Refresh until the job has ended, or Ctrl-C.")
@click.option("--parties", is_flag=True, help="Show subtotals of each party instead of processes.")
@json_option
def status(name: str, watch: bool, parties: bool, json: bool) -> None:
    """Show the current status of a job, process by process or by party.

    JOB is a job's name, the beginning of the name, or the job's directory. The default is the newest running job. The
    command is read-only: it does not affect a process that follows the job. Exit code 7 means that a host could not be
    reached; the processes of the other hosts are shown.

    \b
    Examples:
      geomx status
      geomx status --watch
      geomx status --parties
      geomx status 20260729-17 --json
    """
    if watch and json:
        raise click.UsageError("--watch shows a table; take either it or --json")
    from geomx_cli.core.errors import DoneInPart
    from geomx_cli.jobs.store.registry import find, in_preparation

    job = chosen(name) if watch else find(name)  # otherwise the output begins with the job's name
    if not name and (preparing := in_preparation()) is not None:
        click.echo(f"a launch is still preparing job {preparing[0]}; this is an earlier one", err=True)
    job_view = _watch(job, parties=parties) if watch else _look(job)
    if job_view.over:
        job_view.conclusion()
    if json:
        print_json(job_view.to_json(by_party=parties))
    else:
        _print(job_view, parties=parties)
    if job_view.unreachable:
        texts = [f"host {one.host}: {one.problem}" for one in job_view.unreachable]
        raise DoneInPart(f"not all hosts can be reached: {'; '.join(texts)}", "what the others say is above")


def _look(job: "KnownJob") -> "JobView":
    from geomx_cli.core.units import counted
    from geomx_cli.hosts import closing
    from geomx_cli.jobs.view.job_view import JobView
    from geomx_cli.jobs.view.waiting import waiting

    with closing(job.open_hosts()) as hosts, waiting(f"asking {counted(len(hosts), 'host')}"):
        return JobView.of(job, hosts)


def _watch(job: "KnownJob", *, parties: bool) -> "JobView":
    from geomx_cli.hosts import closing
    from geomx_cli.jobs.view.follow import view_for
    from geomx_cli.jobs.view.job_view import JobView
    from geomx_cli.jobs.view.table import PartyTable, ProcessTable

    view = view_for(PartyTable if parties else ProcessTable)
    try:
        with closing(job.open_hosts()) as hosts:
            job_view = JobView.of(job, hosts)
            try:
                while not job_view.ended:
                    view.show(job_view.progress)
                    time.sleep(_EVERY)
                    job_view = JobView.of(job, hosts)
            except KeyboardInterrupt:  # ends watching
                pass
            return job_view
    finally:
        view.close()


def _print(job_view: "JobView", *, parties: bool) -> None:
    from rich.console import Console

    from geomx_cli.core.units import format_duration
    from geomx_cli.jobs.view.table import PartyTable, ProcessTable

    table = PartyTable if parties else ProcessTable
    job = job_view.job
    since = format_duration(max(0.0, time.time() - job.started))
    hosts = f"{len(job.plan.processes)} processes on {job.plan.where}"
    click.echo(f"job {job.plan.job}: {job_view.state}; started {since} ago; {job.what}; {hosts}")
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDTH).print(table(job_view.progress))
    not_there = job_view.over or job_view.begins  # agents have gone, or are about to start
    for one in job_view.hosts.values():
        if one.problem and one.reachable and not (one.agent == "not started" and not_there):
            click.echo(f"host {one.host}: {one.problem}")
    for warning in job_view.progress.totals().warnings:
        click.echo(f"warning: {warning}")
    if job_view.verdict:
        click.echo(job_view.verdict)
    if job_view.over and (line := job_view.outputs_line):
        click.echo(line)
