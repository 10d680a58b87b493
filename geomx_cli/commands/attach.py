"""`geomx attach`: follow a job again."""

import click

from geomx_cli.commands._end import tell
from geomx_cli.commands._job import chosen, job_argument

__all__ = ["attach"]


@click.command()
@job_argument
@click.option("--json", is_flag=True, help="Print one JSON object instead of text.")
def attach(name: str, json: bool) -> int:
    """Attach to a job that is detached or whose launch has exited.

    It shows what launch shows and ends as launch does, with the same summary and exit code; a job that has ended
    meanwhile is summed up at once. Ctrl-C lets go of a detached job again, which goes on (end it with geomx stop); a
    job that was not detached is stopped by Ctrl-C, as by launch.

    \b
    Examples:
      geomx attach                 the newest job that runs
      geomx attach 20260729-17
    """
    from geomx_cli.jobs.actions.attach import attach as attaching

    return tell(attaching(chosen(name)), json=json)
