"""`geomx launch --resume`: what a job is to run that goes on from another one's checkpoint."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from geomx_cli.commands._inventory import given_machines, machines_again, other_machines, reshaped
from geomx_cli.core.errors import InvalidSettings, UsageError
from geomx_cli.core.options import Value
from geomx_cli.core.stores import is_url

if TYPE_CHECKING:
    from geomx_cli.inventory import Inventory
    from geomx_cli.jobs.store.registry import KnownJob
    from geomx_cli.jobs.store.stored_job import StoredJob

__all__ = ["NUMBERS", "Resumed", "resumed"]

_MAY_CHANGE = {
    "checkpoint_every", "checkpoint_to", "grace", "patience", "restarts", "save_every", "silence", "time_limit",
    "timeout",
}  # fmt: skip
"""Options that change nothing of what is kept."""
NUMBERS = {
    "central_workers", "epochs", "global_servers", "local_servers", "parties", "slowdown", "topology", "workers",
}  # fmt: skip
"""Options with which a bundled job goes on from the model that another one has saved, not from a checkpoint."""


@dataclass(frozen=True)
class Resumed:
    """The job, and the script, options and machines that it had, or the others that the user has given.

    renumbered: whether it goes on with other numbers of parties, workers, servers or epochs.
    """

    job: "KnownJob | StoredJob"
    script: tuple[str, ...]
    options: dict[str, Value]
    inventory: "Inventory"
    renumbered: bool = False


def resumed(
    name: str, script: tuple[str, ...], given: Mapping[str, Value], hosts: Path | None, *, runs: bool = False
) -> Resumed:
    """Return what a job has run: `name` is its id or directory, or the folder or URL of its --checkpoint-to. given:
    options of this command. hosts: its inventory file, for a job whose machines may be lost. runs: whether the job may
    still run.

    Raises InvalidSettings for an unknown job, and one that runs if that may not be; UsageError for a script and options
    that differ.
    """
    from geomx_cli.jobs.store.registry import KnownJob

    job = _find(name, runs=runs)
    if isinstance(job, KnownJob):
        had, ran, is_here = job.plan.spec.options, job.plan.spec.script, set(job.plan.here) == set(job.plan.hosts)
    else:
        had, ran, is_here = job.options, job.script, job.is_here
    is_here = is_here and _is_of_no_file(job.inventory)
    if script and script != ran:
        what = " ".join(ran) or "the bundled training"
        raise UsageError(f"job {job.id} has run {what}", "leave the script out, as --resume runs what that job has run")
    options, renumbered = _options(job.id, had, given)
    others = given_machines(job.inventory) if isinstance(job, KnownJob) else other_machines(hosts, job.inventory)
    if renumbered or (isinstance(job, KnownJob) and others is not None):
        if not isinstance(job, KnownJob) or ran:
            what = "a job whose directory is lost" if not ran else "a script"
            hint = "leave out the options of numbers; other numbers are for bundled jobs launched from this machine"
            raise UsageError(f"{what} goes on with the numbers that it had", hint)
        return _renumbered(job, options, others, is_here=is_here)
    if not isinstance(job, KnownJob) and others is not None:
        return Resumed(job, ran, options, others)
    if not isinstance(job, KnownJob) and job.withheld:
        names = ", ".join(job.withheld)
        what = f"the checkpoint of job {job.id} lacks the values of the inventory's env: {names}"
        raise InvalidSettings(what, "give the inventory: --hosts FILE")
    # Others may have the ports now.
    inventory = _this_machine(options) if is_here else machines_again(job.inventory)
    return Resumed(job, ran, options, inventory)


def _renumbered(
    job: "KnownJob", options: dict[str, Value], others: "Inventory | None", *, is_here: bool
) -> Resumed:
    """Return the job with other numbers. others: the machines that the user has named."""
    had = job.plan.spec.options
    counts_change = any(options[name] != had[name] for name in ("parties", "workers", "central_workers"))
    if counts_change and not is_here and others is None:
        hint = "give one with the new numbers: --hosts FILE"
        raise UsageError(f"job {job.id} ran on the machines of an inventory, which has its numbers", hint)
    if options["party_loss"] == "out":  # which may have been chosen for the old numbers
        options["party_loss"] = "auto"
    own = _this_machine(options) if is_here else machines_again(job.inventory)
    inventory, options = reshaped(others or own, options)
    same = all(options[name] == had[name] for name in ("epochs", "topology", "slowdown"))
    if same and _processes(inventory, options) == {process.name for process in job.plan.processes}:
        what = f"job {job.id} has the same processes as the inventory, and goes on where it ran"
        raise UsageError(what, "leave out --hosts, or give other numbers, for example --epochs")
    return Resumed(job, (), options, inventory, renumbered=True)


def _is_of_no_file(inventory: "Inventory") -> bool:
    """Whether geomx has made this inventory of one machine by the options, as without a file."""
    from geomx_cli.plan.this_machine import party_name

    named = [party.name for party in inventory.parties] == [party_name(n) for n in range(len(inventory.parties))]
    plain = not any(host.env or host.state_dir or host.workdir or host.sockets for host in inventory.hosts)
    return named and plain and not inventory.links and len({party.workers for party in inventory.parties}) == 1


def _this_machine(options: Mapping[str, Value]) -> "Inventory":
    from geomx_cli.hosts.ports import free_ports
    from geomx_cli.plan.ports import ports_needed
    from geomx_cli.plan.this_machine import this_machine

    return this_machine(options, free_ports(ports_needed(options)))


def _processes(machines: "Inventory", options: Mapping[str, Value]) -> set[str]:
    """Return the names of the processes that a job has on these machines."""
    from geomx_cli.plan import JobSpec, plan
    from geomx_cli.plan.job_spec import complete
    from geomx_cli.plan.ports import choose

    planned = plan(choose(machines, None), complete(JobSpec(options=options)))
    return {process.name for process in planned.processes}


def _find(name: str, *, runs: bool) -> "KnownJob | StoredJob":
    """Return the job. Raises InvalidSettings if there is none, or it runs and may not."""
    from geomx_cli.jobs.store.registry import UnknownJob, find
    from geomx_cli.jobs.store.stored_job import find_stored

    known, stored = None, None
    try:
        known = None if is_url(name) else find(name)
    except UnknownJob:
        if not Path(name).is_dir():
            raise
    if known is None:
        stored = find_stored(name, lambda text: click.echo(text, err=True))
        with suppress(InvalidSettings):  # its directory is lost, or of another machine
            known = find(stored.id)
    if known is not None and not runs:
        state = known.state
        if state is not None and not state.over and known.state_shown != "orphaned":
            raise InvalidSettings(f"job {known.id} has not ended", f"geomx stop {known.id} ends it")
    found = stored or known
    assert found is not None
    return found


def _options(job: str, had: Mapping[str, Value], given: Mapping[str, Value]) -> tuple[dict[str, Value], bool]:
    """Return the options that a job had, with those of this command that may change, and whether some of these are
    numbers. Raises UsageError for others.
    """
    context = click.get_current_context()
    options, renumbered = dict(had), False
    for option, value in given.items():
        written = context.get_parameter_source(option) in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
        if not written or value == options.get(option):
            continue
        if option not in _MAY_CHANGE | NUMBERS:
            flag = "--" + option.replace("_", "-")
            raise UsageError(f"{flag} with --resume: job {job} has other values", f"leave {flag} out")
        renumbered |= option in NUMBERS
        options[option] = value
    return options, renumbered
