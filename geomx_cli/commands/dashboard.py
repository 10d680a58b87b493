"""`geomx dashboard`: live view of a job in a web page on this machine."""

import click

from geomx_cli.commands._exports import Exports, export_options
from geomx_cli.commands._job import chosen, job_argument

__all__ = ["dashboard"]


@click.command()
@job_argument
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, metavar="NUMBER",
    help="Port on this machine's loopback.  [default: the port of the job's last dashboard, or a free one]",
)  # fmt: skip
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
@export_options
def dashboard(name: str, port: int, opens: bool, exports: Exports) -> None:
    """Show a job live in a web page: parties and their traffic, accuracy, loss, throughput, waiting times, errors,
    logs, options and the use of hosts.

    The page can show other jobs for comparison. The job may run or have finished: geomx reads its event logs from the
    hosts. The page is served on this machine's loopback interface, and its URL contains the token for access. Ctrl-C
    ends the dashboard, and the job continues. If you start a dashboard of the same job again, an open page reconnects.

    \b
    Examples:
      geomx dashboard
      geomx dashboard 20260729-17 --open
      geomx dashboard --tensorboard runs --metrics-port 9600
    """
    from geomx_cli.observe.dashboard.job_model import JobModel
    from geomx_cli.observe.dashboard.server import show

    def show_url(url: str) -> None:
        click.echo(url)
        over = job.state is not None and job.state.over
        click.echo(f"Ctrl-C ends the dashboard{'' if over else '; the job goes on'}", err=True)

    job = chosen(name)
    model = JobModel(job.plan, job.started)
    status = ""
    try:
        exports.open(model.progress, job.plan.spec.options, replays=True)
        status = show(job, model, port, opens=opens, on_url=show_url, on_event=exports.on_event)
    finally:
        exports.close(status)
