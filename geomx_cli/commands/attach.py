"""`geomx attach`: follow a job again."""

import click

from geomx_cli.commands._conclusion import report
from geomx_cli.commands._job import chosen, job_argument
from geomx_cli.commands._json import json_option

__all__ = ["attach"]


@click.command()
@job_argument
@json_option
def attach(name: str, json: bool) -> int:
    """Attach to a job that is detached or whose launch has exited.

    Shows the same output as launch and ends in the same way, with the same summary and exit code; for a job that has
    ended meanwhile, prints its summary at once. Ctrl-C detaches again from a detached job, which continues to run (end
    it with geomx stop); any other job is stopped by Ctrl-C, as by launch.

    \b
    Examples:
      geomx attach                 the newest running job
      geomx attach 20260729-17
    """
    from geomx_cli.jobs.actions.attach import attach as attaching

    return report(attaching(chosen(name)), json=json)
