"""`geomx sweep`: jobs of several algorithms and seeds, one after another."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from geomx_cli.commands._command import ScriptCommand, print_json, script_argument
from geomx_cli.commands._completion import algorithm_names, file_names
from geomx_cli.commands._inventory import inventory_options, inventory_path, machines, source, ssh_options
from geomx_cli.commands._job import job_spec
from geomx_cli.commands._options import add_options, unused, values
from geomx_cli.commands._report import comma_separated, print_table, progress, report_groups, target_option
from geomx_cli.core.env_names import unknown_variables
from geomx_cli.core.errors import DoneInPart, Interrupted, InvalidSettings, TrainingFailed, UsageError
from geomx_cli.core.plugins import algorithms, find, table
from geomx_cli.core.units import counted

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from geomx_cli.jobs.actions.sweep_jobs import Cell
    from geomx_cli.jobs.store.registry import KnownJob
    from geomx_cli.observe.report.comparison import SweepReport

__all__ = ["sweep"]

_ALGO = "--algo"
_WORDS = "geomx_cli.commands.sweep.words"  # of the command line, for completion
_SHARED = tuple(option for option in table() if option.name != "algo")
_WITH_REPORT = ("report", "target", "json")
_VERSION = 1
_MOST_SEEDS = 1000


class SweepCommand(ScriptCommand):
    """Takes `--algo fsa hfa` as `--algo fsa,hfa`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click.Command.parse_args."""
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[_WORDS] = args[:]
        completes = ctx.resilient_parsing and args[-1:] == [_ALGO]
        if _ALGO in args[:end] and not completes:
            first = args.index(_ALGO) + 1
            last = next((place for place in range(first, end) if args[place].startswith("-")), end)
            args = [*args[:first], ",".join(args[first:last]), *args[last:]]
        return super().parse_args(ctx, args)


def _script_words(ctx: click.Context, param: click.Parameter, incomplete: str) -> "list[CompletionItem[str]]":
    """Complete one more algorithm after --algo, else the name of a file."""
    words = ctx.meta.get(_WORDS, [])
    after = words[words.index(_ALGO) + 1 :] if _ALGO in words else ["-"]
    is_algorithm = not any(word.startswith("-") for word in after)
    return (algorithm_names if is_algorithm else file_names)(ctx, param, incomplete)


@add_options(_SHARED)
@click.command("sweep", cls=SweepCommand)
@click.option(
    _ALGO, "algo", metavar="NAME...", callback=comma_separated, shell_complete=algorithm_names,
    help="The algorithms, such as fsa hfa or fsa,hfa.",
)  # fmt: skip
@click.option(
    "--seeds", type=click.IntRange(1, _MOST_SEEDS), default=3, show_default=True, metavar="NUMBER",
    help="Jobs of each algorithm, with the seeds --seed, --seed + 1, ...",
)  # fmt: skip
@click.option(
    "-o", "--to", "folder", type=click.Path(path_type=Path, file_okay=False), default="sweep", show_default=True,
    metavar="DIR", help="The sweep's folder.",
)  # fmt: skip
@click.option("--restart", is_flag=True, help="Move the sweep's files to DIR/old-..., and start anew.")
@target_option
@click.option("--report", is_flag=True, help="Run nothing: repeat the table and figure of the sweep in --to.")
@click.option("--json", is_flag=True, help="Print one JSON object instead of a table.")
@inventory_options
@click.option(
    "--sync", multiple=True, type=click.Path(path_type=Path),
    help="A file or folder to copy to SSH hosts along with the script; repeatable.",
)  # fmt: skip
@script_argument(_script_words)
def sweep(
    script: tuple[str, ...],
    algo: tuple[str, ...],
    seeds: int,
    folder: Path,
    restart: bool,
    target: float,
    report: bool,
    json: bool,
    hosts: Path | None,
    local: bool,
    accept_new_host_keys: bool,
    sync: tuple[Path, ...],
    **parameters: Any,
) -> int:
    """Run a job for each algorithm and seed, one after another, and compare them.

    Without a script, workers train the bundled network. A script must use the seed in the variable GEOMX_SEED for
    initial weights and the order of samples, as the scripts of geomx init do. geomx does not check this. All other
    options are options of geomx launch, and are the same for all jobs.

    The same command continues an interrupted sweep. It repeats failed jobs, but not jobs that are done. If a job fails,
    the others still run. If the script, the inventory or an option has changed, geomx refuses the sweep, unless you
    give --restart. Files that a script imports count as part of the script if --sync names them. You can add algorithms
    and seeds.

    The records are in DIR/NETWORK/MODE/JOB, and DIR/sweep.json lists the jobs. At the end geomx prints a table (mean
    and standard deviation), and draws one figure to DIR/figures. --json prints one object instead: "schema_version",
    "folder", "target", "jobs" ("algo", "seed", "job", "state", "why", "records"), "groups" as in geomx compare --json,
    "figure" (its path, or null) and "problems". Exit code 7 means that some jobs are not done, or that some records
    could not be collected. Exit code 1 means that no job is done.

    \b
    Examples:
      geomx sweep --algo fsa hfa diloco --seeds 3
      geomx sweep --algo fsa hfa --seeds 5 --wan 50mbit,30ms --to wan -- python train.py
      geomx sweep --to wan --report
    """
    from geomx_cli.jobs.actions import sweep as running
    from geomx_cli.jobs.actions.sweep_jobs import SweepJobs, SweepManifest

    folder = folder.resolve()
    manifest = None if restart else SweepManifest.read(folder)
    if manifest is not None and not _target_is_given():
        target = manifest.target
    if report:
        _refuse_beside_report()
        if manifest is None:
            raise InvalidSettings(f"{folder} has no sweep", "name the folder of one with --to")
        return _report(manifest.cells, folder, target, json=json)
    names = _checked(algo)
    _warn(script, names)
    given = values(_SHARED, parameters)
    jobs = SweepJobs(
        job_spec(script, {}),
        given,
        lambda name: machines(hosts, local, {**given, "algo": name}),
        inventory_path(hosts, local=local),
        sync,
        ssh_options(accept_new_host_keys),
        _note,
    )
    first = jobs.prepare(names)
    where = source(hosts, local=local)
    _note(f"{counted(len(names) * seeds, 'job')}, one after another, on {where}; records go to {folder}")
    runner = running.Runner(jobs.launch, jobs.attach, lambda job: _collect(job, folder), jobs.settings, _note)
    cells = running.sweep(folder, names, range(first, first + seeds), runner, target=target, restart=restart)
    try:
        return _report(cells, folder, target, json=json)
    except KeyboardInterrupt:
        hint = f"geomx sweep --to {shlex.quote(str(folder))} --report makes them"
        raise Interrupted("interrupted; all jobs have ended, and table and figure are not made", hint) from None


def _warn(script: Sequence[str], names: Sequence[str]) -> None:
    """Warn of options that have no effect on any of the jobs."""
    for sentence in unknown_variables(os.environ):
        _note(f"warning: {sentence}")
    context = click.get_current_context()
    useless = [list(unused(context, _SHARED, name, script=bool(script))) for name in names]
    flags = [{sentence.split()[0] for sentence in sentences} for sentences in useless]
    for sentence in useless[0]:
        if all(sentence.split()[0] in one for one in flags):
            _note(f"warning: {sentence}")


def _checked(names: Sequence[str]) -> list[str]:
    known = algorithms()
    if not names:
        raise UsageError("a sweep needs algorithms", "as in --algo fsa hfa")
    for name in names:
        if name not in known and ("." in name or "/" in name):
            raise UsageError(f"{name} is no algorithm", "the command of a script goes after --: -- python train.py")
        find("algorithm", name)
    return list(dict.fromkeys(names))


def _target_is_given() -> bool:
    return click.get_current_context().get_parameter_source("target") is ParameterSource.COMMANDLINE


def _refuse_beside_report() -> None:
    context = click.get_current_context()
    written = [
        f"--{name.replace('_', '-')}"
        for name in context.params
        if name not in (*_WITH_REPORT, "folder", "script")
        and context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    if written or context.params["script"]:
        what = ", ".join(written) or "a script"
        raise UsageError(f"--report runs nothing: {what} has no effect", "give it --to DIR alone")


def _object(cells: "Sequence[Cell]", folder: Path, target: float, found: "SweepReport") -> dict[str, Any]:
    jobs = [
        {
            "algo": cell.algo, "seed": cell.seed, "job": cell.job or None, "state": cell.state, "why": cell.why,
            "records": str(folder / cell.records) if cell.records else None,
        }
        for cell in cells
    ]  # fmt: skip
    return {
        "schema_version": _VERSION,
        "folder": str(folder),
        "target": target,
        "jobs": jobs,
        "groups": [row.to_json() for row in found.rows if row.n],
        "figure": str(found.figure) if found.figure is not None else None,
        "problems": list(found.unreadable),
    }


def _note(text: str) -> None:
    click.echo(text, err=True)


def _collect(job: "KnownJob", folder: Path) -> dict[str, Any]:
    from geomx_cli.observe.report.collected import collect

    return collect(job, folder)


def _report(cells: "Sequence[Cell]", folder: Path, target: float, *, json: bool) -> int:
    """Print table and figure, and return 0 or raise an error after naming the jobs that are not done."""
    from geomx_cli.jobs.actions.sweep import unfinished
    from geomx_cli.observe.report.comparison import report_of

    found = report_of(cells, folder, target, progress)
    if json:
        print_json(_object(cells, folder, target, found))
    elif found.rows:
        print_table(found.rows, target)
    if found.figure is not None and not json:
        click.echo(str(found.figure))
    for note in found.notes:
        _note(f"note: {note}")
    report_groups([row.group for row in found.rows])
    if found.rows:
        _note(f"more: geomx draw {folder}; geomx compare {folder} --csv FILE")
    left = unfinished(cells)
    for sentence in left:
        _note(f"not done: {sentence}")
    for sentence in found.unreadable:
        _note(f"warning: {sentence}")
    if left and not any(cell.state in ("done", "collected in part") for cell in cells):
        running = any(cell.state == "running" for cell in cells)
        hint = "they are not over: look again later" if running else "geomx logs JOB shows what they printed"
        raise TrainingFailed(f"none of {counted(len(cells), 'job')} is done", hint)
    if left or found.unreadable:
        unfinished_jobs = f"{len(left)} of {counted(len(cells), 'job')} not done or not collected"
        what = unfinished_jobs if left else "some records cannot be read"
        raise DoneInPart(what, "repeat the command to run or collect what is missing")
    return 0
