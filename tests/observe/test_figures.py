"""The data of the figures, and that every figure is drawn in every format."""

import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from records import esync_record, sync_record, write

from geomx_cli.core.errors import InvalidSettings, UsageError
from geomx_cli.observe.report import RunRecords
from geomx_cli.observe.report.drawing import figures_of, painted, to_files
from geomx_cli.observe.report.figures import Bars, Curves, Figures, Matrix, Series, Timeline
from geomx_cli.observe.report.groups import Curve, Mean, Span
from geomx_cli.observe.report.metadata import Metadata
from geomx_cli.observe.report.modes import MODES, title
from geomx_cli.observe.report.plots import Page, draw
from geomx_cli.observe.report.plots import _bars as bars
from geomx_cli.observe.report.plots import _explain as explain
from geomx_cli.observe.report.plots import _mark as mark
from geomx_cli.observe.report.run_folders import runs_in
from geomx_cli.observe.report.styles import Axes, style

STARTS = {"A/cpu0": 0.0, "A/cpu1": 0.5}
TIMES = {"compute": 3.0, "communicate": 1.0, "wait": 0.25}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Trials of cnn: hfa with all that we record, esync from ESync's own tools, local, and hfa on non-IID data."""
    for mode, seconds, accuracies in (("hfa", 5.0, (0.5, None, 0.9)), ("hfa-niid", 6.0, (0.2, 0.4, None))):
        folder = tmp_path / "cnn" / mode
        for index, device in enumerate(("cpu0", "cpu1")):
            for number, accuracy in enumerate(accuracies, 1):
                record = {"time": {"0": {}}, "num_samples": 100, "total_time": seconds * number * (1 + index), **TIMES}
                judged = {"accuracy": accuracy} if accuracy and device == "cpu0" else {}
                write(folder / "A" / device, number, {**record, **judged, "bytes_sent": 1000, "bytes_received": 500})
        traffic = {"A": {"central": 4_000_000}, "central": {"A": 2_000_000}}
        options, sent = {"wan": "" if mode == "hfa" else "50mbit"}, [0, 1_000_000, 3_000_000, 6_000_000]
        Metadata(f"job-{len(mode)}", "central", options, traffic, [0.0, 5.0, 15.0, 30.0], sent, STARTS).write(folder)
    for number in (1, 2):
        write(tmp_path / "cnn" / "esync" / "cloud3" / "gpu0", number, esync_record(number, 3, evaluator=True))
    write(tmp_path / "cnn" / "local" / "here" / "cpu", 1, sync_record(1))
    return tmp_path


def made(base: Path, *by: str) -> Figures:
    return figures_of([RunRecords.read(path) for path in runs_in(base, "cnn")], by)


def drawn(base: Path) -> dict[str, Any]:
    return {figure.name: figure for figure in made(base).found}


def of(mode: str) -> Series:
    return Series(title(mode), mode)


def curve(*points: tuple[float, float]) -> Curve:
    return Curve([x for x, _ in points], [y for _, y in points])


def test_accuracy_over_time_and_bytes_is_that_of_raw_points(base: Path) -> None:
    found = drawn(base)
    over_time = found["accuracy"]
    assert isinstance(over_time, Curves) and over_time.x == "time (seconds)"
    assert over_time.curves[of("hfa")] == curve((5.0, 0.5), (15.0, 0.9)), "in pairs, where both are"
    assert over_time.curves[of("esync")].y == pytest.approx([0.2234567, 0.3469134])
    assert over_time.level == pytest.approx(0.2234567), "what one worker by itself comes to"
    assert [series.mode for series in over_time.curves] == ["esync", "hfa", "local"], "always in the same order"
    assert found["accuracy-niid"].curves == {of("hfa-niid"): curve((6.0, 0.2), (12.0, 0.4))}
    over_bytes = found["bytes"].curves
    assert over_bytes[of("hfa")] == curve((1.0, 0.5), (3.0, 0.9)), "MB between parties until then"
    assert set(over_bytes) == {of("hfa"), of("hfa-niid")}, "the others' bytes are unknown"
    low, high = Axes(ylim=None).y_limits(over_time)
    assert low > 0.1 and high < 1, "as the data"


