"""A group of commands."""

import click

from geomx_cli.core.errors import UsageError
from geomx_cli.core.nearest import nearest

__all__ = ["SuggestingGroup"]


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
