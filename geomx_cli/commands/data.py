"""`geomx data`: the data sets of the bundled job."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from geomx_cli.commands._command import SuggestingGroup, json_option, print_json
from geomx_cli.commands._inventory import inventory_options, inventory_path, read_inventory, ssh_options
from geomx_cli.commands._job import Duration
from geomx_cli.core.errors import CheckFailed, DoneInPart, UsageError
from geomx_cli.datasets.catalog import DATA_SETS

if TYPE_CHECKING:
    from geomx_cli.datasets.fetch import Progress

__all__ = ["data", "download_progress"]


@click.group(cls=SuggestingGroup)
def data() -> None:
    """Data sets of the bundled job."""


@data.command()
@click.argument("name", type=click.Choice(list(DATA_SETS)))
@click.option("--data-dir", default="", metavar="DIR", help="Target directory.  [default: your data directory]")
@click.option("--existing", is_flag=True, help="Fail if DIR does not exist, instead of creating it.")
@click.option(
    "--limit", type=Duration(1, 86400), default="15m", show_default=True, metavar="DURATION",
    help="Longest time of the download; a number alone is seconds.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def fetch(name: str, data_dir: str, existing: bool, limit: float, as_json: bool) -> None:
    """Download a data set, unless it is present, and print its directory."""
    from geomx_cli.datasets import fetch as fetching

    with download_progress(f"looking for {name}") as progress:
        directory = (fetching.ensure if existing else fetching.fetch)(name, data_dir, progress, limit)
    found = {"schema_version": 1, "data": name, "directory": str(directory)}
    if as_json:
        print_json(found)
    else:
        click.echo(str(directory))


@data.command()
@click.argument("name", type=click.Choice(list(DATA_SETS)))
@inventory_options
@click.option("--data-dir", default="", metavar="DIR", help="Directory of the data set, here and on the hosts.")
@json_option
def push(
    name: str, hosts: Path | None, local: bool, accept_new_host_keys: bool, data_dir: str, json: bool
) -> None:
    """Send this machine's copy of a data set to all other hosts of the inventory.

    Both machines verify the SHA-256 of all files. The files appear on a host when all have arrived. Hosts with a
    verified copy are skipped: "(present)". geomx launch does the same for hosts that have no copy and cannot download
    one. If a host fails, the others continue, and the exit code is 7.
    """
    from geomx_cli.datasets import fetch as fetching
    from geomx_cli.hosts import closing, connector, merged
    from geomx_cli.jobs.actions.data import push as pushing

    path = inventory_path(hosts, local=local)
    if path is None:
        raise UsageError("there is no inventory, so no other host", "name one with --hosts")
    inventory, ssh = read_inventory(path).inventory, ssh_options(accept_new_host_keys)
    far = [host for host in inventory.hosts if not host.shares_files]
    with download_progress(f"looking for {name}") as progress:
        source = fetching.ensure(name, data_dir, progress)
        with closing({host.name: connector(host, sys.executable, ssh) for host in far}) as reached:
            pushed = pushing(name, source, list(reached.values()), data_dir, progress)
    if json:
        directories, present = pushed.directories, sorted(pushed.present)
        print_json({"schema_version": 1, "data": name, "directories": directories, "present": present})
    else:
        for host, directory in pushed.directories.items():
            click.echo(f"{host}: {directory}{' (present)' if host in pushed.present else ''}")
    if pushed.errors:
        error = merged(pushed.errors)
        raise DoneInPart(str(error), "repeat the command for them") if pushed.directories else error


@data.command(hidden=True)
@click.argument("name", type=click.Choice(list(DATA_SETS)))
@click.option("--data-dir", default="", metavar="DIR", help="Target directory.")
@click.option("--existing", is_flag=True, help="Fail if DIR does not exist, instead of creating it.")
@click.option("--check", is_flag=True, help="Receive nothing; tell where the data set is, exit code 5: nowhere.")
def receive(name: str, data_dir: str, existing: bool, check: bool) -> None:
    """Receive a data set from `push`, on stdin. Prints {"directory"}, the set's."""
    from geomx_cli.datasets.fetch import receive as receiving

    if check:
        from geomx_cli.datasets.fetch import verified

        found = verified(name, data_dir)
        if found is None:
            raise CheckFailed(f"there is no verified {name}", "geomx data push sends it")
    else:
        found = receiving(name, data_dir, sys.stdin.buffer, existing=existing)
    print_json({"directory": str(found)})


@contextmanager
def download_progress(what: str) -> "Iterator[Progress]":
    """Within, report a download on stderr: a line for each step, and of one that takes longer than 2 s how far it is.
    `what` is done before the first step.
    """
    from geomx_cli.jobs.view.waiting import waiting

    begun = ""
    with ExitStack() as stack:
        set_status = stack.enter_context(waiting(what))

        def on_progress(step: str, done: int, total: int) -> None:
            nonlocal begun, set_status
            if step != begun:
                stack.close()  # erases the line of the step before
                click.echo(step, err=True)
                set_status, begun = stack.enter_context(waiting(step)), step
            if total:
                set_status(f"{step}: {done / total:.0%}")

        yield on_progress
