"""`report`: what it takes and refuses, and what it writes to the event log."""

import json
import math
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geomx_cli.core.event_log import EventLog
from geomx_cli.core.events import Reported, WarningRaised, parse
from geomx_cli.runtime.script import reports
from geomx_cli.runtime.script.reports import EARLY, Reporter


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    events = EventLog(tmp_path / "log.jsonl")
    yield events
    events.close()


def written(folder: Path) -> list[Reported]:
    events = [parse(json.loads(line)) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [event for event in events if isinstance(event, Reported)]


def report(reporter: Reporter, **values: Any) -> None:
    named = {name: values.pop(name, None) for name in ("step", "samples", "loss", "accuracy")}
    reporter.report(**named, metrics=values)


def test_what_is_written(log: EventLog, tmp_path: Path) -> None:
    reporter = Reporter()
    report(reporter, samples=64, loss=2)  # before the worker has joined
    reporter.begin(log)
    report(reporter, samples=np.int64(32), loss=np.float32(0.5), lr=np.array(0.25), **{"layer1/grad-norm": math.nan})
    report(reporter, step=7, accuracy=np.float16(0.5), depth=True)
    report(reporter, loss=math.inf)
    reporter.close()
    first, second, third, fourth = written(tmp_path)
    assert [event.step for event in (first, second, third, fourth)] == [0, 1, 7, 7]
    assert [event.samples for event in (first, second, third, fourth)] == [64, 96, 96, 96], "totals"
    assert (first.loss, second.loss, third.loss, fourth.loss) == (2.0, 0.5, None, math.inf)
    assert second.metrics["lr"] == 0.25 and math.isnan(second.metrics["layer1/grad-norm"])
    assert (third.accuracy, third.metrics) == (0.5, {"depth": 1.0})
    assert 0 == first.total_time <= second.total_time <= third.total_time
    assert [event.live for event in (second, third, fourth)] == [True] * 3, "different values"
    assert not first.live, "a later one has the loss"
    assert second.samples_per_s is not None and second.samples_per_s > 0
    assert third.samples_per_s is None and fourth.samples_per_s is None, "no samples, no new rate"
    report(reporter, loss=1.0)
    assert len(written(tmp_path)) == 4, "nothing after the end"


def test_a_loss_that_is_not_finite_is_told_once(
    log: EventLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = Reporter()
    reporter.begin(log)
    for loss in (0.5, math.nan, math.nan):
        report(reporter, loss=loss)
    reporter.close()
    events = [parse(json.loads(line)) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    (warning,) = (event for event in events if isinstance(event, WarningRaised))
    assert warning.affects_result and warning.message.startswith("the loss is nan: ")
    assert capsys.readouterr().err == f"warning: {warning.message}\n"


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"loss": "0.5"}, TypeError),
        ({"loss": np.zeros(64)}, TypeError),
        ({"loss": np.array("low")}, TypeError),
        ({"grad": [1.0]}, TypeError),
        ({"grad": 1j}, TypeError),
        ({"step": 1.0}, TypeError),
        ({"samples": -1}, ValueError),
        ({"accuracy": 81.2}, ValueError),
        ({"a b": 1.0}, ValueError),
        ({"a" * 65: 1.0}, ValueError),
    ],
)
def test_what_is_refused(values: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(values))):
        report(Reporter(), **values)


class Later:
    """A scalar that a device computes; `copies`: as a framework's own ones have them."""

    shape = (1,)

    def __init__(self, value: float) -> None:
        self.value = value
        self.computed = threading.Event()

    def copy(self) -> "Later":
        copied = Later(self.value)
        copied.computed = self.computed
        return copied

    def item(self) -> float:
        assert self.computed.wait(20)
        return self.value


