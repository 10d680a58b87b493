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
            hint = f"{nearest(args[0], known)} {ctx.command_path} --help explains the commands"
            raise UsageError(f"there is no command {args[0]!r}", hint)
        return super().resolve_command(ctx, args)
