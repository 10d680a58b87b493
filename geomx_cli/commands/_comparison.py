"""The table of results of compare and sweep."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from geomx_cli.observe.report.comparison import ComparisonRow

__all__ = ["print_table"]


def print_table(rows: "Sequence[ComparisonRow]", target: float) -> None:
    """Print one line for each group of runs; a job is named where it is the only one. One that is not done has no n."""
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
