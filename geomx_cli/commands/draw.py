"""`geomx draw`: figures of runs."""

import math
from pathlib import Path

import click
from click.core import ParameterSource

from geomx_cli.commands._completion import figure_names, jobs_or_folders, networks_of_records
from geomx_cli.commands._report import comma_separated, group_option, progress, report_groups, report_problems
from geomx_cli.core.conventions import file_name
from geomx_cli.core.errors import InvalidSettings, UsageError

__all__ = ["draw"]


class _Pair(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest click
    """Two numbers, as in "0,100"."""

    name = "pair"

    def __init__(
        self, *, ascending: bool = False, least: float = -math.inf, most: float = math.inf, unit: str = ""
    ) -> None:
        self._ascending, self._least, self._most, self._unit = ascending, least, most, unit

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        """See click.ParamType.convert."""
        try:
            first, second = map(float, value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not two numbers with a comma between them", param, ctx)
        if not first - first == second - second == 0 or (self._ascending and first >= second):
            self.fail(f"{value!r} is not a low and a higher number", param, ctx)
        if not self._least <= min(first, second) <= max(first, second) <= self._most:
            self.fail(f"{value!r} is not from {self._least:g} to {self._most:g} {self._unit}".rstrip(), param, ctx)
        return first, second


_LIMITS = _Pair(ascending=True)
# The largest still takes less than a GB of memory to draw.
_INCHES = _Pair(least=1, most=50, unit="inches")
_FILES_ONLY = ("folder", "form", "size", "font_size", "logx", "logy")


@click.command()
@click.argument("names", nargs=-1, metavar="[JOB]...", shell_complete=jobs_or_folders)
@click.option(
    "-b", "--base", type=click.Path(path_type=Path), metavar="DIR",
    help="Instead of JOB: all runs in this folder, which geomx logs collect --to has written.",
)  # fmt: skip
@click.option(
    "-n", "--network", metavar="NAME", shell_complete=networks_of_records,
    help="With --base: only this network, such as resnet18-v1, or this script.",
)  # fmt: skip
@group_option
@click.option(
    "--only", metavar="NAME,...", callback=comma_separated, shell_complete=figure_names,
    help="Only figures whose names begin with one of these.",
)  # fmt: skip
@click.option(
    "--metric", "metrics", multiple=True, metavar="NAME", help="Also draw this reported metric; repeatable.",
)  # fmt: skip
@click.option("--logx", is_flag=True, help="Logarithmic x axis of curves.")
@click.option("--logy", is_flag=True, help="Logarithmic y axis of curves.")
@click.option("--xlim", type=_LIMITS, metavar="LO,HI", help="Limits of the x axis of curves, in its unit.")
@click.option("--ylim", type=_LIMITS, metavar="LO,HI", help="Limits of the y axis of accuracies.")
@click.option("--target", type=float, metavar="VALUE", help="Draw a line at this accuracy.")
@click.option(
    "-o", "--to", "folder", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Folder for the figures.  [default: figures/ beside the records, or here]",
)  # fmt: skip
@click.option(
    "--format", "form", type=click.Choice(["png", "svg", "pdf"]), default="png", show_default=True, help="File format."
)
@click.option(
    "--size", type=_INCHES, default="7.2,4.4", show_default=True, metavar="W,H", help="Inches, each from 1 to 50.",
)  # fmt: skip
@click.option(
    "--font-size", type=click.FloatRange(4, 40), default=10.0, show_default=True, metavar="POINTS",
    help="Size of all text.",
)  # fmt: skip
@click.option(
    "--csv", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Also write the data of each figure to DIR/NAME.csv.",
)  # fmt: skip
@click.option("--terminal", is_flag=True, help="Draw in this terminal instead of files.")
def draw(
    names: tuple[str, ...],
    base: Path | None,
    network: str | None,
    group_by: tuple[str, ...],
    only: tuple[str, ...],
    metrics: tuple[str, ...],
    logx: bool,
    logy: bool,
    xlim: tuple[float, float] | None,
    ylim: tuple[float, float] | None,
    target: float | None,
    folder: Path | None,
    form: str,
    size: tuple[float, float],
    font_size: float,
    csv: Path | None,
    terminal: bool,
) -> None:
    """Draw figures of jobs, or of folders with records of collected jobs: BASE, BASE/NETWORK or BASE/NETWORK/MODE.

    geomx reads the event logs of jobs from their hosts. These are the figures:

    \b
    accuracy, accuracy-niid  test accuracy over time, for identically and non-identically distributed data
    bytes                    test accuracy, or otherwise validation loss, over the bytes between parties
    validation-loss          validation loss of language models over time
    loss                     training loss over time, mean over the workers
    metric-NAME              a metric that scripts report (--metric) over time, mean over the workers
    throughput, traffic      samples and megabytes per second
    computing                fraction of time that each worker computes
    timeline-NAME            one round: when each worker computes, sends and waits
    matrix-NAME              megabytes from each party to each other party

    Runs that differ only in their seed form one curve: the mean, with a band of one sample standard deviation. geomx
    interpolates each run linearly. The curve extends over the range of x that all runs have. A job that is not done
    does not count in means, and has a separate curve. --group-by forms other groups: algo,seed gives one curve for each
    run. geomx never averages over different scripts, networks or algorithms.

    --target and --ylim apply to figures of the accuracy. If --only excludes these figures, the two options apply to all
    curves.

    Each algorithm has the same colour in every figure, from a palette suitable for colour-blind readers. If a figure
    has no data, geomx says so. If records are missing or damaged, geomx lists them, draws the rest, and ends with exit
    code 7.

    \b
    Examples:
      geomx draw 20260729-17 20260729-18
      geomx draw -b results -n cnn --group-by algo,seed
      geomx draw results/cnn --only accuracy --target 0.8 --format pdf --size 3.4,2.4 --font-size 8
    """
    from geomx_cli.observe.report.drawing import any_y, empty, figures_of, in_terminal, left_out, to_files
    from geomx_cli.observe.report.figures import Curves
    from geomx_cli.observe.report.plots import Page
    from geomx_cli.observe.report.sources import opened
    from geomx_cli.observe.report.styles import Axes

    _refuse_without_effect(terminal)
    if any(limits and limits[0] <= 0 for limits, log in ((xlim, logx), (ylim, logy)) if log):
        raise UsageError("a logarithmic axis has no 0", "give limits above 0")
    with opened(_sources(names, base, network), progress) as found:
        if not found.runs:
            raise InvalidSettings(f"there is nothing to draw: {'; '.join(found.unreadable)}", "collect the jobs again")
        figures = figures_of(found.runs, group_by, only, metrics)
        problems, notes = found.problems, found.notes
    report_groups(figures.groups)
    for name, why in figures.missing.items():
        click.echo(f"note: no figure {name}: {why}", err=True)
    if not figures.found:
        raise InvalidSettings("there are no data for any figure", "see the reasons above")
    axes = Axes(logx, logy, xlim, ylim, target, any_y(figures))
    if target is not None and not axes.any_y and not 0 < target <= 1:
        raise UsageError(f"--target {target:g}: an accuracy is above 0 and at most 1", "write 0.8 for 80 %")
    nothing = empty(figures, axes)
    for name, why in nothing.items():
        click.echo(f"note: figure {name} is empty: {why}", err=True)
    for name, curves in left_out(figures, axes).items():
        click.echo(f"note: figure {name} is without {curves}, outside of --xlim", err=True)
    if any(isinstance(figure, Curves) and figure.note for figure in figures.found):
        click.echo("note: means extend until the first run of each ends; --group-by algo,seed draws all runs", err=True)
    if len(nothing) == len(figures.found):
        raise InvalidSettings("no figure would show anything", "see the reasons above")
    if terminal:
        for text in in_terminal(figures, axes, csv):
            click.echo(text)
    else:
        place = folder or (base / (network or "") if base is not None else Path()) / "figures"
        for path in to_files(figures, place, Page(form, size, font_size, axes), csv):
            click.echo(str(path))
    report_problems(problems, "the rest is drawn", notes)


def _sources(names: tuple[str, ...], base: Path | None, network: str | None) -> tuple[str, ...]:
    if bool(names) == (base is not None):
        raise UsageError("draw needs jobs or folders, or else --base", "see geomx draw --help")
    if base is None:
        if network is not None:
            raise UsageError("--network is for --base", "name the folder of the network's records instead")
        return names
    if network is None:
        return (str(base.absolute()),)
    from geomx_cli.observe.report.run_folders import runs_in

    return tuple(str(path) for path in runs_in(base.absolute(), file_name(network)))


def _refuse_without_effect(terminal: bool) -> None:
    context = click.get_current_context()
    written = [
        one.opts[-1]
        for one in context.command.params
        if one.name in _FILES_ONLY and context.get_parameter_source(one.name) is ParameterSource.COMMANDLINE
    ]
    if terminal and written:
        raise UsageError(f"{', '.join(written)}: no effect with --terminal", "leave out one or the other")
