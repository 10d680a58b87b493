"""`geomx status`: how a job goes, process by process."""

import sys
import time
from typing import TYPE_CHECKING

import click

from geomx_cli.commands._job import chosen, job_argument
from geomx_cli.commands._json import print_json

if TYPE_CHECKING:
    from geomx_cli.jobs.store.registry import KnownJob
    from geomx_cli.jobs.view.job_view import JobView

__all__ = ["status"]

_EVERY = 1.0  # seconds
_WIDTH = 160  # columns where there is no terminal


@click.command()
@job_argument
@click.option("--watch", is_flag=True, help="Show it again and again until the job has ended, or Ctrl-C.")
@click.option("--json", is_flag=True, help="Print one JSON object instead of text.")
def status(name: str, watch: bool, json: bool) -> None:
    """Show how a job goes, process by process, as its hosts know it now.

    JOB is a job's name, the beginning of one, or its directory; without it the newest that runs is meant. Looking
    changes nothing: whoever follows the job goes on. Exit code 7: a host could not be reached; the others are shown.

    \b
    Examples:
      geomx status
      geomx status --watch
      geomx status 20260729-17 --json
    """
    if watch and json:
        raise click.UsageError("--watch shows a table; take either it or --json")
    from geomx_cli.core.errors import DoneInPart

    job = chosen(name)
    overview = _watch(job) if watch else _look(job)
    if overview.over:
        overview.conclude()
    if json:
        print_json(overview.to_json())
    else:
        _print(overview)
    if overview.unreachable:
        texts = [f"host {one.host}: {one.problem}" for one in overview.unreachable]
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
            overview = JobView.of(job, hosts)
            try:
                while not overview.over:
                    view.show(overview.progress)
                    time.sleep(_EVERY)
                    overview = JobView.of(job, hosts)
            except KeyboardInterrupt:  # the way out
                pass
            return overview
    finally:
        view.close()


def _print(overview: "JobView") -> None:
    from rich.console import Console

    from geomx_cli.core.units import counted, format_duration
    from geomx_cli.jobs.view.explanation import explain
    from geomx_cli.jobs.view.table import ProcessTable

    job = overview.job
    since = format_duration(max(0.0, time.time() - job.started))
    hosts = f"{len(job.plan.processes)} processes on {counted(len(job.plan.hosts), 'host')}"
    click.echo(f"job {job.plan.job}: {overview.state}; started {since} ago; {hosts}")
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDTH).print(ProcessTable(overview.progress))
    for one in overview.hosts.values():
        if one.problem and one.reachable:
            click.echo(f"host {one.host}: {one.problem}")
    if overview.stopped_by:
        click.echo(f"it was stopped by {overview.stopped_by}")
    elif overview.failure is not None:
        error = explain(overview.failure, job.plan, job.job())
        click.echo(f"{error.message}\n  {error.hint}")