@pytest.mark.parametrize("value", [0.05, -3.0, 1e-30])
def test_values_that_differ_by_their_rounding_only_are_drawn_as_equal(value: float) -> None:
    points = curve((0.0, value), (1.0, math.nextafter(value, math.inf)))
    low, high = Axes().y_limits(Curves("lr", "lr", "step", "lr", {of("hfa"): points}))
    assert low < value < high and high - low > 0.04 * abs(value)


def test_a_deviation_above_the_mean_adds_no_axis_below_zero() -> None:
    points = Curve([0.0, 1.0], [0.2, 2.0], sd=[1.0, 0.1], n=3)
    low, high = Axes().y_limits(Curves("loss", "loss", "step", "loss", {of("hfa"): points}))
    assert low == 0.0 and high > 2.1
    points = Curve([0.0, 1.0], [-0.2, 2.0], sd=[1.0, 0.1], n=3)
    assert Axes().y_limits(Curves("loss", "loss", "step", "loss", {of("hfa"): points}))[0] < -1.2


def test_time_is_in_minutes_where_there_are_many(base: Path) -> None:
    write(base / "cnn" / "esync" / "cloud3" / "gpu0", 3, {**esync_record(3, 3, evaluator=True), "total_time": 600.0})
    found = drawn(base)["accuracy"]
    assert found.x == "time (minutes)" and found.curves[of("hfa")] == curve((5 / 60, 0.5), (0.25, 0.9))


def test_a_metric_that_no_script_has_reported_says_how_to(base: Path) -> None:
    with pytest.raises(UsageError, match="no run has it") as caught:
        figures_of([RunRecords.read(path) for path in runs_in(base, "cnn")], (), metrics=["gradnorm"])
    assert "geomx.report(NAME=value)" in caught.value.hint


def test_bars(base: Path) -> None:
    found = drawn(base)
    rate = Mean(600 / 30, None, 1)
    assert found["throughput"].bars[of("hfa")] == [("", rate)], "over the time of the worker that took longest"
    ((_, traffic),) = found["traffic"].bars[of("hfa")]
    assert traffic.value == pytest.approx(9000 / 30 / 1e6)
    assert of("esync") not in found["traffic"].bars, "whose records have no bytes"
    computing = found["computing"]
    assert isinstance(computing, Bars)
    assert computing.bars[of("hfa")] == [("A/cpu0", Mean(9 / 15, None, 1)), ("A/cpu1", Mean(9 / 30, None, 1))]
    ((name, busy),) = computing.bars[of("esync")]
    assert name == "cloud3/gpu0" and busy.value == pytest.approx(2 * 3 * 0.052 / 20.8), "not all but aggregation"


def test_a_round_and_a_matrix(base: Path) -> None:
    found = drawn(base)
    timeline = found["timeline-hfa"]
    assert isinstance(timeline, Timeline)
    spans = [Span(5.0, 9.0, "computes"), Span(9.0, 9.75, "sends"), Span(9.75, 10.0, "waits")]
    assert timeline.workers["A/cpu0"] == spans, "of the round in the middle"
    assert timeline.workers["A/cpu1"][0] == Span(10.5, 19.5, "computes"), "which began half a second later"
    assert timeline.title == "Round 2 of 3: cnn, HFA" and timeline.phases == ["computes", "sends", "waits"]
    matrix = found["matrix-hfa"]
    assert isinstance(matrix, Matrix)
    assert matrix.title.endswith("HFA (one run)")
    assert (matrix.parties, matrix.megabytes) == (["A", "central"], [[0.0, 4.0], [2.0, 0.0]])
    assert "timeline-esync" not in found and "matrix-esync" not in found, "of which nothing is known"
    missing = made(base).missing
    assert missing["matrix-esync"] == "no traffic between its parties is recorded" and "bytes of ESync" in missing


