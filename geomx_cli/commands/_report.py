"""Common parts of the commands that read records."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from geomx_cli.commands._completion import group_names, networks_of_records
from geomx_cli.core.conventions import file_name
from geomx_cli.core.errors import DoneInPart
from geomx_cli.core.units import counted

if TYPE_CHECKING:
    from geomx_cli.observe.report.comparison import ComparisonRow
    from geomx_cli.observe.report.groups import RunGroup

__all__ = [
    "MOST_REPORTED", "base_option", "comma_separated", "group_option", "network_option", "print_table", "progress",
    "report_groups", "report_problems", "target_option",
]  # fmt: skip

# The table of results of compare and sweep.


def print_table(rows: "Sequence[ComparisonRow]", target: float) -> None:
    """Print one line for each group of runs. A group of a single job has the job's name. A job that is not done has no
    n.
    """
    from rich.console import Console
    from rich.table import Table

    from geomx_cli.observe.report.comparison import METRICS, cells, shown

    table = Table(box=None, pad_edge=False)
    names = shown(rows)
    headings = [METRICS[name].heading.format(f"{target:g}") for name in names]
    named = any(len(row.group.runs) == 1 for row in rows)
    for heading in ("training", "n", *headings, *(["job"] if named else [])):
        table.add_column(heading, justify="left" if heading in ("training", "job") else "right", no_wrap=True)
    for row in rows:
        runs = row.group.runs
        name = runs[0].name if len(runs) == 1 else ""
        table.add_row(row.training, str(row.n or "-"), *cells(row, names), *([name] if named else []))
    console = Console(markup=False, highlight=False)
    console.width = max(console.width, console.measure(table, options=console.options.update(max_width=1000)).maximum)
    console.print(table)  # the terminal wraps lines; no value is cut off


MOST_REPORTED = 20

base_option = click.option(
    "-b", "--base", type=click.Path(path_type=Path), required=True, metavar="DIR",
    help="Folder of the records, which geomx logs collect --to has written.",
)  # fmt: skip
network_option = click.option(
    "-n", "--network", required=True, metavar="NAME", shell_complete=networks_of_records,
    callback=lambda ctx, parameter, name: file_name(name) if name else name,
    help="The network, such as resnet18-v1 or MODULE:FUNCTION, or the script: train for train.py.",
)  # fmt: skip
target_option = click.option(
    "--target", type=click.FloatRange(0, 1, min_open=True), default=0.8, show_default=True,
    help="Target accuracy for time and bytes.",
)  # fmt: skip


def comma_separated(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Callback of options whose value is a list with commas."""
    return tuple(word.strip() for word in (value or "").split(",") if word.strip())


group_option = click.option(
    "--group-by", metavar="NAME,...", callback=comma_separated, shell_complete=group_names,
    help="Average over jobs with the same algorithm and the same value of each NAME. A NAME is an option, such as seed "
    "or lr, or codec, args (of the script), topology or job.  [default: the options in which the jobs differ, except "
    "the seed]",
)  # fmt: skip


def progress(done: int, count: int) -> None:
    """Show the number of workers' records read, if stderr is a terminal."""
    if sys.stderr.isatty():
        click.echo(f"\r{done} of {counted(count, 'worker')} read", nl=done == count, err=True)


def report_groups(groups: "Sequence[RunGroup]") -> None:
    """Print what a reader of groups' figures must know: runs that are in no mean, and what their jobs warned of."""
    from geomx_cli.observe.report.groups import not_in_means

    for warning in dict.fromkeys(one for group in groups for run in group.runs for one in run.warnings):
        click.echo(f"warning: {warning}", err=True)
    if left := not_in_means(groups):
        click.echo(f"note: {left}", err=True)


def report_problems(problems: Sequence[str], rest: str, notes: Sequence[str] = ()) -> None:
    """Print notes and problems with records, and raise DoneInPart if there are problems; `rest` says what happened to
    the others.
    """
    for note in notes:
        click.echo(f"note: {note}", err=True)
    for problem in problems[:MOST_REPORTED]:
        click.echo(f"warning: {problem}", err=True)
    if len(problems) > MOST_REPORTED:
        click.echo(f"warning: and {len(problems) - MOST_REPORTED} more", err=True)
    if problems:
        raise DoneInPart(f"{counted(len(problems), 'problem')} with records; {rest}")
