"""`geomx compare`: the results of several jobs, side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from geomx_cli.commands._json import print_json
from geomx_cli.commands._report import report_problems, target_option
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.units import format_bytes, format_duration

if TYPE_CHECKING:
    from geomx_cli.observe.report import RunRecords, Summary

__all__ = ["compare"]

COMPARE_VERSION = 1
WIDTH = 132
ALIKE = ("parties", "workers", "central_workers", "network", "data", "split", "batch_size", "wan", "slowdown", "seed")


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="JOB...")
@target_option
@click.option("--json", is_flag=True, help="Print one JSON object instead of a table.")
def compare(names: tuple[str, ...], target: float, json: bool) -> None:
    """Compare jobs: time and bytes to an accuracy, final accuracy, samples per second, and share of time computing.

    A JOB is an id as in geomx jobs, a prefix of one, or a job directory; its event logs are read from its hosts, also
    while it runs. It may also be a folder BASE/NETWORK/MODE with the records of a collected job. Bytes are those
    between parties. Exit code 7: unreadable records are listed, and the rest is compared.

    \b
    Examples:
      geomx compare 20260729-17 20260729-18
      geomx compare results/cnn/hfa results/cnn/fsa --target 0.85
    """
    from geomx_cli.observe.report import Summary

    trials = [_trial(name) for name in names]
    problems = [problem for trial in trials for problem in trial.problems]
    for name, trial in zip(names, trials, strict=True):
        if not any(worker.samples for worker in trial.each()):
            problems.append(f"{name}: no worker has recorded a round; it failed earlier, or runs a custom script")
    summaries = [Summary.of(trial, target, parity=False) for trial in trials]
    if json:
        rows = [_row(name, trial, one) for name, trial, one in zip(names, trials, summaries, strict=True)]
        print_json({"schema_version": COMPARE_VERSION, "target": target, "jobs": rows})
    else:
        _print_table(trials, summaries, target)
    unlike = sorted(_unlike(trials))
    if unlike:
        click.echo(f"note: these jobs differ in more than the algorithm: {', '.join(unlike)}", err=True)
    report_problems(problems, "the rest is compared")


def _unlike(trials: "list[RunRecords]") -> set[str]:
    """Return the known options, other than those of algorithms, in which the trials differ."""
    known = [trial.metadata.options for trial in trials if trial.metadata is not None]
    return {f"--{name.replace('_', '-')}" for name in ALIKE if len({str(options.get(name)) for options in known}) > 1}


def _trial(name: str) -> "RunRecords":
    from geomx_cli.jobs.store.registry import find
    from geomx_cli.observe.report import RunRecords
    from geomx_cli.observe.report.collected import fetched
    from geomx_cli.observe.report.metadata import FILE_NAME

    folder = Path(name).absolute()
    if (folder / FILE_NAME).exists():
        return RunRecords.read(folder.parent.parent, folder.parent.name, folder.name)
    if folder.is_dir() and not (folder / "plan.json").exists():
        hint = "name a job, or a folder BASE/NETWORK/MODE as in results/cnn/hfa"
        raise InvalidSettings(f"{name} has no {FILE_NAME}: these are no records of a job", hint)
    return fetched(find(name))


def _row(name: str, trial: "RunRecords", summary: "Summary") -> dict[str, Any]:
    found = summary.to_json(trial)
    kept = ("network", "mode", "rounds", "samples", "seconds", "samples_per_s", "busy", "bytes", "accuracy")
    reached = found["target"]["reached"]
    job = trial.metadata.job if trial.metadata is not None else name
    return {"job": job, **{key: found[key] for key in kept}, "reached": reached, "problems": trial.problems}


def _print_table(trials: "list[RunRecords]", summaries: "list[Summary]", target: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    to = f"to {target:g}"
    heads = ("training", f"time {to}", f"bytes {to}", "accuracy", "samples/s", "computing", "bytes", "job")
    for head in heads:
        table.add_column(head, justify="left" if head in ("training", "job") else "right", no_wrap=True)
    for trial, one in zip(trials, summaries, strict=True):
        reached = one.reached
        table.add_row(
            f"{one.network} {trial.title}",
            format_duration(reached.seconds) if reached else "-",
            format_bytes(reached.wan_bytes) if reached and reached.wan_bytes is not None else "-",
            "-" if one.accuracy is None else f"{one.accuracy:.4f}",
            f"{one.samples_per_s:.0f}",
            f"{100 * one.busy:.0f} %",
            "-" if one.wan_bytes is None else format_bytes(one.wan_bytes),
            trial.metadata.job if trial.metadata is not None else "",
        )
    Console(width=max(Console().width, WIDTH)).print(table)  # wrap lines rather than truncate values
