"""The command line: `geomx COMMAND ...`.

Command modules are imported on use, so that `geomx --help` is fast. Only this module turns an error into text on
stderr, or with --json into an object on stdout, and an exit status.
"""

import importlib
import io
import itertools
import json
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import click

from geomx_cli import __version__
from geomx_cli.commands._command import SuggestingGroup
from geomx_cli.core.errors import CheckFailed, GeomxError, InternalError, Interrupted, UsageError
from geomx_cli.core.option import did_you_mean, nearest
from geomx_cli.core.standard_streams import Stdout, lossy_stderr, watched

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = ["COMMANDS", "ERROR_VERSION", "geomx", "main"]

ERROR_VERSION = 1
_ONE_DASH = re.compile(r"-[a-z][a-z-]+(=.*)?", re.DOTALL)

COMMANDS: Mapping[str, tuple[str, str]] = {
    "attach": ("geomx_cli.commands.attach", "Attach to a job that is detached or whose launch has exited."),
    "compare": ("geomx_cli.commands.compare", "Compare jobs: time, bytes, accuracy, throughput."),
    "dashboard": ("geomx_cli.commands.dashboard", "Show a job live in a web page on this machine."),
    "completion": ("geomx_cli.commands.completion", "Print the script that completes command lines in a shell."),
    "data": ("geomx_cli.commands.data", "Fetch the data sets of the bundled job, or send them to hosts."),
    "doctor": ("geomx_cli.commands.doctor", "Check the hosts and the network before a job."),
    "draw": ("geomx_cli.commands.draw", "Draw the figures of a network from its jobs' records."),
    "fetch": ("geomx_cli.commands.fetch", "Fetch what a job has saved, such as its model, from its hosts."),
    "hosts": ("geomx_cli.commands.hosts", "Check an inventory file and show what will run where."),
    "init": ("geomx_cli.commands.init", "Write a starter inventory and training script."),
    "jobs": ("geomx_cli.commands.jobs", "List the jobs that were launched from here."),
    "launch": ("geomx_cli.commands.launch", "Start a training job, watch it and wait for its end."),
    "logs": ("geomx_cli.commands.logs", "Print what a job's processes write, or collect it."),
    "man": ("geomx_cli.commands.man", "Show the manual page of a command."),
    "scale": ("geomx_cli.commands.scale", "Give a running job other numbers of parties, workers or servers."),
    "status": ("geomx_cli.commands.status", "Show the status of a job, process by process."),
    "stop": ("geomx_cli.commands.stop", "Stop a job, or one party of it, and clean up."),
    "summarize": ("geomx_cli.commands.summarize", "Summarise the records of a job."),
    "sweep": ("geomx_cli.commands.sweep", "Run jobs of several algorithms and seeds, and compare them."),
}
"""Each command's module, whose attribute of the same name is the command, and its line in `geomx --help`."""


