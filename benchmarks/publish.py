"""Measures the published figures anew, and writes their tables into docs/results. Needs root.

    python benchmarks/publish.py                          all tables, for some hours on an idle machine (--list)
    python benchmarks/publish.py exchange-wan peers       these tables
    python benchmarks/publish.py --list                   their names, pages, minutes and commands
    python benchmarks/publish.py --write                  measures nothing, and writes what was measured before

The file docs/results/measured/NAME.json has the commit, the machine, and what the table's commands printed. A page has
each table between two comments. Nobody edits there: figures come from the file, with median [lowest, highest].
A figure is measured only if geomx_cli and benchmarks are as committed.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from outcome import conclude
from publish_tables import TABLES, Table

from geomx_cli.core.errors import CheckFailed, UsageError

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
MEASURED = RESULTS / "measured"
SOURCES = ("geomx_cli", "benchmarks")


def measure(table: Table) -> None:
    """Run a table's commands and keep what they print. Raises CheckFailed if one fails."""
    if _git("status", "--porcelain", "--untracked-files=no", "--", *SOURCES):
        raise CheckFailed(f"{' or '.join(SOURCES)} differs from the commit", "commit, and measure then")
    begun, commit = time.monotonic(), _git("rev-parse", "--short", "HEAD")
    results = [_run(command) for command in table.commands]
    found = {
        "schema_version": 1, "commit": commit, "date": time.strftime("%Y-%m-%d"),
        "machine": _machine(), "minutes": round((time.monotonic() - begun) / 60, 1), "commands": list(table.commands),
        "results": results,
    }  # fmt: skip
    MEASURED.mkdir(exist_ok=True)
    (MEASURED / f"{table.name}.json").write_text(json.dumps(found, indent=1) + "\n")


def _run(command: str) -> Any:
    print(f"$ {command}", file=sys.stderr, flush=True)
    done = subprocess.run([*shlex.split(command), "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise CheckFailed(f"{command} ended with status {done.returncode}")
    return json.loads(lines[-1])["results"]


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def _machine() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = names[0].partition(":")[2].strip() if names else platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{os.cpu_count()} cores of {model}, {memory:.0f} GB, Linux {platform.release().partition('-')[0]}"


def section(table: Table) -> str:
    """What stands between the comments: where the figures come from, and the table."""
    found = json.loads((MEASURED / f"{table.name}.json").read_text())
    rows = [[str(cell) for cell in row] for row in table.rows(found["results"])]
    heads = table.heads
    lines = [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]
    commands = "\n".join(found["commands"])
    source = f"Commit {found['commit']}, {found['date']}, {found['machine']}. {table.counted}"
    return f"{source}\n\n```\n{commands}\n```\n\n" + "\n".join(lines)


def written(table: Table, text: str) -> str:
    """A page's text with this table. Raises CheckFailed if the page has no place for it."""
    begin, end = f"<!-- measured: {table.name} -->", "<!-- /measured -->"
    before, mark, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not mark or not closed:
        raise CheckFailed(f"docs/results/{table.page} has no place for {table.name}", f"{begin}\n{end}")
    return f"{before}{begin}\n{section(table)}\n{end}{after}"


def write(tables: Iterable[Table]) -> None:
    """Write the tables that have been measured into their pages."""
    for table in tables:
        if (MEASURED / f"{table.name}.json").exists():
            page = RESULTS / table.page
            page.write_text(written(table, page.read_text()))


def _listed(tables: Sequence[Table]) -> None:
    for table in tables:
        print(f"{table.name}: docs/results/{table.page}, {table.minutes} minutes")
        print(*(f"    {command}" for command in table.commands), sep="\n")


def main() -> int:
    """Measure, write or list the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="default: all")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="print what would be measured")
    what.add_argument("--write", action="store_true", help="write what was measured before")
    given = parser.parse_args()

    def publish() -> Sequence[Any]:
        known = {table.name: table for table in TABLES}
        if unknown := [name for name in given.tables if name not in known]:
            raise UsageError(f"there is no table {unknown[0]}", f"one of {', '.join(known)}")
        chosen = [known[name] for name in given.tables] or list(TABLES)
        if given.list:
            _listed(chosen)
            return []
        for table in chosen:
            if not given.write:
                measure(table)
            write([table])
        return []

    return conclude(publish, as_json=False)


if __name__ == "__main__":
    sys.exit(main())
