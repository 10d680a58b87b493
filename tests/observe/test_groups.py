"""Which runs are averaged, and how."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geomx_cli.core.errors import UsageError
from geomx_cli.core.units import format_bytes, format_duration
from geomx_cli.observe.report import RunRecords
from geomx_cli.observe.report.comparison import cells, compared, csv_rows, in_order, shown
from geomx_cli.observe.report.drawing import any_y, figures_of, left_out, painted, write_csv
from geomx_cli.observe.report.drawing import empty as nothing_shown
from geomx_cli.observe.report.figures import LOSS, Curves, Figures, Series, metric_curve
from geomx_cli.observe.report.groups import Curve, Mean, grouped, mean_curve, mean_of, not_in_means
from geomx_cli.observe.report.metadata import Metadata
from geomx_cli.observe.report.plots import Page, draw
from geomx_cli.observe.report.record import RoundRecord, WorkerRecords
from geomx_cli.observe.report.sources import Found
from geomx_cli.observe.report.styles import Axes

POINTS = st.tuples(st.floats(0, 100), st.floats(0, 1))
SERIES = st.lists(POINTS, min_size=2, max_size=9, unique_by=lambda point: point[0])


def run(mode: str = "fsa", seed: int = 1, job: str = "", rate: float = 1.0, **fields: Any) -> RunRecords:
    """Four rounds of `rate` seconds, whose accuracies end with 0.8 + seed / 100."""
    worker = WorkerRecords()
    for number in range(1, 5):
        accuracy = 0.8 + seed / 100 - 0.1 * (4 - number)
        worker.add(RoundRecord(number, {"0": {}}, 100, rate * number, accuracy, compute=0.5))
    options = {"algo": mode, "seed": seed, "lr": 0.1, "network": "cnn", **fields.pop("options", {})}
    script = fields.pop("script", [])
    job = job or f"{mode}-{seed}-{options['lr']}-{' '.join(script)}"
    metadata = Metadata(job, "central", options, script=script, **fields)
    return RunRecords(Path(job), "train" if script else "cnn", mode, {"A": {"cpu": worker}}, metadata)


def test_a_sweep_has_the_order_of_its_algorithms() -> None:
    groups = grouped([run("diloco"), run("fsa", seed=2), run("fsa"), run("hfa")])
    assert [group.mode for group in in_order(groups, ["hfa", "fsa", "diloco"])] == ["hfa", "fsa", "diloco"]
    assert [group.mode for group in in_order(groups, ["diloco", "hfa", "fsa"])] == ["diloco", "hfa", "fsa"]
    failed = [group if group.mode == "fsa" else replace(group, unfinished="failed") for group in groups]
    assert in_order(failed, ["hfa", "diloco", "fsa"])[0].mode == "fsa", "what is not done is last"


def labels(*runs: RunRecords, by: tuple[str, ...] = ()) -> dict[str, int]:
    return {group.label: len(group.runs) for group in grouped(runs, by)}


def test_runs_that_differ_in_their_seed_are_one_group() -> None:
    three = [run(seed=seed) for seed in (1, 2, 3)]
    assert labels(*three, run("hfa"), three[0]) == {"FSA": 3, "HFA": 1}, "one that is there twice counts once"
    fast = run(options={"lr": 0.5})
    assert labels(*three, fast, run("hfa", options={"lr": 0.2})) == {"FSA, lr 0.1": 3, "FSA, lr 0.5": 1, "HFA": 1}
    assert labels(*three, fast, by=("algo",)) == {"FSA": 4}
    seeds = list(labels(*three, run(seed=10), by=("seed",)))
    assert seeds == ["FSA, seed 1", "FSA, seed 2", "FSA, seed 3", "FSA, seed 10"]
    assert labels(three[0], run(seed=2, options={"compress": "fp16"}), by=("codec",)) == {
        "FSA, no compress": 1, "FSA, compress fp16": 1,
    }  # fmt: skip
    unused = [run(seed=seed, options={"k1": k1}) for seed, k1 in ((1, 5), (2, 10))]
    assert labels(*unused) == {"FSA": 2}, "an option of HFA has no effect on it"
    hfa = [run("hfa", options={"k1": k1}) for k1 in (5, 10)]
    assert labels(hfa[0], replace_job(hfa[1], "other")) == {"HFA, k1 5": 1, "HFA, k1 10": 1}
    for word, hint in (("speed", "did you mean seed?"), ("colour", "they differ in algo, lr, job, seed")):
        with pytest.raises(UsageError, match=f"--group-by {word}") as caught:
            grouped([*three, fast, replace_job(unused[0], "more"), hfa[0]], (word,))
        assert caught.value.hint == hint, "k1 is no difference: only one algorithm has it"


def test_the_usual_learning_rate_is_no_difference() -> None:
    usual, same = (run(job=str(lr), options={"lr": lr, "optimizer": "sgd"}) for lr in (0.0, 0.05))
    assert labels(usual, same) == {"FSA": 2}
    other = run(job="other", options={"lr": 0.1, "optimizer": "sgd"})
    assert labels(usual, same, other) == {"FSA, lr 0.05": 2, "FSA, lr 0.1": 1}
    scripts = [run(job=str(lr), script=["python", "train.py"], options={"lr": lr}) for lr in (0.0, 0.05)]
    assert labels(*scripts) == {"FSA, lr 0": 1, "FSA, lr 0.05": 1}, "scripts have rates of their own"


def test_different_scripts_are_never_averaged() -> None:
    one, other = (run(script=["python", name], job=name) for name in ("a/train.py", "b/train.py"))
    assert labels(one, other, by=("algo",)) == {"FSA (a/train.py)": 1, "FSA (b/train.py)": 1}
    versions = [run(script=["python", "train.py"], job=str(digest), script_digest=str(digest)) for digest in (1, 1, 2)]
    versions[1] = replace_job(versions[1], "again")
    assert labels(*versions) == {"FSA (1)": 2, "FSA (2)": 1}
    arguments = [run(script=["python", "train.py", "--size", size]) for size in ("8", "16")]
    assert labels(*arguments) == {"FSA, args --size 8": 1, "FSA, args --size 16": 1}
    assert labels(*arguments, by=("algo",)) == {"FSA": 2}
    assert labels(one, run()) == {"train: FSA": 1, "cnn: FSA": 1}
    unknown = [RunRecords(Path(f"{base}/cnn/esync"), "cnn", "esync", {}) for base in "ab"]
    assert labels(*unknown) == {"ESync (a/cnn/esync)": 1, "ESync (b/cnn/esync)": 1}


def test_jobs_that_are_not_done_are_in_no_mean() -> None:
    done = [run(seed=seed, job=f"done-{seed}", outcome=outcome) for seed, outcome in ((1, "done"), (2, ""))]
    left = [run(seed=seed, job=outcome, outcome=outcome) for seed, outcome in ((3, "failed"), (4, "running"))]
    groups = grouped([*left, *done])
    assert {group.label: [one.name for one in group.runs] for group in groups} == {
        "FSA": ["done-1", "done-2"], "FSA, failed (failed)": ["failed"], "FSA, running (running)": ["running"],
    }  # fmt: skip
    assert not_in_means(groups) == "not in the means: failed (failed), running (running)"
    assert not_in_means(groups[:1]) == ""
    rows = compared(groups, 0.8)
    assert [row.n for row in rows] == [2, 0, 0]
    accuracy = rows[0].means["accuracy"]
    assert accuracy is not None and (accuracy.n, accuracy.value) == (2, pytest.approx(0.815))
    assert [fields[2] for fields in csv_rows(rows, 0.8)] == ["n", 2, 0, 0]
    assert set(csv_rows(rows, 0.8)[2][4:]) == {None, 0}, "its figures are of no mean"
    curves = next(one for one in figures_of([*left, *done], ()).found if one.name == "accuracy")
    assert isinstance(curves, Curves)
    assert [(series.number, curve.n) for series, curve in curves.curves.items()] == [(0, 2), (1, 1), (2, 1)]
    only = grouped(left, ("seed",))
    assert [group.label for group in only] == ["FSA, seed 3, failed (failed)", "FSA, seed 4, running (running)"]
    assert [group.name for group in only] == ["fsa-seed-3-failed-failed", "fsa-seed-4-running-running"], "for a shell"


def test_a_finished_script_that_reports_nothing_is_no_problem() -> None:
    nothing: dict[str, dict[str, WorkerRecords]] = {"A": {"cpu": WorkerRecords()}}
    ends = (("a", "done"), ("b", "failed"))
    silent = [replace(run(job=name, outcome=outcome), workers=nothing) for name, outcome in ends]
    found = Found([run(), *silent])
    assert found.problems == ["b: no worker has recorded a round"]
    assert [note.partition(":")[0] for note in found.notes] == ["a"]


def test_a_script_that_may_not_be_for_its_algorithm_is_marked() -> None:
    assert labels(run("hfa", script=["python", "train.py"], warnings=["w"])) == {"HFA, see warnings": 1}


def replace_job(found: RunRecords, job: str) -> RunRecords:
    assert found.metadata is not None
    known = found.metadata
    metadata = Metadata(job, "central", known.options, script=known.script, script_digest=known.script_digest)
    return replace(found, metadata=metadata)


def test_means() -> None:
    assert mean_of([1.0, None, 3.0]) == Mean(2.0, pytest.approx(2**0.5), 2)
    assert mean_of([5.0]) == Mean(5.0, None, 1), "one value has no deviation"
    assert mean_of([None, float("nan")]) is None
    assert mean_curve([[(1.0, 0.5)], [(3.0, 0.7)]]) == Curve([2.0], [0.6], [pytest.approx(0.2 / 2**0.5)], 2)
    apart = mean_curve([[(1.0, 0.2), (2.0, 0.5)], [(3.0, 0.6), (4.0, 0.7)]])
    assert (apart.x, apart.y, apart.n) == ([3.0], [0.6], 2), "no common x: the last points"
    two = mean_curve([[(0.0, 0.0), (4.0, 4.0)], [(1.0, 1.0), (3.0, 5.0)]])
    assert (two.x, two.y, two.cut) == ([1.0, 3.0], [1.0, 4.0], True), "where both are"


@given(st.lists(SERIES, min_size=2, max_size=4))
def test_a_mean_curve_is_the_mean_at_each_x(runs: list[list[tuple[float, float]]]) -> None:
    ordered = [sorted(points) for points in runs]
    found = mean_curve(ordered)
    begin, end = max(points[0][0] for points in ordered), min(points[-1][0] for points in ordered)
    assert found.sd is not None and found.n == len(runs)
    if begin >= end:
        assert found.x == [pytest.approx(np.mean([points[-1][0] for points in ordered]))]
        return
    assert (found.x[0], found.x[-1]) == (begin, end)
    values = [np.interp(found.x, *zip(*points, strict=True)) for points in ordered]
    assert np.allclose(found.y, np.mean(values, axis=0)) and np.allclose(found.sd, np.std(values, axis=0, ddof=1))


def test_the_loss_is_averaged_over_workers_at_the_same_times() -> None:
    """One worker takes a second for each of 10 rounds, the other two for each of 5; the loss is the time."""
    workers = {"fast": WorkerRecords(), "slow": WorkerRecords(), "silent": WorkerRecords()}
    for seconds in range(1, 11):
        loss = float("nan") if seconds == 4 else float(seconds)
        workers["fast"].add(RoundRecord(seconds, {}, 1, float(seconds), loss=loss))
        if seconds % 2 == 0:
            workers["slow"].add(RoundRecord(seconds // 2, {}, 1, float(seconds), loss=float(seconds)))
    curve = metric_curve(RunRecords(Path(), "cnn", "fsa", {"A": workers}), LOSS)
    assert [seconds for seconds, _ in curve] == sorted(range(2, 11))
    assert all(loss == pytest.approx(seconds) for seconds, loss in curve)


def test_curves_outside_of_the_limits_are_not_in_the_legend() -> None:
    curves = {Series(label, "fsa"): Curve([x, x + 1], [0.1, 0.2]) for label, x in (("early", 0.0), ("late", 5.0))}
    figure = Curves("accuracy", "", "", "test accuracy", curves)
    cut, whole = painted(figure, Axes(xlim=(4.0, 7.0))), painted(figure, Axes(xlim=(0.5, 5.5)))
    assert "late" in cut and "early" not in cut and "late" in whole and "early" in whole
    found = Figures([figure])
    assert left_out(found, Axes(xlim=(4.0, 7.0))) == {"accuracy": "early (from 0 to 1)"}
    assert left_out(found, Axes(xlim=(0.5, 5.5))) == left_out(found, Axes(xlim=(8.0, 9.0))) == {}, "all or nothing"


def test_axes_without_a_point_say_why(tmp_path: Path) -> None:
    figure = Curves("loss", "", "", "test accuracy", {Series("FSA", "fsa"): Curve([0.0], [1.0])})
    assert Axes(logx=True, xlim=(3.0, 4.0)).x_limits(figure) == (3.0, 4.0)
    whys = {
        Axes(): "",
        Axes(logx=True): "no x is above 0, as a logarithmic axis (--logx) needs it",
        Axes(xlim=(3.0, 4.0)): "no point lies within --xlim: the data are from 0 to 0",
        Axes(ylim=(3.0, 4.0)): "no point lies within --ylim: the data are from 1 to 1",
    }
    for axes, why in whys.items():
        assert axes.nothing(figure) == why
        assert not why or why in painted(figure, axes)
        assert draw(figure, tmp_path, Page("svg", axes=axes)).exists()
    loss = replace(figure, y="loss, mean over workers")
    axes = Axes(ylim=(3.0, 4.0), target=0.8)
    assert axes.of(figure) == axes and axes.of(loss) == Axes(), "limits of accuracies"
    assert not nothing_shown(Figures([loss]), axes) and any_y(Figures([loss])) and not any_y(Figures([loss, figure]))
    assert list(nothing_shown(Figures([loss]), replace(axes, any_y=True))) == ["loss"]
    empty = replace(figure, curves={})
    assert Axes().nothing(empty) == Axes(logx=True).nothing(empty) == "no test accuracy was recorded"


@given(st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=9), st.booleans())
def test_limits_have_room_for_the_first_and_last_points(xs: list[float], logx: bool) -> None:
    figure = Curves("loss", "", "", "", {Series("FSA", "fsa"): Curve(sorted(xs), [1.0] * len(xs))})
    low, high = Axes(logx=logx).x_limits(figure)
    seen = [x for x in xs if x > 0 or not logx]
    assert low < high and all(low < x < high for x in seen)


def test_a_table_with_deviations(tmp_path: Path) -> None:
    rows = compared(grouped([*(run(seed=seed) for seed in (1, 2, 3)), run("hfa", seed=-3)]), 0.81)
    fsa, hfa = (dict(zip(row.means, cells(row, list(row.means)), strict=True)) for row in rows)
    assert fsa["accuracy"] == "0.8200 ± 0.0100" and fsa["time_to_target"] == "4.0 s ± 0.0 s"
    assert hfa["accuracy"] == "0.7700" and hfa["time_to_target"] == "-" and hfa["wan_bytes"] == "-"
    (slow,) = compared(grouped([run(seed=1, rate=30.0), run(seed=2, rate=30.1)]), 0.81)
    assert cells(slow, ["time_to_target"]) == ["2 min 00 s ± 0 s"], "to the precision of the mean"
    assert (format_duration(0.7, 6.7), format_bytes(2670, 15.1e6)) == ("0.7 s", "0.0 MB")
    assert [format_bytes(x, 1.53e6) for x in (588, 73e3, 1.46e6)] == ["0.00 MB", "0.07 MB", "1.46 MB"]
    assert (format_bytes(3e6, 681e6), format_bytes(4, 12)) == ("3 MB", "4 B")
    partly = compared(grouped([run(seed=seed) for seed in (1, 2, 3)]), 0.825)
    assert cells(partly[0], shown(partly))[0] == "4.0 s (1 of 3)"
    write_csv(tmp_path / "new" / "table.csv", csv_rows(rows, 0.81))
    with (tmp_path / "new" / "table.csv").open() as file:
        first, second = csv.DictReader(file)
    assert first["n"] == "3" and float(first["accuracy sd"]) == pytest.approx(0.01) and second["accuracy sd"] == ""
    assert second["time_to_0.81 (s)"] == "" and second["time_to_0.81 (s) n"] == "0", "what is unknown is not 0"
    assert rows[0].to_json()["jobs"] == [f"fsa-{seed}-0.1-" for seed in (1, 2, 3)]


def test_figures_of_groups() -> None:
    found = figures_of([run(seed=1), run(seed=3, rate=2.0), run("hfa")], (), ("accuracy", "computing"))
    assert [figure.name for figure in found.found] == ["accuracy", "computing"] and not found.missing
    accuracy = found.found[0]
    assert isinstance(accuracy, Curves)
    fsa, hfa = accuracy.curves.values()
    assert (fsa.n, fsa.x[0], fsa.x[-1]) == (2, 2.0, 4.0) and hfa.sd is None
    assert fsa.y[-1] == pytest.approx((0.81 + 0.63) / 2), "of the slower one at this time"
    assert "FSA (mean of 2)" in painted(accuracy, Axes(ylim=(0, 1)))
    assert accuracy.note == "means until the first run ends" and f"({accuracy.note})" in painted(accuracy, Axes())
    alone = figures_of([run(seed=1), run("hfa")], (), ("accuracy",)).found[0]
    assert isinstance(alone, Curves) and not alone.note
    assert Axes(logx=True).x_limits(accuracy) == (pytest.approx(1 / 4**0.025), pytest.approx(4 * 4**0.025))
    assert Axes().x_limits(accuracy) == (0.0, 4.1) and Axes(xlim=(2, 3)).x_limits(accuracy) == (2, 3)
    with pytest.raises(UsageError, match="--only speed"):
        figures_of([run()], (), ("speed",))