@pytest.mark.parametrize("form", ["png", *(pytest.param(form, marks=pytest.mark.thorough) for form in ("svg", "pdf"))])
def test_every_figure_is_drawn(base: Path, tmp_path: Path, form: str) -> None:
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    found = made(base)
    axes = Axes(logx=form == "svg", logy=form == "pdf", target=0.8)
    page = Page(form, (3.4, 2.4), 8.0, axes)
    paths = list(to_files(found, tmp_path / "out", page))
    assert [path.name for path in paths] == [f"{figure.name}.{form}" for figure in found.found]
    assert all(path.read_bytes().startswith(begins[form]) and path.stat().st_size > 3000 for path in paths)
    assert all(figure.title in painted(figure, axes) for figure in found.found)


@pytest.mark.parametrize("limits", [(0.2, 0.35), (1, 9), (0.9, 4000), (3, 3.1), (1e-4, 1e5)])
def test_marks_of_logarithmic_axes_are_few_plain_numbers(limits: tuple[float, float]) -> None:
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(3.4, 2.4), layout="constrained")
    plot = canvas.add_subplot()
    plot.set(xscale="log", xlim=limits)
    mark(plot.xaxis, *limits)
    canvas.draw_without_rendering()
    marks = [tick for tick in plot.xaxis.get_major_ticks() if limits[0] <= tick.get_loc() <= limits[1]]
    texts = [tick.label1.get_text() for tick in marks]
    assert 3 <= len(texts) <= 8 and [float(text) for text in texts] == pytest.approx([tick.get_loc() for tick in marks])
    boxes = [tick.label1.get_window_extent() for tick in marks]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    assert not any(label.get_text() for label in plot.xaxis.get_minorticklabels())


@pytest.mark.parametrize(
    ("size", "count", "below"), [((7.2, 4.4), 9, False), ((3.4, 2.4), 2, False), ((3.4, 2.4), 9, True)]
)
def test_a_legend_that_would_cover_small_axes_is_below_them(size: tuple[float, float], count: int, below: bool) -> None:
    from matplotlib.figure import Figure

    canvas = Figure(figsize=size, layout="constrained")
    plot = canvas.add_subplot()
    for number in range(count):
        plot.plot([0, 1], [number, number + 1], label=f"DiLoCo, seed {number}")
    explain(plot)
    canvas.draw_without_rendering()
    assert (plot.get_legend() is None) == below
    for legend in canvas.legends:
        box, axes, page = legend.get_window_extent(), plot.get_tightbbox(), canvas.bbox
        assert box.y1 <= axes.y0 and box.x0 >= 0 and box.x1 <= page.x1, "below the axes, on the page"
        assert axes.height > page.height / 3 and len(legend.get_texts()) == count


def test_a_page_without_room_is_refused(tmp_path: Path) -> None:
    matrix = Matrix("matrix", "Traffic between parties", ["A", "B"], [[0.0, 1.5], [2.5, 0.0]])
    with pytest.raises(InvalidSettings, match="matrix has no room on 1 x 1 inches with font size 40"):
        draw(matrix, tmp_path, Page(size=(1, 1), font_size=40))
    assert draw(matrix, tmp_path, Page(size=(12, 5))).stat().st_size > 1000


def test_the_bar_of_one_algorithm_is_as_wide_as_those_of_several_and_plain() -> None:
    from matplotlib.figure import Figure

    widths, hatches = [], []
    for modes in (["fsa"], ["fsa", "hfa", "sync", "esync", "mixed"]):
        plot = Figure(figsize=(7.2, 4.4)).add_subplot()
        bars(plot, Bars("b", "", "", {of(mode): [("", Mean(2.0, None, 1))] for mode in modes}), Page())
        low, high = plot.get_xlim()
        widths.append(plot.patches[0].get_width() / (high - low))
        hatches.append({bar.get_hatch() or "" for bar in plot.patches})
    assert widths[0] < 1.3 * widths[1] and hatches[0] == {""} and len(hatches[1]) == 5


