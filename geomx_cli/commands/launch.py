"""`geomx launch`: start a training job, watch it and wait for its end."""

import json as json_module
import os
import sys
from pathlib import Path
from typing import Any

import click

from geomx_cli.commands._options import GroupedCommand, add_options, values
from geomx_cli.inventory import Inventory, free_ports, ports_needed, this_machine
from geomx_cli.plan import JobSpec
from geomx_cli.plugins import table

__all__ = ["launch"]

_PASSED_ON = ("PYTHONPATH", "OMP_NUM_THREADS")


@add_options(table())
@click.command("launch", cls=GroupedCommand)
@click.option("--dry-run", is_flag=True, help="Print what would be started, and start nothing.")
@click.option("--json", is_flag=True, help="Print one JSON object instead of text.")
@click.option(
    "--job-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="New directory for the job's logs and events; by default one among all jobs in your home directory.",
)
@click.argument("script", nargs=-1, type=click.UNPROCESSED, metavar="[-- python train.py ...]")
def launch(
    script: tuple[str, ...], dry_run: bool, json: bool, job_dir: Path | None, **parameters: Any
) -> int:
    """Start a training job, watch it and wait for its end.

    Everything runs on this machine, over loopback: a central party and the participating ones. Every worker
    runs the script behind "--"; without one it trains the bundled network.
    """
    options = values(table(), parameters)
    inventory = this_machine(options, free_ports(ports_needed(options)))
    spec = JobSpec(
        options=options,
        script=script,
        job_dir=str(job_dir.absolute()) if job_dir else "",
        python=sys.executable,
        env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
    )
    if dry_run:
        return _show(inventory, spec, json=json)
    from geomx_cli import launch as launching

    if not script:
        from geomx_cli.commands.data import Progress
        from geomx_cli.runtime.training import fetch

        fetch.ensure(str(options["data"]), str(options["data_dir"]), Progress())
    return launching.launch(inventory, spec, json=json)


def _show(inventory: Inventory, spec: JobSpec, *, json: bool) -> int:
    from geomx_cli.commands._plan_text import plan_text
    from geomx_cli.job import Job
    from geomx_cli.plan import plan

    found = plan(inventory, Job.of(spec).complete(spec))
    click.echo(json_module.dumps(found.to_json(), indent=2) if json else plan_text(found))
    return 0
