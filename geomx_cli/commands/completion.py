"""`geomx completion`: the script by which a shell completes geomx's command lines."""

import click

from geomx_cli.commands._completion import SHELLS, script

__all__ = ["completion"]


@click.command()
@click.argument("shell", type=click.Choice(list(SHELLS)))
def completion(shell: str) -> None:
    """Print a script for the completion of commands, options and their values, jobs, parties and hosts in a shell.

    \b
    bash (4.4 or newer), in ~/.bashrc:
      eval "$(geomx completion bash)"
    zsh, in ~/.zshrc, after compinit:
      eval "$(geomx completion zsh)"
    fish:
      geomx completion fish > ~/.config/fish/completions/geomx.fish
    """
    group = click.get_current_context().find_root().command
    click.echo(script(group, shell))
