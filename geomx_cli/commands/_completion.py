"""Answers a shell that completes a `geomx` command line, and the values of arguments that it may complete.

The answer is made from files of this machine alone and without numpy, pydantic or zmq: users wait for it at each Tab.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    shell_complete,
)

__all__ = ["SHELLS", "algorithm_names", "answer", "file_names", "job_ids", "of_processes", "script", "template_names"]

_PROGRAM = "geomx"
_VARIABLE = "_GEOMX_COMPLETE"
_MOST_JOBS = 100
_LARGEST_PLAN = 32 << 20  # bytes

_Items = list[CompletionItem[str]]
_Complete = Callable[[click.Context, click.Parameter, str], _Items]


class _Bash(BashComplete):
    """bash splits `--name=value` into three words."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """See ShellComplete.get_completion_args."""
        args, incomplete = super().get_completion_args()
        return [word for word in args if word != "="], incomplete


class _WholeWords(ShellComplete):
    """zsh and fish replace the whole word `--name=value`."""

    def get_completions(self, args: list[str], incomplete: str) -> _Items:
        """See ShellComplete.get_completions."""
        found = super().get_completions(args, incomplete)
        flag, equals, _ = incomplete.partition("=")
        if equals and flag.startswith("--"):
            for item in found:
                item.value = f"{flag}={item.value}"
        return found


class _Zsh(_WholeWords, ZshComplete):
    pass


class _Fish(_WholeWords, FishComplete):
    def source(self) -> str:
        """See ShellComplete.source. click's script ends a description at its first comma."""
        return super().source().replace('string split ","', 'string split --max 1 ","')


SHELLS: Mapping[str, type[ShellComplete]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}


def answer(group: click.Command, instruction: str) -> int:
    """Print the completions that a shell asks for by `instruction` and the variables of click's scripts. After any
    error nothing is printed, as the user is in the middle of a line.
    """
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere), contextlib.suppress(Exception):
        for name, shell in SHELLS.items():
            add_completion_class(shell, name)
        shell_complete(group, {}, _PROGRAM, _VARIABLE, instruction)
    return 0


def script(group: click.Command, shell: str) -> str:
    """Return the script for a shell: "bash", "zsh" or "fish"."""
    return SHELLS[shell](group, {}, _PROGRAM, _VARIABLE).source()


def job_ids(ctx: click.Context, param: click.Parameter, incomplete: str) -> _Items:
    """Complete the id of a job launched from this machine, newest first; and a command's own subcommands."""
    subcommands = getattr(ctx.command, "commands", {})
    return _starting([*subcommands, *(directory.name for directory in _jobs()[:_MOST_JOBS])], incomplete)


def of_processes(field: str) -> _Complete:
    """Return a function that completes the values of a field of a job's processes: "party", "role" or "host"."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> _Items:
        return _starting(dict.fromkeys(process[field] for process in _processes(_job(ctx))), incomplete)

    return complete


def template_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> _Items:
    """Complete the name of a template of `geomx init`."""
    from geomx_cli.core.starter import templates

    return _starting(templates(), incomplete)


def algorithm_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> _Items:
    """Complete the last of several algorithms with commas between."""
    from geomx_cli.core.plugins import algorithms

    before, comma, _ = incomplete.rpartition(",")
    return _starting((f"{before}{comma}{name}" for name in algorithms()), incomplete)


def file_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> _Items:
    """Let the shell complete the names of files."""
    return [CompletionItem(incomplete, type="file")]


def _starting(values: Iterable[str], incomplete: str) -> _Items:
    return [CompletionItem(value) for value in values if value.startswith(incomplete) and value.isprintable()]


def _job(ctx: click.Context) -> str:
    """Return the argument [JOB]. click leaves it in `args` when the option to be completed has no value yet."""
    return str(ctx.params.get("name") or next(iter(ctx.args), ""))


def _jobs() -> list[Path]:
    """Return the directories of jobs with a plan, newest first."""
    from geomx_cli.core.jobs_folder import jobs_folder

    plans = [(plan.stat().st_mtime, plan.parent) for plan in jobs_folder().glob("*/plan.json")]
    return [directory for _, directory in sorted(plans, reverse=True)]


def _processes(job: str) -> list[dict[str, Any]]:
    """Return the processes in the plan of the newest job whose id begins with `job`."""
    from geomx_cli.core.private import require_private

    directory = next(directory for directory in _jobs() if directory.name.startswith(job))
    require_private(directory)
    path = directory / "plan.json"
    if path.stat().st_size > _LARGEST_PLAN:
        return []
    processes: list[dict[str, Any]] = json.loads(path.read_bytes())["processes"]
    return processes
