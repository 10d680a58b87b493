"""`geomx data`: the data sets of the bundled training job."""

import sys

import click

from geomx_cli.commands._json import print_json
from geomx_cli.runtime.training.catalog import DATA_SETS

__all__ = ["Progress", "data"]


@click.group()
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

    directory = (fetching.ensure if existing else fetching.fetch)(name, data_dir, Progress())
    found = {"schema_version": 1, "data": name, "directory": str(directory)}
    if as_json:
        print_json(found)
    else:
        click.echo(str(directory))


class Progress:
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
