"""`geomx stop`: end a job, or one party of it, and clean up."""

from typing import TYPE_CHECKING

import click

from geomx_cli.commands._command import json_option, print_json
from geomx_cli.commands._completion import of_processes
from geomx_cli.commands._job import Duration, job_argument
from geomx_cli.core.units import counted

if TYPE_CHECKING:
    from geomx_cli.jobs.actions.stop import HostStop

__all__ = ["stop"]


@click.command()
@job_argument
@click.option(
    "--party", default="", metavar="NAME", shell_complete=of_processes("party"), help="End only this party's processes."
)
@click.option(
    "--grace",
    type=Duration(0.0, 86_400.0),
    default=None,
    metavar="DURATION",
    help="How long scripts may take to save and end before they are killed; a number alone is seconds."
    "  [default: the job's --grace]",
)
@json_option
def stop(name: str, party: str, grace: float | None, json: bool) -> None:
    """Stop a job on all its hosts, clean up, and report on each process.

    You can repeat the command, and use it after a launch or an agent was killed. The command leaves no process, key
    file or socket of the job, and touches no process of another job. If the job has ended on all its hosts, the command
    says so.

    If all processes of the job save their state, the command first takes a checkpoint, from which geomx launch --resume
    continues (see docs/how-to/resume.md). Scripts that call should_stop(), and the bundled job, stop after the same
    step in all workers, and save. Other workers receive SIGTERM. When no worker runs any more, schedulers and servers
    receive SIGTERM. A process that does not end within the grace period receives SIGKILL.

    If you stop one party, the command takes no checkpoint, and the other parties end as after a failure. If a launch
    still runs its checks, this launch counts as the newest job, and the command ends it. Exit code 7 means that a host
    could not be reached, or that a process could not be ended.

    \b
    Examples:
      geomx stop                       the newest running job
      geomx stop 20260729-17 --grace 1m
      geomx stop --party B             the processes of party B; the other parties notice
    """
    from geomx_cli.jobs.actions.stop import end_launch
    from geomx_cli.jobs.actions.stop import stop as stopping
    from geomx_cli.jobs.store.registry import find, in_preparation
    from geomx_cli.jobs.view.waiting import waiting

    if not party and (found := in_preparation(name)) is not None:
        click.echo(f"job {found[0]} is still being prepared; ending its launch", err=True)
        report = end_launch(*found)
    else:
        job = find(name)
        if not name and not (job.state is not None and job.state.clean):
            click.echo(f"job {job.id}", err=True)
        with waiting(f"ending processes on {counted(len(job.plan.hosts), 'host')}"):
            report = stopping(job, party=party, grace=grace, note=lambda text: click.echo(text, err=True))
    if json:
        print_json(report.to_json())
    elif report.ended:
        click.echo(f"job {report.job} has ended already ({report.ended}); nothing of it runs")
    elif report.hosts and not any(host.did or host.others or host.problem or host.note for host in report.hosts):
        click.echo(f"job {report.job}: nothing of it was running on {counted(len(report.hosts), 'host')}")
    else:
        for host in report.hosts:
            _print(host)
    if report.checkpoint is not None and not json:
        click.echo(f"geomx launch --resume {report.job} goes on from the checkpoint that was taken before")
    if (error := report.error()) is not None:
        raise error


def _print(host: "HostStop") -> None:
    fates = {**(host.processes or {}), "agent": host.agent}
    if host.problem and host.processes is None:
        click.echo(f"{host.host}: {host.problem}")
        return
    width = max(map(len, fates))
    click.echo(f"{host.host}:")
    for process, fate in fates.items():
        click.echo(f"  {process:<{width}}  {fate}")
    if host.others:
        click.echo(f"  {host.others} of their child processes were killed")
    if host.note:
        click.echo(f"  {host.note}")
