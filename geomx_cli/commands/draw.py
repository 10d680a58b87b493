"""`geomx draw`: figures of a network's trials."""

from pathlib import Path

import click

from geomx_cli.commands._report import base_option, network_option, progress, report_problems
from geomx_cli.core.errors import InvalidSettings, UsageError

__all__ = ["draw"]


@click.command()
@base_option
@network_option
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Where to write them.  [default: figures/ beside the records]",
)  # fmt: skip
@click.option(
    "--format", "form", type=click.Choice(["png", "svg", "pdf"]), default="png", show_default=True, help="Of the files."
)
@click.option("--terminal", is_flag=True, help="Draw in this terminal, and write nothing.")
def draw(base: Path, network: str, output: Path | None, form: str, terminal: bool) -> None:
    """Draw the records of a network in DIR/NETWORK/MODE, as written by geomx logs collect --to DIR.

    \b
    accuracy, accuracy-niid  test accuracy over time, for identically and non-identically distributed data
    bytes                    test accuracy over the bytes between parties
    throughput, traffic      samples and megabytes per second
    computing                fraction of time that each worker computes
    timeline-MODE            one round: which workers compute, send, wait
    matrix-MODE              megabytes from each party to each

    Each algorithm has the same colour in every figure, from a palette suitable for colour-blind readers. Missing and
    damaged records are listed, and the rest is drawn; the exit code is then 7.

    \b
    Examples:
      geomx draw -b results -n cnn
      geomx draw -b results -n resnet18-v1 -o paper --format pdf
      geomx draw -b results -n cnn --terminal
    """
    from geomx_cli.observe.report import RunRecords, figures
    from geomx_cli.observe.report.run_records import modes_in

    if terminal and output is not None:
        raise UsageError("--terminal writes no files", "leave out --output")
    trials, problems = [], []
    for mode in modes_in(base, network):
        try:
            trials.append(RunRecords.read(base, network, mode, progress))
        except InvalidSettings as error:
            problems.append(error.message)
    if not trials:
        raise InvalidSettings(f"there is nothing to draw: {'; '.join(problems)}", "collect the jobs again")
    found = list(figures.of(network, trials, 1.0))
    if terminal:
        from geomx_cli.observe.report.terminal import painted

        for figure in found:
            click.echo(painted(figure))
    else:
        from geomx_cli.observe.report import plots

        folder = output or base / network / "figures"
        for figure in found:
            click.echo(str(plots.draw(figure, folder, form)))
    report_problems(problems + [problem for trial in trials for problem in trial.problems], "the rest is drawn")
