"""`geomx man`: manual pages."""

import shutil
import subprocess
import sys
from pathlib import Path

import click

from geomx_cli.commands import _commands_reference
from geomx_cli.commands._completion import command_names
from geomx_cli.commands._manual import page, pages, subcommands
from geomx_cli.core.errors import CheckFailed, UsageError
from geomx_cli.core.option import nearest

__all__ = ["man"]


@click.command()
@click.argument("words", nargs=-1, metavar="[COMMAND]", shell_complete=command_names)
@click.option(
    "-o",
    "--to",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write the pages of all commands to this directory.",
)
@click.option("--markdown", is_flag=True, hidden=True, help="Print docs/reference/commands.md.")
def man(words: tuple[str, ...], folder: Path | None, markdown: bool) -> None:
    """Show the manual page of a command, or write all pages to a directory.

    In a terminal, man shows the page. Otherwise the source of the page, in roff, goes to stdout.

    \b
    Examples:
      geomx man launch
      geomx man logs collect
      geomx man --to ~/.local/share/man/man1     then: man geomx-launch
    """
    ctx = click.get_current_context().find_root()
    if markdown:
        click.echo(_commands_reference.page(ctx), nl=False)
        return
    if folder is not None:
        if words:
            raise UsageError("--to writes the pages of all commands", f"leave out {' '.join(words)}")
        _write(dict(pages(ctx)), folder)
        return
    for word in words:
        known = subcommands(ctx)
        if word not in known:
            raise UsageError(f"{ctx.command_path} has no command {word!r}", nearest(word, known))
        ctx = known[word]
    text, viewer = page(ctx), shutil.which("man")
    if sys.stdout.isatty() and viewer:
        subprocess.run([viewer, "-l", "-"], input=text, text=True, check=False)
    else:
        click.echo(text, nl=False)


def _write(texts: dict[str, str], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckFailed(f"cannot write to {folder}: {error.strerror}", "name another directory") from None
    click.echo(f"{len(texts)} pages in {folder}")
