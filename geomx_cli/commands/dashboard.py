"""`geomx dashboard`: live view of a job in a web page on this machine."""

import click

from geomx_cli.commands._exports import Exports, export_options
from geomx_cli.commands._job import chosen, job_argument

__all__ = ["dashboard"]


@click.command()
@job_argument
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, metavar="NUMBER",
    help="Port of this machine's loopback.  [default: that of the job's last dashboard, or a free one]",
)  # fmt: skip
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
@export_options
def dashboard(name: str, port: int, opens: bool, exports: Exports) -> None:
    """Show a job live in a web page: parties and their traffic, accuracy, loss, throughput, waiting times, errors,
    logs, options and the use of hosts; other jobs beside this one.

    Works for running and finished jobs, from this machine alone: event logs are read in the same way as by geomx logs.
    The page is served on this machine's loopback interface, and its URL contains a token required for access. Ctrl-C
    ends the dashboard; the job continues. An open page reconnects to the next dashboard of its job.

    \b
    Examples:
      geomx dashboard
      geomx dashboard 20260729-17 --open
      geomx dashboard --tensorboard runs --metrics-port 9600
    """
    from geomx_cli.observe.dashboard.job_model import JobModel
    from geomx_cli.observe.dashboard.show import show

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