class _LazyGroup(SuggestingGroup):
    """A command group that lists COMMANDS and imports a command's module on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return cast(click.Command, getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem[str]]":
        """Return the matching commands and flags."""
        from click.shell_completion import CompletionItem

        found = [CompletionItem(name, help=line) for name, (_, line) in COMMANDS.items() if name.startswith(incomplete)]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"geomx {__version__}")
        ctx.exit()


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version.",
)
def geomx() -> None:
    """Train one model over several data centres joined by slow, unreliable wide-area links."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `geomx` with `arguments`, by default the process's; return the exit status (see errors.py).

    If a command with --json fails before it has printed its object, it prints an object with the error. Output to a
    closed pipe (such as to `head`) or terminal is dropped, and does not change the status. Messages that stderr refuses
    are dropped too.
    """
    if instruction := os.environ.get("_GEOMX_COMPLETE"):
        return _complete(instruction)
    given = sys.argv[1:] if arguments is None else list(arguments)
    words = given[: given.index("--")] if "--" in given else given
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files, and LANG=C, have what cannot be encoded
            stream.reconfigure(errors="backslashreplace")
    with lossy_stderr(), watched(sys.stdout) as output:
        try:
            status = _run(given, output, json_wanted="--json" in words)
            output.flush()
            return status
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            return _say(CheckFailed(f"stdout cannot be written: {why}", "make room, or send the output elsewhere"))
        finally:
            if output.broken is not None:
                output.give_up()


def _complete(instruction: str) -> int:
    """Answer a shell that completes a command line."""
    from geomx_cli.commands._completion import answer

    return answer(geomx, instruction)


def _run(given: Sequence[str], output: Stdout, *, json_wanted: bool) -> int:
    """Run a command, report its error, and return the exit status. Raises OSError if stdout cannot be written."""
    try:
        if given[-1:] == ["--"]:
            raise UsageError("nothing follows --", "write the script's command after it, or leave it out")
        _check_dashes(given)
        status = geomx.main(list(given), prog_name="geomx", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.exceptions.NoArgsIsHelpError as wrong:
        print(wrong.format_message(), file=sys.stderr)
        return UsageError.exit_code
    except click.ClickException as wrong:
        failed: GeomxError = _usage_error(wrong, given)
        _say(failed)
    except (click.Abort, KeyboardInterrupt):
        failed = Interrupted("interrupted")
        _say(failed)
    except GeomxError as error:
        failed = error
        _say(failed)
    except Exception:
        if output.broken is not None:
            raise output.broken from None
        traceback.print_exc()
        failed = InternalError(
            "this is a bug in geomx, not in your settings",
            "please report it to its maintainers with the lines above and the output of geomx --version",
        )
        _say(failed)
    if json_wanted and not output.used:
        fields = {"message": failed.message, "hint": failed.hint, "exit_code": failed.exit_code}
        print(json.dumps({"schema_version": ERROR_VERSION, "error": fields}))
    return failed.exit_code


def _check_dashes(given: Sequence[str]) -> None:
    """Refuse a long option with one dash, which click reads as several of one letter. Raises UsageError."""
    words = list(itertools.takewhile(lambda word: word != "--", given))
    single = [word for word in words if _ONE_DASH.fullmatch(word)]
    if not single:
        return
    command: click.Command = geomx
    context = click.Context(command)
    path = "geomx"
    for word in words:
        if isinstance(command, click.Group):
            found = command.get_command(context, word)
        else:
            found = getattr(command, "commands", {}).get(word)
        if found is not None:
            command, context, path = found, click.Context(found, context), f"{path} {word}"
    known = {name for each in command.get_params(context) for name in (*each.opts, *each.secondary_opts)}
    for word in single:
        name = word.partition("=")[0]
        if f"-{name}" in known:
            hint = f"did you mean -{name}? {path} --help explains its usage"
            raise UsageError(f"there is no option {name}", hint)


def _usage_error(wrong: click.ClickException, given: Sequence[str]) -> UsageError:
    """Return click's error about the words `given` as one of ours."""
    context = wrong.ctx if isinstance(wrong, click.UsageError) else None
    usage = f"{context.command_path} --help explains its usage" if context else ""
    if context and isinstance(wrong, click.NoSuchOption):
        known = [name for each in context.command.get_params(context) for name in (*each.opts, *each.secondary_opts)]
        name = _as_typed(wrong.option_name, given)
        close = did_you_mean(name, (name for name in known if name.startswith("-")))
        return UsageError(f"there is no option {name}", " ".join(filter(None, (close, usage))))
    if isinstance(wrong, click.MissingParameter) and wrong.param and isinstance(wrong.param.type, click.Choice):
        choices = ", ".join(map(str, wrong.param.type.choices))
        return UsageError(f"{wrong.param.human_readable_name} is missing", f"choose one of {choices}")
    if isinstance(wrong, click.BadParameter) and wrong.param and isinstance(wrong.param.type, click.Choice):
        word = wrong.message.partition(" is not one of ")[0].strip("'")
        flag = f"{wrong.param.opts[0]}: " if isinstance(wrong.param, click.Option) else ""
        return UsageError(f"{flag}there is no {word!r}", nearest(word, map(str, wrong.param.type.choices)))
    message = wrong.format_message().strip().removesuffix(".").replace("a valid integer range", "a whole number")
    message = message.replace("a valid float range", "a number")
    return UsageError(message[:1].lower() + message[1:], usage)


def _as_typed(option: str, given: Sequence[str]) -> str:
    """Return the word that click has read as the unknown `option`: of -epochs it names -e."""
    if option.startswith("--"):
        return option
    return next((word for word in given if word.startswith(option)), option)


def _say(error: GeomxError) -> int:
    from geomx_cli.core.untrusted import plain

    hint = f"\n  {error.hint}" if error.hint else ""
    print(f"error: {plain(error.message + hint)}", file=sys.stderr)
    return error.exit_code
