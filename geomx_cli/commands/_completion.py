"""Answers a shell that completes a `geomx` command line, and the values of arguments that it may complete.

The answer is made from files of this machine alone and without numpy, msgspec or zmq: users wait for it at each Tab.
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

__all__ = [
    "SHELLS",
    "algorithm_names",
    "answer",
    "command_names",
    "figure_names",
    "file_names",
    "group_names",
    "job_ids",
    "jobs_or_folders",
    "modes_of_records",
    "networks_of_records",
    "of_processes",
    "script",
    "template_names",
]

GROUP_NAMES = ("algo", "seed", "lr", "codec", "args", "topology", "job")
"""The usual settings to group by."""

FIGURES = (
    "accuracy", "accuracy-niid", "bytes", "loss", "validation-loss",
    "throughput", "traffic", "computing", "timeline", "matrix", "metric"
)  # fmt: skip
"""The figures of `geomx draw`, or the beginnings of their names."""

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


def jobs_or_folders(ctx: click.Context, param: click.Parameter, incomplete: str) -> _Items:
    """Complete the id of a job; a word that begins none may be a folder of records."""
    return job_ids(ctx, param, incomplete) or [CompletionItem(incomplete, type="dir")]


def of_processes(field: str) -> _Complete:
    """Return a function that completes the values of a field of a job's processes: "party", "role" or "host"."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> _Items:
        return _starting(dict.fromkeys(process[field] for process in _processes(_job(ctx))), incomplete)

    return complete


def template_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> _Items:
    """Complete the name of a template of `geomx init`."""
    from geomx_cli.core.starter import templates

    return _starting(templates(), incomplete)


def command_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> _Items:
    """Complete the next word of a command's name."""
    from geomx_cli.commands._manual import subcommands

    found = ctx.find_root()
    for word in ctx.params.get("words") or ():
        found = subcommands(found).get(word, ctx)
    return _starting(subcommands(found), incomplete)


def algorithm_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> _Items:
    """Complete the last of several algorithms with commas between."""
    from geomx_cli.core.plugins import algorithms

    return _last_of(algorithms(), incomplete)


def group_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> _Items:
    """Complete the last of several settings that reports group by: options, and what else runs differ in."""
    from geomx_cli.core.plugins import table

    options = sorted(option.name.replace("_", "-") for option in table())
    return _open(_last_of((*GROUP_NAMES, *(name for name in options if name not in GROUP_NAMES)), incomplete))


def figure_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> _Items:
    """Complete the last of several names of figures."""
    return _open(_last_of(FIGURES, incomplete))


def networks_of_records(ctx: click.Context, param: click.Parameter, incomplete: str) -> _Items:
    """Complete the name of a network or script in the folder that --base names."""
    return _starting(_folders(ctx.params.get("base")), incomplete)


def modes_of_records(ctx: click.Context, param: click.Parameter, incomplete: str) -> _Items:
    """Complete a mode of the chosen network, or without one of any, in the folder that --base names."""
    base, network = ctx.params.get("base"), ctx.params.get("network")
    networks = [network] if network else _folders(base)
    return _starting(sorted({mode for name in networks for mode in _folders(base, name)}), incomplete)


def _folders(base: Path | None, *inner: str) -> list[str]:
    """Return the names of the folders in one, except hidden ones and that of figures."""
    if base is None:
        return []
    found = Path(base, *inner).iterdir()
    return sorted(path.name for path in found if path.is_dir() and path.name != "figures" and path.name[0] != ".")


def _open(found: _Items) -> _Items:
    """Offer a comma after an only word too: shells end an only answer with a space, after which no other can follow."""
    return [*found, *(CompletionItem(f"{item.value},") for item in found)] if len(found) == 1 else found


def _last_of(names: Iterable[str], incomplete: str) -> _Items:
    """Complete the last word of a list with commas."""
    before, comma, _ = incomplete.rpartition(",")
    given = before.split(",")
    return _starting((f"{before}{comma}{name}" for name in names if name not in given), incomplete)


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
    from geomx_cli.core.files import require_private

    directory = next(directory for directory in _jobs() if directory.name.startswith(job))
    require_private(directory)
    path = directory / "plan.json"
    if path.stat().st_size > _LARGEST_PLAN:
        return []
    processes: list[dict[str, Any]] = json.loads(path.read_bytes())["processes"]
    return processes
