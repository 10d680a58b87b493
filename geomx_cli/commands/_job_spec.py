"""The job of a command, from its options and script."""

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from geomx_cli.core.options import Value

if TYPE_CHECKING:
    from geomx_cli.inventory import Inventory
    from geomx_cli.plan import JobSpec

__all__ = ["job_spec", "with_rank_scope"]

_PASSED_ON = ("PYTHONPATH", "OMP_NUM_THREADS")


def job_spec(
    script: tuple[str, ...], options: Mapping[str, Value], *, job: str = "", job_dir: str = ""
) -> "JobSpec":
    """Return the job, with this Python and the variables of this environment that processes here get."""
    from geomx_cli.plan import JobSpec

    env = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return JobSpec(job=job, options=options, script=script, job_dir=job_dir, python=sys.executable, env=env)


def with_rank_scope(
    inventory: "Inventory", script: tuple[str, ...], options: Mapping[str, Value]
) -> "tuple[Inventory, dict[str, Value]]":
    """Return the inventory with the rank scope for the script, which is said on stderr with the reason if it is not
    obvious, and the options with its framework.
    """
    from msgspec import structs

    from geomx_cli.jobs.store import rank_scope
    from geomx_cli.plan.automatic_topology import with_topology

    chosen = rank_scope.choose(str(options["rank_scope"]), script, str(options["algo"]), inventory)
    if chosen.sentence:
        click.echo(chosen.sentence, err=True)
    framework = {"framework": chosen.framework} if chosen.framework else {}
    inventory = with_topology(structs.replace(inventory, rank_scope=chosen.scope))
    return inventory, {**options, **framework, "topology": inventory.topology}
