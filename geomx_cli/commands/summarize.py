"""`geomx summarize`: the results of a run, from its records."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from geomx_cli.commands._command import print_json
from geomx_cli.commands._completion import modes_of_records
from geomx_cli.commands._report import base_option, network_option, progress, report_problems, target_option
from geomx_cli.core.units import counted, format_bytes, format_duration

if TYPE_CHECKING:
    from geomx_cli.observe.report import Summary
    from geomx_cli.observe.report.summary import Reached

__all__ = ["summarize"]


@click.command()
@base_option
@network_option
@click.option(
    "-m", "--mode", required=True, metavar="NAME", shell_complete=modes_of_records, help="Mode: esync, esync-niid, ...",
)  # fmt: skip
@click.option("--run", metavar="JOB", default="", help="The job, if there are several: the beginning of its name.")
@target_option
@click.option("--parity", is_flag=True, help="Compute throughput, traffic and computing time by ESync's formulas.")
@click.option("--json", is_flag=True, help="Print summary.json instead of text.")
def summarize(base: Path, network: str, mode: str, run: str, target: float, parity: bool, json: bool) -> None:
    """Summarise the records of a job: DIR/NETWORK/MODE/JOB/HOST/DEVICE.jsonl, or in ESync's layout
    DIR/NETWORK/MODE/HOST/DEVICE/iter-1.txt, iter-2.txt, ...

    Writes two files next to the hosts' folders. The first file has the format that ESync's plotting tool reads, and the
    name of the mode: ESync.json, Sync.json, HFA.json. The second file, summary.json, adds further values, from
    unsmoothed data: pairs of time and accuracy, bytes in both directions, rounds, and time and bytes to the target. It
    also has computing, exchange and waiting times. A mode is the name of an algorithm, or dcasgd. Unless --split is
    iid, it has the suffix -niid.

    If records are missing, damaged or duplicate, geomx lists them, summarises the rest, and ends with exit code 7.

    \b
    Examples:
      geomx summarize -b results -n cnn -m hfa
      geomx summarize -b results -n resnet18-v1 -m esync-niid --target 0.7 --json
    """
    from geomx_cli.observe.report import RunRecords, Summary
    from geomx_cli.observe.report.run_folders import one_run
    from geomx_cli.observe.report.summary import write

    records = RunRecords.read(one_run(base, network, mode, run), progress)
    summary = Summary.of(records, target, parity=parity)
    paths = write(records, summary)
    if json:
        print_json(summary.to_json(records))
    else:
        click.echo("\n".join(_lines(summary, "MiB/s" if parity else "MB/s")))
    for path in paths:
        click.echo(f"written: {path}", err=True)
    for warning in records.warnings:
        click.echo(f"warning: {warning}", err=True)
    report_problems(records.problems, "the rest is summarised; summary.json lists all")


def _lines(summary: "Summary", unit: str) -> list[str]:
    rows = _rows(summary, unit)
    width = max(map(len, rows))
    return [f"{name:<{width}}  {text}" for name, text in rows.items()]


def _rows(summary: "Summary", unit: str) -> dict[str, str]:
    reached = summary.reached
    rows = {
        "training": f"{summary.network}, {summary.mode}, {counted(summary.workers, 'worker')}",
        **({"outcome": summary.outcome} if summary.outcome else {}),
        "rounds": str(summary.rounds),
        "samples": str(summary.samples),
        "time": format_duration(summary.seconds),
        "samples/s": _known(summary.samples_per_s, "{:.0f}"),
        "traffic": _known(summary.traffic, f"{{:.3g}} {unit}"),
        "computing": _known(None if summary.busy is None else 100 * summary.busy, "{:.1f} % of the time"),
        "goodput": _known(None if summary.goodput is None else 100 * summary.goodput, "{:.1f} % of the time"),
        "workers sent / received": "-" if summary.bytes is None else " / ".join(map(format_bytes, summary.bytes)),
        "between parties": "-" if summary.wan_bytes is None else format_bytes(summary.wan_bytes),
    }
    if summary.validation_loss is not None:
        rows["validation loss"] = f"{summary.validation_loss:.4f}"
        if summary.accuracy is None:
            return rows
    return rows | {
        "last accuracy": "-" if summary.accuracy is None else f"{summary.accuracy:.4f}",
        f"to {summary.target:g}": "not reached"
        if reached is None
        else f"{format_duration(reached.seconds)}{_bytes(reached)} ({reached.accuracy:.4f})",
    }


def _bytes(reached: "Reached") -> str:
    if reached.wan_bytes is not None:
        return f", {format_bytes(reached.wan_bytes)} between parties"
    return "" if reached.bytes is None else f", {format_bytes(reached.bytes)}"


def _known(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
