"""Commands that take a user's script after "--"."""

import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from geomx_cli.commands._completion import file_names
from geomx_cli.commands._options import GroupedCommand
from geomx_cli.core.errors import UsageError
from geomx_cli.core.option import nearest

__all__ = ["ScriptCommand", "SuggestingGroup", "json_option", "print_json", "script_argument"]

# A group of commands.


class SuggestingGroup(click.Group):
    """Reports an unknown command with the nearest known one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """See click.Group.resolve_command. Raises UsageError."""
        known = self.list_commands(ctx)
        if not (ctx.resilient_parsing or args[0].startswith("-") or args[0] in known):
            hidden = {name for name, command in self.commands.items() if command.hidden}
            hint = nearest(args[0], (name for name in known if name not in hidden))
            how = f"{ctx.command_path} --help explains the commands"
            raise UsageError(f"there is no command {args[0]!r}", f"{hint}{' ' if hint.endswith('?') else '; '}{how}")
        return super().resolve_command(ctx, args)


# JSON output of commands: with --json, exactly one object on stdout.

json_option = click.option("--json", is_flag=True, help="Print one JSON object instead of text.")


def print_json(value: Any, indent: int | None = None) -> None:
    """Print standard JSON: NaN and infinity, such as a diverged loss, become null."""
    click.echo(json.dumps(_finite(value), indent=indent, allow_nan=False))


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {name: _finite(item) for name, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
    return value


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
