"""`geomx init`: the files to begin with."""

import shlex
from pathlib import Path

import click

__all__ = ["init"]


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False), default=Path())
def init(directory: Path) -> None:
    """Write an inventory and a training script to begin with.

    hosts.toml and train.py go to DIRECTORY, by default the working directory; what is there already is left as it is.
    """
    from geomx_cli.inventory_file import starter

    for path, new in starter.write(directory):
        click.echo(f"{'wrote' if new else 'kept '} {path}")
    enter = "" if directory == Path() else f"  cd {shlex.quote(str(directory))}\n"
    click.echo(
        f"next:\n{enter}"
        "  edit hosts.toml\n"
        "  geomx hosts check                          finds mistakes in it\n"
        "  geomx doctor                               checks the machines and the network\n"
        "  geomx launch -- python train.py            trains on these machines\n"
        "  geomx launch --local -- python train.py    trains on this machine alone"
    )
