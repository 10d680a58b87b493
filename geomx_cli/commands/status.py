"""`geomx status`: the status of a job, process by process."""

import sys
import time
from typing import TYPE_CHECKING

import click

from geomx_cli.commands._job import chosen, job_argument
from geomx_cli.commands._json import json_option, print_json

if TYPE_CHECKING:
    from geomx_cli.jobs.store.registry import KnownJob
    from geomx_cli.jobs.view.job_view import JobView

__all__ = ["status"]

_EVERY = 1.0  # seconds
_WIDTH = 160  # columns if stdout is not a terminal


@click.command()
@job_argument
@click.option("--watch", is_flag=True, help="Refresh until the job has ended, or Ctrl-C.")
@json_option
def status(name: str, watch: bool, json: bool) -> None:
    """Show the current status of a job, process by process.

    JOB is a job's name, a prefix of one, or its directory; the default is the newest running job. The command is
    read-only: it does not affect a process that follows the job. Exit code 7: a host could not be reached; the others
    are shown.

    \b
    Examples:
      geomx status
      geomx status --watch
      geomx status 20260729-17 --json
    """
    if watch and json:
        raise click.UsageError("--watch shows a table; take either it or --json")
    from geomx_cli.core.errors import DoneInPart
    from geomx_cli.jobs.store.registry import find

    job = chosen(name) if watch else find(name)  # otherwise the output begins with the job's name
    job_view = _watch(job) if watch else _look(job)
    if job_view.over:
        job_view.conclude()
    if json:
        print_json(job_view.to_json())
    else:
        _print(job_view)
    if job_view.unreachable:
        texts = [f"host {one.host}: {one.problem}" for one in job_view.unreachable]
        raise DoneInPart(f"not all hosts can be reached: {'; '.join(texts)}", "what the others say is above")


def _look(job: "KnownJob") -> "JobView":
    from geomx_cli.hosts import closing
    from geomx_cli.jobs.view.job_view import JobView

    with closing(job.open_hosts()) as hosts:
        return JobView.of(job, hosts)


def _watch(job: "KnownJob") -> "JobView":
    from geomx_cli.hosts import closing
    from geomx_cli.jobs.view.follow import view_for
    from geomx_cli.jobs.view.job_view import JobView

    view = view_for()
    try:
        with closing(job.open_hosts()) as hosts:
            job_view = JobView.of(job, hosts)
            try:
                while not job_view.over:
                    view.show(job_view.progress)
                    time.sleep(_EVERY)
                    job_view = JobView.of(job, hosts)
            except KeyboardInterrupt:  # ends watching
                pass
            return job_view
    finally:
        view.close()


def _print(job_view: "JobView") -> None:
    from rich.console import Console

    from geomx_cli.core.units import counted, format_duration
    from geomx_cli.jobs.view.failure_report import explain
    from geomx_cli.jobs.view.table import ProcessTable

    job = job_view.job
    since = format_duration(max(0.0, time.time() - job.started))
    hosts = f"{len(job.plan.processes)} processes on {counted(len(job.plan.hosts), 'host')}"
    click.echo(f"job {job.plan.job}: {job_view.state}; started {since} ago; {hosts}")
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDTH).print(ProcessTable(job_view.progress))
    for one in job_view.hosts.values():
        if one.problem and one.reachable:
            click.echo(f"host {one.host}: {one.problem}")
    if job_view.stopped_by:
        click.echo(f"it was stopped by {job_view.stopped_by}")
    elif job_view.failure is not None:
        error = explain(job_view.failure, job.plan)
        click.echo(f"{error.message}\n  {error.hint}")
