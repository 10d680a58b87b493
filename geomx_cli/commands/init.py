"""`geomx init`: starter files."""

import shlex
from pathlib import Path

import click

from geomx_cli.commands._completion import template_names
from geomx_cli.core.errors import UsageError

__all__ = ["init"]


class _Init(click.Command):
    """Its help lists the templates."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See click.Command."""
        from geomx_cli.core import starter

        with formatter.section("Templates"):
            formatter.write_dl(list(starter.summaries().items()))


@click.command(cls=_Init)
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False), default=Path())
@click.option(
    "--template", metavar="NAME", shell_complete=template_names, help="Write one of the scripts below instead."
)
@click.option("--force", is_flag=True, help="Overwrite an existing script.")
def init(directory: Path, template: str | None, force: bool) -> None:
    """Write a starter inventory and training script.

    Writes hosts.toml and train.py to DIRECTORY, by default the working directory. Does not change existing files.
    """
    from geomx_cli.core import starter
    from geomx_cli.datasets.catalog import DATA_SETS

    enter = "" if directory == Path() else f"  cd {shlex.quote(str(directory))}\n"
    if template is not None:
        path, command = starter.write_template(directory, template, force=force)
        script = path.read_text()
        data = next((name for name in DATA_SETS if f'"{name}"' in script), "fashion-mnist")
        click.echo(
            f"wrote {path}\nnext:\n{enter}"
            f"  geomx data fetch {data}    on every machine that trains, or\n"
            f"  geomx data push {data}     from here to all machines of the inventory\n"
            f"  {command}"
        )
        return
    if force:
        raise UsageError("--force goes with --template", "hosts.toml and train.py are never overwritten")
    for path, new in starter.write(directory):
        click.echo(f"{'wrote' if new else 'kept '} {path}")
    click.echo(
        f"next:\n{enter}"
        "  edit hosts.toml\n"
        "  geomx hosts check                          finds mistakes in it\n"
        "  geomx data fetch fashion-mnist             downloads the data that train.py uses\n"
        "  geomx data push fashion-mnist              copies them to the other machines\n"
        "  geomx doctor -- python train.py            checks the machines and the network\n"
        "  geomx launch -- python train.py            trains on these machines\n"
        "  geomx launch --local -- python train.py    trains on this machine alone"
    )