def test_each_algorithm_has_a_look_of_its_own() -> None:
    looks = [style(mode) for mode in MODES]
    for field in ("colour", "marker", "hatch"):
        assert len({getattr(look, field) for look in looks}) == len(MODES), field
    assert style("hfa-niid").colour == style("hfa").colour and style("hfa-niid") != style("hfa")


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "geomx_cli", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.processes
def test_the_commands(base: Path, tmp_path: Path) -> None:
    done = command("draw", base, "-o", tmp_path / "out", "--format", "svg", "--csv", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted(str(path) for path in (tmp_path / "out").iterdir())
    assert (tmp_path / "out" / "matrix-hfa.csv").read_text().splitlines()[1] == "A,central,4.0"
    assert "note: no figure matrix-local: no traffic between its parties is recorded" in done.stderr
    (base / "cnn" / "hfa" / "A" / "cpu1" / "iter-2.txt").write_text("{")
    done = command("draw", "-b", base, "-n", "cnn", "--terminal")
    assert done.returncode == 7 and f"warning: {base}/cnn/hfa/A/cpu1/iter-2.txt: " in done.stderr
    assert "Test accuracy of cnn by traffic" in done.stdout and "⠤o⠤ ESync" in done.stdout
    done = command("compare", base / "cnn" / "hfa", base / "cnn" / "hfa-niid")
    assert done.returncode == 7
    assert "note: these jobs differ in more than the algorithm: --wan" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].split()[:7] == ["cnn", "HFA", "1", "15.0", "s", "3", "MB"] and lines[1].split()[-1] == "job-3"
    assert "HFA-Non-IID" in lines[2] and "0.4000" in lines[2]
    assert command("draw", "-b", base, "-n", "none").returncode == 3
    done = command("draw", base, "-o", tmp_path / "none", "--only", "accuracy,bytes", "--xlim", "50,60")
    assert done.returncode == 3 and "bytes is empty: no point lies within --xlim: the data are from" in done.stderr
    assert not (tmp_path / "none").exists()
    done = command("draw", base, "-o", tmp_path / "none", "--only", "accuracy,bytes", "--target", "80")
    assert done.returncode == 2 and "--target 80: an accuracy is above 0 and at most 1" in done.stderr
    done = command("draw", "-b", base, "-n", "cnn", "--terminal", "-o", "x", "--format", "svg")
    assert done.returncode == 2 and "--to, --format: no effect with --terminal" in done.stderr
    assert command("compare").returncode == 2 and command("compare", "nothing-like-it").returncode == 3


def test_a_round_of_workers_that_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """During the slow worker's second round, from 10 to 20 s, the fast one completes its 6th to 10th."""
    for device, rounds, seconds in (("cpu0", 3, 10.0), ("cpu1", 15, 2.0)):
        for number in range(1, rounds + 1):
            record = {"time": {"0": {}}, "num_samples": 1, "total_time": seconds * number, **TIMES, "communicate": 0.5}
            write(tmp_path / "cnn" / "async" / "A" / device, number, record)
    timeline = drawn(tmp_path)["timeline-async"]
    found = timeline.workers
    assert timeline.title.startswith("Round 2 of 3 of A/cpu0: cnn, ")
    assert (found["A/cpu0"][0].begin, found["A/cpu0"][-1].end) == (10.0, 20.0)
    assert (found["A/cpu1"][0].begin, found["A/cpu1"][-1].end) == (10.0, 20.0)
    assert sum(span.phase == "computes" for span in found["A/cpu1"]) == 5


def test_no_runs_at_all(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="there are no records in"):
        runs_in(tmp_path, "cnn")
