"""`geomx attach`: follow a job again."""

import click

from geomx_cli.commands._command import json_option
from geomx_cli.commands._job import chosen, job_argument, report

__all__ = ["attach"]


@click.command()
@job_argument
@json_option
def attach(name: str, json: bool) -> int:
    """Attach to a job that is detached or whose launch has exited.

    The output, summary and exit code are the same as with geomx launch. If the job has ended, the summary is printed at
    once. For a job launched with --detach, Ctrl-C detaches again and the job continues; geomx stop ends it. Ctrl-C
    stops any other job.

    \b
    Examples:
      geomx attach                 the newest running job
      geomx attach 20260729-17
    """
    from geomx_cli.jobs.actions.attach import attach as attaching

    return report(attaching(chosen(name)), json=json)