def test_a_value_that_is_not_computed_yet_keeps_nobody_waiting(log: EventLog, tmp_path: Path) -> None:
    reporter, loss, share = Reporter(), Later(0.5), Later(50.0)
    reporter.begin(log)
    report(reporter, loss=loss, accuracy=share)
    loss.value = 7.0  # the script computes in place
    for one in (loss, share):
        one.computed.set()
    reporter.close()
    (event,) = written(tmp_path)
    assert event.loss == 0.5 and event.accuracy is None
    warnings = [parse(json.loads(line)) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert "an accuracy of 50 is ignored" in str([one for one in warnings if isinstance(one, WarningRaised)])


def test_values_that_a_failed_job_never_computes_are_not_recorded(
    log: EventLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As MXNet has them: the first that is read raises the failure, the others are what was in memory."""

    class Lost(Later):
        def copy(self) -> "Lost":
            return self

        def item(self) -> float:
            if has_failed.is_set():
                return 0.0
            has_failed.set()
            raise RuntimeError("siteB/worker:1 has been silent for 10 s")

    has_failed = threading.Event()
    reporter = Reporter()
    reporter.begin(log, has_failed.is_set)
    done = Later(0.5)
    done.computed.set()
    report(reporter, step=1, samples=64, loss=done)
    reporter.flush()
    for step in (2, 3, 4):
        report(reporter, step=step, samples=64, loss=Lost(0.0), accuracy=Lost(0.0), my_metric=3.0)
    report(reporter, step=5, known=1.0)
    reporter.close()
    found = [(event.step, event.loss, event.metrics) for event in written(tmp_path)]
    assert found == [(1, 0.5, {}), (5, None, {"known": 1.0})]
    assert capsys.readouterr().err == ""


def test_values_of_a_script_that_runs_ahead_are_stamped_when_they_are_ready(
    log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script queues 400 steps of 0.1 s at once, as it does not wait for the device."""
    clock = [100.0]
    monkeypatch.setattr(reports.time, "monotonic", lambda: clock[0])

    class Ready(Later):
        def copy(self) -> "Ready":
            return self

        def item(self) -> float:
            clock[0] = max(clock[0], self.value)
            return self.value

    reporter = Reporter()
    reporter.begin(log)
    reporter._thread = threading.Thread()  # this one writes
    for step in range(1, 401):
        report(reporter, samples=32, loss=Ready(100 + 0.1 * step))
    report(reporter, lr=0.5)
    reporter.flush()
    *steps, last = written(tmp_path)
    assert [event.total_time for event in steps] == pytest.approx([0.1 * step for step in range(1, 401)])
    assert last.total_time == steps[-1].total_time, "time does not go back"
    live = [event for event in steps if event.live]
    assert 50 < len(live) < 100 and live[-1] is steps[-1]
    assert [event.samples_per_s for event in live] == pytest.approx([320] * len(live))


def test_of_frequent_reports_few_are_forwarded(
    log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports.time, "monotonic", lambda: 100.0)  # all within one interval
    reporter = Reporter()
    for number in range(1000):
        report(reporter, step=number, loss=number)
    report(reporter, accuracy=0.5)
    reporter.begin(log)
    reporter.close()
    events = written(tmp_path)
    assert [event.step for event in events] == [*range(1000), 999]
    assert [event.step for event in events if event.live] == [999, 999] and events[-1].accuracy == 0.5


def test_names_are_bounded(log: EventLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter()
    reporter.begin(log)
    for number in range(70):
        report(reporter, **{f"loss_{number}": 1.0})
    reporter.close()
    assert len({name for event in written(tmp_path) for name in event.metrics}) == 64
    assert capsys.readouterr().err.count("are ignored") == 1


def test_threads_report_together(log: EventLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter()
    for _ in range(EARLY + 5):
        report(reporter, samples=1)
    reporter.begin(log)
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [
        threading.Thread(target=lambda: [report(reporter, samples=1, loss=1.0) for _ in range(500)]) for _ in range(4)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240)
    finally:
        sys.setswitchinterval(switching)
    reporter.close()
    events = written(tmp_path)
    assert [event.samples for event in events] == [*range(1, EARLY + 1), *range(EARLY + 6, EARLY + 2006)]
    assert [event.step for event in events[EARLY:]] == list(range(EARLY + 5, EARLY + 2005))
    assert "5 reports were dropped" in capsys.readouterr().err, "all samples count, though"


def test_a_script_that_runs_alone_keeps_nothing() -> None:
    reporter = Reporter()
    for number in range(2 * EARLY):
        report(reporter, step=number)
    assert len(reporter._queue) == EARLY
    reporter.begin(EventLog(None))
    report(reporter, loss=1.0)
    reporter.close()
    assert reporter._thread is None
