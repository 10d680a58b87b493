"""`geomx jobs`: the jobs launched from this machine."""

import time
from collections.abc import Mapping
from typing import Any

import click

from geomx_cli.commands._json import json_option, print_json

__all__ = ["jobs"]

JOBS_VERSION = 1
_LONGEST = 48  # characters shown of a script


@click.command()
@json_option
def jobs(json: bool) -> None:
    """List the jobs launched from this machine, newest first.

    No host is contacted: a detached job may have ended since; geomx status JOB queries the hosts. "running" means that
    a geomx process follows the job, "orphaned" that this process was killed.

    \b
    Examples:
      geomx jobs
      geomx status 2026       the job whose name begins with 2026
      geomx stop              the newest running job
    """
    from geomx_cli.core.errors import CheckFailed, InvalidSettings
    from geomx_cli.jobs.store.registry import all_jobs

    known, damaged = [], []
    for job in all_jobs():
        try:
            known.append(job.to_json())
        except (InvalidSettings, CheckFailed) as error:
            damaged.append(error.message)
    if damaged:
        what = f"{len(damaged)} more cannot be read, the newest: " if len(damaged) > 1 else ""
        click.echo(f"warning: {what}{damaged[0]}", err=True)
    if json:
        print_json({"schema_version": JOBS_VERSION, "jobs": known})
    else:
        _print(known)


def _print(known: list[dict[str, Any]]) -> None:
    if not known:
        click.echo("no jobs yet; geomx launch starts one", err=True)
        return
    lines = [("JOB", "STARTED", "STATE", "EXIT", "ACCURACY", "HOSTS", "WHAT"), *map(_cells, known)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        click.echo("  ".join(f"{text:<{width}}" for text, width in zip(line, widths, strict=True)).rstrip())


def _cells(job: Mapping[str, Any]) -> tuple[str, ...]:
    exit_code, accuracy = job["exit_code"], (job["result"] or {}).get("accuracy")
    what = str(job["what"])
    return (
        job["job"],
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job["started"])),
        job["state"],
        "" if exit_code is None else str(exit_code),
        "" if accuracy is None else f"{accuracy:.4f}",
        str(len(job["hosts"])),
        what if len(what) <= _LONGEST else f"{what[: _LONGEST - 3]}...",
    )
