"""`geomx launch --resume`: what a job is to run that goes on from another one's checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from geomx_cli.core.errors import InvalidSettings, UsageError
from geomx_cli.core.options import Value

if TYPE_CHECKING:
    from geomx_cli.inventory import Inventory
    from geomx_cli.jobs.store.registry import KnownJob

__all__ = ["Resumed", "resumed"]

_MAY_CHANGE = {"checkpoint_every", "grace", "patience", "restarts", "save_every", "silence", "time_limit", "timeout"}
"""Options that change nothing of what is kept."""


@dataclass(frozen=True)
class Resumed:
    """The job, and the script, options and machines that it had."""

    job: "KnownJob"
    script: tuple[str, ...]
    options: dict[str, Value]
    inventory: "Inventory"


def resumed(name: str, script: tuple[str, ...], given: Mapping[str, Value]) -> Resumed:
    """Return what job `name` has run. given: options of this command.

    Raises InvalidSettings for an unknown job, and one that runs; UsageError for a script and options that differ.
    """
    from geomx_cli.hosts.ports import free_ports
    from geomx_cli.jobs.store.registry import find
    from geomx_cli.plan.ports import ports_needed

    job = find(name)
    if job.state is not None and not job.state.over and job.state_shown != "orphaned":
        raise InvalidSettings(f"job {job.id} has not ended", f"geomx stop {job.id} ends it")
    had = job.plan.spec
    if script and script != had.script:
        ran = " ".join(had.script) or "the bundled training"
        raise UsageError(f"job {job.id} has run {ran}", "leave the script out, as --resume runs what that job has run")
    context = click.get_current_context()
    options = dict(had.options)
    for option, value in given.items():
        written = context.get_parameter_source(option) in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
        if not written or value == options.get(option):
            continue
        if option not in _MAY_CHANGE:
            flag = "--" + option.replace("_", "-")
            raise UsageError(f"{flag} with --resume: job {job.id} has other values", f"leave {flag} out")
        options[option] = value
    inventory = job.inventory
    if set(job.plan.here) == set(job.plan.hosts):  # others may have the ports now
        from geomx_cli.plan.this_machine import this_machine

        inventory = this_machine(options, free_ports(ports_needed(options)))
    return Resumed(job, had.script, options, inventory)
