"""`geomx compare`: the results of several jobs, side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from geomx_cli.commands._command import print_json
from geomx_cli.commands._completion import jobs_or_folders
from geomx_cli.commands._report import (
    group_option,
    print_table,
    progress,
    report_groups,
    report_problems,
    target_option,
)

if TYPE_CHECKING:
    from geomx_cli.observe.report import RunRecords
    from geomx_cli.observe.report.summary import Summary

__all__ = ["compare"]

COMPARE_VERSION = 1


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="JOB...", shell_complete=jobs_or_folders)
@target_option
@group_option
@click.option("--csv", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Also write a CSV file.")
@click.option("--json", is_flag=True, help="Print one JSON object instead of a table.")
def compare(names: tuple[str, ...], target: float, group_by: tuple[str, ...], csv: Path | None, json: bool) -> None:
    """Compare jobs: time and bytes to an accuracy, final accuracy or validation loss, samples per second, fraction of
    time computing, and goodput: the share of the time spent on training that was kept.

    A JOB is a name in the list of geomx jobs, the beginning of such a name, or a job directory. geomx reads the job's
    event logs from its hosts, even while the job runs. A JOB can also be a folder with records of collected jobs: BASE,
    BASE/NETWORK or BASE/NETWORK/MODE. Bytes are the bytes between parties.

    Jobs that differ only in their seed form one row, with mean and sample standard deviation over n jobs. --group-by
    forms other groups. A job that is not done (it runs, failed or was stopped) does not count in means. Such a job has
    a row of its own, with its values so far. Times and bytes to the target are means over the jobs that reached
    the target. geomx never averages over different scripts, versions of a script, networks or algorithms. Exit code 7
    means that some records could not be read: geomx lists these, and compares the rest.

    \b
    Examples:
      geomx compare 20260729-17 20260729-18
      geomx compare results/cnn --target 0.85 --csv results.csv
      geomx compare results --group-by algo,lr
    """
    from geomx_cli.observe.report.comparison import compared, csv_rows, unlike
    from geomx_cli.observe.report.drawing import write_csv
    from geomx_cli.observe.report.groups import grouped
    from geomx_cli.observe.report.sources import opened

    with opened(names, progress) as found:
        rows = compared(grouped(found.runs, group_by), target)
        problems, notes = found.problems, found.notes
        if csv is not None:
            write_csv(csv, csv_rows(rows, target))
        if json:
            jobs = [_job(run, one) for row in rows for run, one in zip(row.group.runs, row.summaries, strict=True)]
            groups = [row.to_json() for row in rows if row.n]
            print_json({"schema_version": COMPARE_VERSION, "target": target, "jobs": jobs, "groups": groups})
        else:
            print_table(rows, target)
    report_groups([row.group for row in rows])
    if differing := unlike([row.group for row in rows]):
        click.echo(f"note: these jobs differ in more than the algorithm: {', '.join(differing)}", err=True)
    report_problems(problems, "the rest is compared", notes)


def _job(run: "RunRecords", summary: "Summary") -> dict[str, Any]:
    found = summary.to_json(run)
    kept = ("network", "mode", "outcome", "rounds", "samples", "seconds", "samples_per_s", "busy", "goodput", "bytes",
            "accuracy", "validation_loss")  # fmt: skip
    problems = {"reached": found["target"]["reached"], "problems": run.problems, "warnings": run.warnings}
    return {"job": run.name, **{key: found[key] for key in kept}, **problems}
