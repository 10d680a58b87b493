"""Commands that take a user's script after "--"."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from geomx_cli.commands._completion import file_names
from geomx_cli.commands._options import GroupedCommand
from geomx_cli.core.errors import UsageError

__all__ = ["ScriptCommand", "script_argument"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


def script_argument(complete: Callable[..., Any] = file_names) -> Callable[[_Command], _Command]:
    """Decorator that adds the words after "--" to a command; `complete`: see click.Parameter.shell_complete."""
    return click.argument(
        "script", nargs=-1, type=click.UNPROCESSED, metavar="[-- python train.py ...]", shell_complete=complete
    )


class ScriptCommand(GroupedCommand):
    """Collects the words after "--" in the argument `script`. A script without "--" is rejected with the correct form,
    as its options would be ambiguous.
    """

    allow_interspersed_args = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click.Command.parse_args."""
        given = list(args)
        rest = super().parse_args(ctx, args)
        script = list(ctx.params.get("script", ()))
        before = given[: len(given) - len(script)]
        if script and before[-1:] != ["--"]:
            line = shlex.join([*ctx.command_path.split(), *before, "--", *_command(script)])
            raise UsageError('the command of the script goes after "--"', f"write: {line}")
        return rest


def _command(words: list[str]) -> list[str]:
    """Return a script's command as probably intended."""
    words = [word for word in words if word != "--"]
    return ["python", *words] if words and Path(words[0]).suffix == ".py" else words
