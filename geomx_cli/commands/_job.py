"""Common parts of commands on a job: the argument, and the default job."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from geomx_cli.commands._command import print_json
from geomx_cli.commands._completion import job_ids
from geomx_cli.core.errors import InvalidSettings, UsageError
from geomx_cli.core.option import nearest
from geomx_cli.core.options import Value
from geomx_cli.core.units import format_duration, parse_duration

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from geomx_cli.inventory import Inventory
    from geomx_cli.jobs.store.registry import KnownJob
    from geomx_cli.jobs.view.result import Conclusion
    from geomx_cli.plan import JobSpec

__all__ = [
    "Duration", "ParentCommand", "chosen", "folder_option", "job_argument", "job_spec", "report", "with_rank_scope",
]  # fmt: skip

# The job of a command, from its options and script.

_PASSED_ON = ("PYTHONPATH", "OMP_NUM_THREADS")


def job_spec(
    script: tuple[str, ...], options: Mapping[str, Value], *, job: str = "", job_dir: str = ""
) -> "JobSpec":
    """Return the job, with this Python and the variables of this environment that processes here get."""
    from geomx_cli.plan import JobSpec

    env = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return JobSpec(job=job, options=options, script=script, job_dir=job_dir, python=sys.executable, env=env)


def with_rank_scope(
    inventory: "Inventory", script: tuple[str, ...], options: Mapping[str, Value]
) -> "tuple[Inventory, dict[str, Value]]":
    """Return the inventory with the rank scope for the script, which is said on stderr with the reason if it is not
    obvious, and the options with its framework.
    """
    from msgspec import structs

    from geomx_cli.jobs.store import rank_scope
    from geomx_cli.plan.automatic_topology import with_topology

    chosen = rank_scope.choose(str(options["rank_scope"]), script, str(options["algo"]), inventory)
    if chosen.sentence:
        click.echo(chosen.sentence, err=True)
    framework = {"framework": chosen.framework} if chosen.framework else {}
    inventory = with_topology(structs.replace(inventory, rank_scope=chosen.scope))
    return inventory, {**options, **framework, "topology": inventory.topology}


# Output of launch and attach at the end: the job's result on stdout, its error raised.

def report(end: "Conclusion", *, json: bool) -> int:
    """Print the result, as a summary or one JSON object; return 0, or raise the end's error."""
    from geomx_cli.jobs.view.result import in_words

    if json and end.result:
        print_json(end.result)
    elif end.result and (words := in_words(end.result)):
        click.echo(words)
    if end.error is not None:
        raise end.error
    return 0


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest click
    """Seconds, written as "10s" or "2m", from `least` to `most`; `bare`: also as a number alone."""

    name = "duration"

    def __init__(self, least: float, most: float, *, bare: bool = True) -> None:
        self._least, self._most, self._bare = least, most, bare

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See click.ParamType.convert."""
        try:
            seconds = value if isinstance(value, float) else parse_duration(value)
        except InvalidSettings as error:
            self.fail(f"{error.message}; {error.hint}", param, ctx)
        if not self._bare and isinstance(value, str) and value.strip()[-1:].isdecimal():
            number = value.strip()
            self.fail(f"{value!r} has no unit; write {number}s, {number}h or {number}d", param, ctx)
        if not self._least <= seconds <= self._most:
            least, most = format_duration(self._least), format_duration(self._most)
            self.fail(f"{value} is not from {least} to {most}", param, ctx)
        return seconds


class ParentCommand(click.Command):
    """A command that has others beside it, as `logs [JOB]` and `logs collect ...`; they are added to `commands`, as
    of a click.Group.
    """

    def __init__(self, *args: Any, **parameters: Any) -> None:
        super().__init__(*args, **parameters)
        self.commands: dict[str, click.Command] = {}

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """See click.Command.make_context."""
        if args and (other := self.commands.get(args[0])) is not None:
            return other.make_context(f"{self.name} {args[0]}", args[1:], parent=parent, **extra)
        takes_words = any(isinstance(parameter, click.Argument) for parameter in self.params)
        if args and not takes_words and not args[0].startswith("-") and not extra.get("resilient_parsing"):
            hint = nearest(args[0], self.commands)
            how = f"geomx {self.name} --help explains its usage"
            raise UsageError(f"there is no command {args[0]!r}", f"{hint}{' ' if hint.endswith('?') else '; '}{how}")
        return super().make_context(info_name, args, parent=parent, **extra)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem[str]]":
        """Return the matching commands beside this one, and its options."""
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=command.get_short_help_str())
            for name, command in self.commands.items() if name.startswith(incomplete)
        ]  # fmt: skip
        return [*found, *super().shell_complete(ctx, incomplete)]


def job_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that adds the argument [JOB] to a command, as `name`."""
    return click.argument("name", default="", metavar="[JOB]", shell_complete=job_ids)(function)


def folder_option(default: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that adds the option --to DIR (-o) to a command, as `folder`; it is required without a `default`."""
    # To click a default of None is a value, and nothing is missing then.
    usual: dict[str, Any] = {"default": default, "show_default": True} if default else {"required": True}
    return click.option(
        "-o", "--to", "folder", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
        help="Target folder; may already contain other jobs.", **usual,
    )  # fmt: skip


def chosen(name: str) -> "KnownJob":
    """Return the job `name`; without a name the newest running job, else the newest, reported on stderr."""
    from geomx_cli.jobs.store.registry import find

    job = find(name)
    if not name:
        click.echo(f"job {job.id}", err=True)
    return job
