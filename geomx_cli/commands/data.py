"""`geomx data`: the data sets of the bundled training job."""

import sys
from pathlib import Path

import click

from geomx_cli.commands._group import SuggestingGroup
from geomx_cli.commands._inventory import inventory_options, inventory_path, read_inventory, ssh_options
from geomx_cli.commands._json import json_option, print_json
from geomx_cli.core.errors import DoneInPart, UsageError
from geomx_cli.runtime.training.catalog import DATA_SETS

__all__ = ["DownloadProgress", "data"]


@click.group(cls=SuggestingGroup)
def data() -> None:
    """Data sets of the bundled training job."""


@data.command()
@click.argument("name", type=click.Choice(list(DATA_SETS)))
@click.option("--data-dir", default="", metavar="DIR", help="Target directory; by default your data directory.")
@click.option("--existing", is_flag=True, help="Fail if DIR does not exist, instead of creating it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def fetch(name: str, data_dir: str, existing: bool, as_json: bool) -> None:
    """Download a data set, unless it is present, and print its directory."""
    from geomx_cli.runtime.training import fetch as fetching

    directory = (fetching.ensure if existing else fetching.fetch)(name, data_dir, DownloadProgress())
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

    Files are verified by SHA-256 here and there, and appear on a host once all have arrived. geomx launch does the same
    for hosts that have no copy and cannot download one. A host that fails does not stop the others: exit code 7.
    """
    from geomx_cli.hosts import closing, connector, merged
    from geomx_cli.jobs.actions.data import push as pushing
    from geomx_cli.runtime.training import fetch as fetching

    path = inventory_path(hosts, local=local)
    if path is None:
        raise UsageError("there is no inventory, so no other host", "name one with --hosts")
    inventory, ssh = read_inventory(path).inventory, ssh_options(accept_new_host_keys)
    source = fetching.ensure(name, data_dir, DownloadProgress())
    far = [host for host in inventory.hosts if not host.shares_files]
    with closing({host.name: connector(host, sys.executable, ssh) for host in far}) as reached:
        pushed = pushing(name, source, list(reached.values()), data_dir, DownloadProgress())
    if json:
        print_json({"schema_version": 1, "data": name, "directories": pushed.directories})
    else:
        for host, directory in pushed.directories.items():
            click.echo(f"{host}: {directory}")
    if pushed.errors:
        error = merged(pushed.errors)
        raise DoneInPart(str(error), "repeat the command for them") if pushed.directories else error


@data.command(hidden=True)
@click.argument("name", type=click.Choice(list(DATA_SETS)))
@click.option("--data-dir", default="", metavar="DIR", help="Target directory.")
@click.option("--existing", is_flag=True, help="Fail if DIR does not exist, instead of creating it.")
def receive(name: str, data_dir: str, existing: bool) -> None:
    """Receive a data set from `push`, on stdin."""
    from geomx_cli.runtime.training.push import receive as receiving

    click.echo(f"received in {receiving(name, data_dir, sys.stdin.buffer, existing=existing)}")


class DownloadProgress:
    """Reports a download on stderr; in a terminal with a percentage updated in place."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._current = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._terminal and total:
            end = "\n" if done >= total else ""
            click.echo(f"\r{what}: {done / total:4.0%}{end}", err=True, nl=False)
        elif what != self._current:
            click.echo(what, err=True)
        self._current = what
