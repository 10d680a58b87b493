"""`geomx scale`: go on with other numbers of parties, workers and servers while a job runs."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from geomx_cli.commands._inventory import inventory_options
from geomx_cli.commands._job import chosen, job_argument
from geomx_cli.commands._options import add_options, values
from geomx_cli.commands._resume import NUMBERS, resumed
from geomx_cli.commands.launch import launch
from geomx_cli.core.errors import UsageError
from geomx_cli.core.plugins import table
from geomx_cli.core.units import counted

__all__ = ["scale"]

_OPTIONS = tuple(option for option in table() if option.name in NUMBERS)


@add_options(_OPTIONS)
@click.command()
@job_argument
@inventory_options
@click.option("--detach", is_flag=True, help="Return when all processes of the new job run.")
@click.option(
    "--job-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="A new or empty directory for the new job's logs and events.",
)
def scale(
    name: str, hosts: Path | None, local: bool, accept_new_host_keys: bool, detach: bool, job_dir: Path | None,
    **parameters: Any,
) -> int:  # fmt: skip
    """Give a running job of the bundled network other numbers of parties, workers or servers.

    All workers stop after the same round, and the job's model is saved. A new job goes on from it with the other
    numbers, in the middle of the epoch: each sample is trained on once in an epoch. Options that you leave out keep the
    job's values. On the machines of an inventory, change its numbers and name it by --hosts.

    geomx checks the new numbers before it stops anything. If the new job cannot start for another reason, this command
    says so, and geomx launch --resume with the same options tries again. A geomx launch that follows the old job ends
    with exit code 75. This command follows the new job as geomx launch does, unless you give --detach.

    \b
    Examples:
      geomx scale --parties 3 --detach             the newest running job
      geomx scale 20260729-17 --workers 4
      geomx scale 20260729-17 --hosts more.toml    the parties and workers of another inventory
    """
    from geomx_cli.jobs.actions.stop import stop
    from geomx_cli.jobs.view.waiting import waiting

    job = chosen(name)
    if job.state is not None and job.state.over:
        raise UsageError(f"job {job.id} has ended", f"geomx launch --resume {job.id} goes on with other numbers")
    before = resumed(job.id, (), values(_OPTIONS, parameters), hosts, runs=True)
    if not before.renumbered:
        raise UsageError(f"job {job.id} has these numbers already", "give others, for example --parties 3")
    begun = time.monotonic()
    with waiting(f"stopping the job on {counted(len(job.plan.hosts), 'host')}"):
        report = stop(job, note=lambda text: click.echo(text, err=True))
    if (error := report.error()) is not None:
        raise error
    click.echo(f"job {job.id} has stopped, after {time.monotonic() - begun:.1f} s", err=True)
    words = ["--resume", job.id, *_written(click.get_current_context())]
    with launch.make_context("launch", words, parent=click.get_current_context()) as context:
        status: int = launch.invoke(context)
    return status


def _written(context: click.Context) -> Iterator[str]:
    """Yield this command's options as the user has written them; launch has the same."""
    for parameter in context.command.params:
        name, value = parameter.name or "", context.params.get(parameter.name or "")
        if isinstance(parameter, click.Option) and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            yield from [parameter.opts[0]] if parameter.is_flag else [parameter.opts[0], str(value)]
