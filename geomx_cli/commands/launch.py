"""`geomx launch`: start a training job, watch it and wait for its end."""

import json as json_module
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from geomx_cli.commands._options import GroupedCommand, add_options, values
from geomx_cli.commands._plan_text import plan_text
from geomx_cli.inventory import free_ports, ports_needed, this_machine
from geomx_cli.options import Value
from geomx_cli.plan import JobSpec, plan
from geomx_cli.plugins import table

__all__ = ["command"]

_PASSED_ON = ("PYTHONPATH", "OMP_NUM_THREADS")


@add_options(table())
@click.command("launch", cls=GroupedCommand)
@click.option("--dry-run", is_flag=True, help="Print what would be started, and start nothing.")
@click.option("--json", is_flag=True, help="Print one JSON object instead of text.")
@click.option(
    "--job-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for the job's logs and events; by default a new one in ./geomx-jobs.",
)
@click.argument("script", nargs=-1, type=click.UNPROCESSED, metavar="[-- python train.py ...]")
def command(script: tuple[str, ...], dry_run: bool, json: bool, job_dir: Path | None, **parameters: Any) -> int:
    """Start a training job, watch it and wait for its end.

    Without an inventory everything runs on this machine: a central party and the participating ones, over
    loopback. Every worker runs the script behind "--"; without one it trains the bundled network.
    """
    options = values(table(), parameters)
    inventory = this_machine(options, free_ports(ports_needed(options)))
    spec = _spec(options, script, job_dir)
    if not dry_run:
        from geomx_cli.launch import launch

        return launch(inventory, spec, json=json)
    found = plan(inventory, spec)
    click.echo(json_module.dumps(found.to_json(), indent=2) if json else plan_text(found))
    return 0


def _spec(options: Mapping[str, Value], script: tuple[str, ...], job_dir: Path | None) -> JobSpec:
    token = secrets.token_hex(3)
    job = f"{time.strftime('%Y%m%d-%H%M%S')}-{token}"
    directory = (job_dir or Path("geomx-jobs") / job).absolute()
    return JobSpec(
        job=job,
        options=options,
        script=script,
        job_dir=str(directory),
        socket_dir=str(Path(tempfile.gettempdir()) / f"geomx-{token}"),
        key_dir=str(directory / "keys"),
        python=sys.executable,
        env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
    )
