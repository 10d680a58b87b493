"""What the views of a job print; and for whom agents are asked to wait after a failure."""

import io
import time
from typing import Any
from unittest.mock import Mock

from plans import planned

from geomx_cli.core.events import Evaluated, RoundCompleted, StateChanged
from geomx_cli.jobs.actions.watch import Watch
from geomx_cli.jobs.view import follow
from geomx_cli.jobs.view.follow import LineView, PlainView
from geomx_cli.jobs.view.progress import Progress


def test_one_of_many_jobs_shows_warnings_only() -> None:
    one, single = io.StringIO(), io.StringIO()
    for view in (LineView(one), PlainView(single)):
        view.note("agents ready")
        view.warn("party-worker-0: the loss is not a number")
    assert one.getvalue() == "party-worker-0: the loss is not a number\n"
    assert single.getvalue() == "agents ready\n" + one.getvalue()


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_continued_table_leaves_what_the_shell_printed(monkeypatch: Any) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(follow, "_REFRESH", 0)
    progress, out = Progress.of(planned(), 0.0), Terminal()
    view = follow.TableView(out)
    for _ in range(2):
        view.show(progress)
    assert (up := "\x1b[1A") in out.getvalue(), "a table is rewritten in its place"
    with view.suspended():
        before = len(out.getvalue())
    view.show(progress)
    assert "starting" in (again := out.getvalue()[before:]) and up not in again
    view.show(progress)
    view.close()
    assert up in out.getvalue()[before + len(again) :]


def test_a_slow_start_says_what_it_waits_for(monkeypatch: Any) -> None:
    """Each phase is named at once; after that, what is missing."""
    monkeypatch.setattr(follow, "_SLOW", 0)
    monkeypatch.setattr(follow, "_WAITING_EVERY", 0)
    monkeypatch.setattr(follow, "_LINE_EVERY", 0)
    progress, out = Progress.of(planned(), 0.0), io.StringIO()
    view = PlainView(out)

    def shown() -> str:
        before = len(out.getvalue())
        view.show(progress)
        view.show(progress)
        return out.getvalue()[before:]

    rows = progress.rows
    assert f"waiting for {len(rows)} of {len(rows)} processes to start: central/global_scheduler:0, " in shown()
    for name in list(rows)[:-1]:
        progress.apply(name, StateChanged(time=1.0, state="waiting"), 1.0)
    last = list(rows)[-1]
    assert f"starting, waiting for 1 of {len(rows)} processes to start: {last}\n" in shown()
    progress.apply(last, StateChanged(time=1.0, state="waiting"), 1.0)
    assert " s  waiting for all to join and for the initial values: " in shown()
    for name in rows:
        progress.apply(name, StateChanged(time=2.0, state="training"), 2.0)
    assert "training, round 0, waiting for the first round\n" in shown()
    worker = progress.training_rows[0].process.name
    progress.apply(worker, RoundCompleted(time=3.0, num_iters=1, num_samples=8, total_time=1.0), 3.0)
    assert "training, round 1\n" in shown()
    for name in rows:
        if name != last:
            progress.record_end(name, 0 if name == worker else 1)
    assert f"stopping, waiting for 1 process to end: {last}\n" in shown()


def test_an_accuracy_has_the_time_of_its_evaluation() -> None:
    progress, out = Progress.of(planned(), 100.0), io.StringIO()
    progress.apply("A/worker:0", Evaluated(time=5.0, round=1, accuracy=0.5), 112.5)
    PlainView(out).show(progress)
    assert "   12.5 s  test accuracy 0.5000\n" in out.getvalue()


def test_a_worker_that_has_reported_its_end_handles_the_failure_no_more() -> None:
    """If it hangs then, its agent ends it by SIGTERM, which nobody postpones."""
    plan, pool = planned(), Mock()
    worker = next(process for process in plan.processes if process.role == "worker")
    watch = Watch(plan, pool, Progress.of(plan, time.monotonic()), PlainView(io.StringIO()))
    for fields, postpones in (({"event": "state", "state": "failing"}, 1), ({"event": "failed", "message": "x"}, 0)):
        watch._handle_event(worker.host, worker.name, {**fields, "schema_version": 1, "time": time.time()}, 0.0)
        pool.reset_mock()
        watch._stop.check(plan.hosts, 0.0)
        assert [call.args[0]["type"] for call in pool.broadcast.call_args_list] == ["failing"] * postpones
