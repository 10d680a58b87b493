"""`geomx doctor`: check the hosts and the network before a job."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from geomx_cli.commands._command import ScriptCommand, json_option, print_json, script_argument
from geomx_cli.commands._inventory import DEFAULT_FILE, inventory_options, inventory_path, machines, ssh_options
from geomx_cli.commands._job import job_spec
from geomx_cli.commands._options import add_options, values
from geomx_cli.core.plugins import table
from geomx_cli.core.units import counted

if TYPE_CHECKING:
    from geomx_cli.preflight import Measured, Report

__all__ = ["doctor"]

_WIDTH = 120


@add_options(table())
@inventory_options
@click.command("doctor", cls=ScriptCommand)
@click.option("--quick", is_flag=True, help="Run only the checks of geomx launch.")
@json_option
@script_argument()
def doctor(
    script: tuple[str, ...],
    hosts: Path | None,
    local: bool,
    accept_new_host_keys: bool,
    quick: bool,
    json: bool,
    **parameters: Any,
) -> int:
    """Check the hosts and the network before a job.

    Checks each host (reachability, geomx, Python, modules, clock, disk, memory, GPUs), and binds the ports that a job
    would use. Connects over every link from the host that will use it, and measures the links between parties. Leaves
    nothing behind. Without an inventory it checks this machine, or the nodes of the Slurm allocation in which it runs.

    The exit code is 0 if there are no problems (warnings do not count), 3 if the script cannot be run, 4 if a host
    cannot be reached, and 5 for any other problem.
    """
    inventory, options = machines(hosts, local, values(table(), parameters))
    is_here = all(host.is_here for host in inventory.hosts)
    if is_here and not local and inventory_path(hosts, local=local) is None:
        click.echo(f"no {DEFAULT_FILE} in this folder: checking this machine only; geomx init writes one", err=True)
    from geomx_cli.jobs.store.script import check_script, ignored_interpreter, with_interpreter
    from geomx_cli.preflight import examine_inventory

    check_script(script, inventory)
    if warning := ignored_interpreter(script, inventory):
        click.echo(f"warning: {warning}", err=True)
    report = examine_inventory(
        with_interpreter(script, inventory),
        job_spec(script, options),
        ssh_options(accept_new_host_keys),
        full=not quick,
        say=lambda text: click.echo(text, err=True),
    )
    if json:
        print_json(report.to_json(), indent=2)
    else:
        _show(report)
    return report.exit_code


def _show(report: "Report") -> None:
    from rich.console import Console
    from rich.text import Text

    from geomx_cli.plan.automatic_topology import topology_line

    # Output other than to a terminal has a fixed width, whatever the size of the parent's terminal.
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    wrong = sorted(
        (check for check in report.checks if check.level != "ok"), key=lambda check: check.level != "problem"
    )
    for check in wrong:  # not in a table, so that fingerprints and commands can be copied
        style = "red" if check.level == "problem" else "yellow"
        console.print(Text(check.level, style), Text(f"{check.subject}, {check.name}: {check.what}"), soft_wrap=True)
        console.print(Text(f"  {check.fix}"), soft_wrap=True)
    if report.inventory.topology_reason:
        console.print(Text(topology_line(report.inventory)), soft_wrap=True)
    if report.wan:
        console.print(_links(report.wan))
    levels = [check.level for check in report.checks]
    counts = (counted(levels.count(level), level) for level in ("warning", "problem"))
    hosts = counted(len(report.inventory.hosts), "host")
    console.print(f"{counted(len(levels), 'check')} of {hosts}: {levels.count('ok')} ok, {', '.join(counts)}")


def _links(measured: "Sequence[Measured]") -> Any:
    from rich.table import Table

    shown = Table("from", "to", "address")
    for name in ("round trip", "Mbit/s there", "Mbit/s back"):
        shown.add_column(name, justify="right")
    for link in measured:
        rates = [f"{rate / 1e6:.0f}" if rate >= 1e7 else f"{rate / 1e6:.2g}" for rate in (link.there, link.back)]
        trip = f"{link.round_trip * 1e3:.1f} ms"
        shown.add_row(link.dialler, link.listener, f"{link.address}:{link.port}", trip, *rates)
    return shown
