"""From events to the state of a process: in any order, and identical for all readers."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
from plans import planned

from geomx_cli.core.conventions import number_before
from geomx_cli.core.events import (
    Evaluated,
    Event,
    OutputsWritten,
    ProcessFailed,
    ProcessFinished,
    ProcessLeft,
    ProcessRestarted,
    Reported,
    RoundCompleted,
    StateChanged,
    Telemetry,
    Traffic,
    WarningRaised,
)
from geomx_cli.jobs.actions.job_stop import JobStop
from geomx_cli.jobs.actions.stop import LINGER, SAVING, Linger
from geomx_cli.jobs.view.progress import Progress
from geomx_cli.jobs.view.reducer import ProcessState
from geomx_cli.jobs.view.result import Outcome
from geomx_cli.jobs.view.table import party_totals, sentence

PEERS = {"B/server:0": (50, 60)}


def story() -> list[Event]:
    """A worker's events, each at a different time."""
    return [
        StateChanged(time=10.0, state="waiting"),
        StateChanged(time=11.0, state="training"),
        RoundCompleted(
            time=12.0, num_iters=1, total_time=1.0, samples=64, loss=2.0, recorded={"epsilon": 0.5},
            first_step=0.25,
        ),
        Telemetry(time=12.5, state="training", round=1, loss=2.0, samples_per_s=50.0, bytes=Traffic((1, 2), (3, 4))),
        Evaluated(time=13.0, round=1, accuracy=0.5),
        WarningRaised(time=13.1, message="the link is slow"),
        RoundCompleted(time=13.5, num_iters=2, total_time=2.5, samples=128, loss=1.0, recorded={"epsilon": 0.25}),
        Telemetry(
            time=14.0, state="evaluating", round=2, loss=1.0, accuracy=0.5, progress=1.0,
            bytes=Traffic((10, 20), (30, 40), PEERS),
        ),
        ProcessFinished(time=15.0, rounds=2, accuracy=0.75),
        Telemetry(time=15.1, state="finished", round=2, accuracy=0.5, progress=1.0, left_s=0.0),
        Evaluated(time=15.2, round=2, accuracy=0.625),
        OutputsWritten(time=15.3, files={"model.bin": 3}, count=1, bytes=3),
    ]  # fmt: skip


def reduced(events: list[Event]) -> ProcessState:
    state = ProcessState(planned().process("A/worker:0"))
    for event in events:
        state.apply(event, event.time)
    return state


def test_the_state_of_a_worker() -> None:
    state = reduced(story())
    assert (state.state, state.round, state.samples, state.training_s) == ("finished", 2, 128, 2.5)
    assert (state.loss, state.accuracy, state.samples_per_s, state.progress) == (1.0, 0.75, 50.0, 1.0)
    assert state.traffic == Traffic((10, 20), (30, 40), PEERS)
    assert state.evaluations == {1: 0.5, 2: 0.625} and state.recorded == {"epsilon": 0.25}
    assert (state.trains_since, state.first_step, state.telemetry_time) == (11.0, 11.25, 15.1)
    assert state.failure is None and state.trains
    assert state.outputs is not None and state.outputs.files == {"model.bin": 3}


def test_the_first_step_of_a_job_that_counts_on_the_seconds_of_another() -> None:
    first = RoundCompleted(time=12.0, num_iters=900, total_time=7201.0, samples=64, loss=2.0, first_step=0.25)
    state = reduced([StateChanged(time=11.0, state="training"), first])
    assert (state.first_step, state.training_s) == (11.25, 7201.0)


@pytest.mark.parametrize(("stopped", "begun"), [("asked", True), ("epochs", False)])
def test_a_stop_that_has_ended_quick_workers_before_its_notice(stopped: str, begun: bool) -> None:
    """Then they have saved, and the job may be resumed; unless they were done before it."""
    plan = planned()
    progress, outcome = Progress.of(plan, 0.0), Outcome()
    for name, row in progress.rows.items():
        if row.process.role == "worker":
            progress.apply(name, ProcessFinished(time=15.0, stopped=stopped), 15.0)
            progress.record_end(name, 0, asked=False)
    view = SimpleNamespace(warn=lambda _: None)
    unused: Any = SimpleNamespace(forbid=lambda: None)
    stop = JobStop(
        plan, unused, progress, view, outcome, restart_all=unused, checkpoint=unused, upload=unused  # type: ignore[arg-type]
    )
    assert stop.on_stopped_elsewhere("SIGTERM to B/worker:0", 5.0, ())
    assert stop.had_begun is begun and progress.all_worked


@pytest.mark.parametrize("seed", range(20))
def test_the_order_does_not_count(seed: int) -> None:
    events = [*story(), ProcessFailed(time=16.0, message="first"), ProcessFailed(time=17.0, message="second")]
    shuffled = random.Random(seed).sample(events, len(events))
    assert reduced(shuffled) == reduced(events)
    assert reduced([*shuffled, *shuffled[:5]]) == reduced(events), "an event that comes twice counts once"


def test_the_reports_of_a_script() -> None:
    events: list[Event] = [
        Reported(time=1.0, step=1, total_time=0.5, samples=64, loss=2.0, metrics={"lr": 0.5, "norm": 3.0}),
        Reported(time=2.0, step=2, total_time=1.5, samples=128, loss=1.0, metrics={"lr": 0.25}, samples_per_s=64.0),
        Reported(time=3.0, step=2, total_time=2.0, samples=128, accuracy=0.75),
    ]
    state = reduced(events)
    assert (state.step, state.samples, state.training_s, state.samples_per_s) == (2, 128, 2.0, 64.0)
    assert (state.loss, state.accuracy, state.metrics) == (1.0, 0.75, {"lr": 0.25, "norm": 3.0})
    for some in itertools.permutations(events):
        assert reduced(list(some)) == state
    assert state.round == 0 and state.first_step is None
    many = [Reported(time=1.0, step=1, total_time=1.0, metrics={f"m{number}": 1.0}) for number in range(100)]
    assert len(reduced(list(many)).metrics) == 64


def test_a_clock_that_is_set_back_does_not_count() -> None:
    events = [Telemetry(time=3600.0 + number, number=number, round=number, loss=1.0) for number in (1, 2)]
    events += [Telemetry(time=float(number), number=number, round=number, loss=0.5) for number in (3, 4)]
    assert reduced([*events]).loss == 0.5 and reduced(list(reversed(events))) == reduced([*events])


def lives() -> list[Event]:
    """A server's events, in two lives."""
    second = number_before(1)
    return [
        StateChanged(time=1.0, number=1, state="serving"),
        Telemetry(time=2.0, number=2, state="serving", round=3, bytes=Traffic((1, 2), (3, 4), {"B": (5, 6)}),
                  datagrams={"sent": 7}, relayed={"sent": 1}),
        Telemetry(time=3.0, number=3, state="serving", round=4, bytes=Traffic((10, 20), (30, 40), {"B": (50, 60)}),
                  datagrams={"sent": 70}, relayed={"sent": 1}),
        ProcessRestarted(time=3.5, number=second, incarnation=1, message="was killed by SIGKILL; started again"),
        Telemetry(time=2.5, number=second + 1, state="serving", round=5, bytes=Traffic((1, 1), (1, 1), {"C": (1, 1)}),
                  datagrams={"sent": 1, "late": 1}),
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_bytes_of_all_lives_are_added(seed: int) -> None:
    state = reduced(random.Random(seed).sample(lives(), 5))
    assert state.traffic == Traffic((11, 21), (31, 41), {"B": (50, 60), "C": (1, 1)})
    assert (state.datagrams, state.relayed) == ({"sent": 71, "late": 1}, {"sent": 1})
    assert (state.state, state.round, state.restarts) == ("serving", 5, 1)


def test_a_restarted_process_says_so_until_it_speaks() -> None:
    state = reduced(lives()[:4])
    assert (state.state, state.traffic.lan, state.failure) == ("restarted", (10, 20), None)
    progress = Progress.of(planned(), 0.0)
    for event in lives():
        progress.apply("A/server:0", event, event.time)
    totals = progress.totals()
    assert (totals.restarts, totals.lan) == ({"A/server:0": 1}, (11, 21))


@pytest.mark.parametrize("seed", range(10))
def test_all_begin_again(seed: int) -> None:
    second, third = number_before(1), number_before(2)
    events = [
        Telemetry(time=1.0, number=1, state="training", round=7),
        ProcessRestarted(time=2.0, number=second, incarnation=1, message="was killed by SIGKILL; started again"),
        Telemetry(time=3.0, number=second + 1, state="training", round=9),
        ProcessFailed(time=4.0, number=second + 2, message="A/worker:1 has died", peer="A/worker:1"),
        ProcessFinished(time=4.5, number=second + 3),
        ProcessRestarted(time=5.0, number=third, incarnation=2, together=1, message="all workers begin again"),
        Telemetry(time=6.0, number=third + 1, state="training", round=2),
    ]
    state = reduced(random.Random(seed).sample(events, len(events)))
    assert (state.state, state.round, state.failure, state.finished) == ("training", 2, None, None)
    assert (state.restarts, state.together) == (1, 1)


def test_a_job_that_all_workers_have_left_has_failed() -> None:
    progress = Progress.of(planned(), 0.0)
    names = [row.process.name for row in progress.training_rows]
    for number, name in enumerate(names):
        assert progress.abandoned() is None
        life = number_before(1)
        left = ProcessLeft(time=9.0 - number, number=life, incarnation=1, round=5, message="crashed (SIGSEGV)")
        progress.apply(name, left, left.time)
        progress.record_end(name, 0)
    failure = progress.abandoned()
    assert failure is not None and (failure.process, failure.cause) == (names[-1], "crashed (SIGSEGV)")
    assert progress.rows[names[0]].state == "left"
    assert f"{names[0]} left at round 5; means are over the other workers from then on" in progress.totals().warnings


def test_an_end_is_the_last_word() -> None:
    state = reduced([StateChanged(time=1.0, state="training")])
    state.record_end(9, 5.0, asked=True)
    state.apply(StateChanged(time=9.0, state="training"), 9.0)
    assert (state.state, state.status, state.ended, state.asked) == ("stopped", 9, 5.0, True)


def test_the_accuracy_of_a_job_is_the_newest_of_its_lowest_rank() -> None:
    progress = Progress.of(planned(), 0.0)
    assert progress.accuracy is None
    low, high = sorted(progress.training_rows, key=lambda row: row.process.global_rank or 0)[:2]
    progress.apply(high.process.name, Evaluated(time=1.0, round=1, accuracy=0.25), 1.0)
    assert progress.accuracy == 0.25
    for process, event in (
        (low.process.name, Evaluated(time=2.0, round=1, accuracy=0.5)),
        (high.process.name, Evaluated(time=3.0, round=2, accuracy=0.375)),
        ("nobody", Evaluated(time=9.0, round=1, accuracy=1.0)),
    ):
        progress.apply(process, event, event.time)
    assert progress.accuracy == 0.5
    assert [(when, event.accuracy) for when, event in progress.evaluations] == [(1.0, 0.25), (2.0, 0.5), (3.0, 0.375)]
    progress.apply(low.process.name, ProcessFinished(time=2.5, accuracy=0.125), 2.5)
    progress.apply(high.process.name, ProcessFinished(time=4.0, accuracy=0.75), 4.0)
    assert progress.accuracy == 0.125


@pytest.mark.parametrize(
    ("event", "lives"),
    [
        (Telemetry(time=5.0, samples_per_s=50.0), 10),
        (Reported(time=5.0, step=1, total_time=1.0, samples=8, samples_per_s=50.0, live=True), 30),
    ],
    ids=["telemetry", "report"],
)
def test_a_rate_without_news_is_none(event: Event, lives: float) -> None:
    """The disk may be full, or the worker save its model; other events are no news of the rate."""
    clock = [100.0]
    progress = Progress.of(planned(), 0.0, lambda: clock[0])
    progress.apply("A/worker:0", event, 100.0)
    progress.apply("A/worker:0", Telemetry(time=90.0, loss=1.0), 120.0)
    for clock[0], rate in ((100.0 + lives - 1, 50.0), (100.0 + lives, 0.0)):
        assert (progress.rows["A/worker:0"].current_rate, progress.samples_per_s) == (rate, rate)
    assert "samples/s" not in sentence(progress)
    assert party_totals(progress)[1].samples_per_s == 0


def test_workers_that_end_without_joining_have_not_finished_the_job() -> None:
    progress = Progress.of(planned(), 0.0)
    for row in progress.rows.values():
        if row.process.role == "scheduler":
            progress.apply(row.process.name, StateChanged(time=1.0, state="waiting"), 1.0)
    for row in progress.training_rows:
        progress.record_end(row.process.name, 0)
    assert progress.phase == "waiting"
    for row in progress.rows.values():
        progress.apply(row.process.name, StateChanged(time=2.0, state="running"), 2.0)
    assert progress.phase == "finished"


@pytest.mark.parametrize(("round_", "phase"), [(0, "waiting"), (3, "finished")])
def test_workers_that_end_before_anything_is_known_of_schedulers(round_: int, phase: str) -> None:
    """With a full disk that is so to the end, after rounds too."""
    progress = Progress.of(planned(), 0.0)
    for row in progress.training_rows:
        if round_:
            progress.apply(row.process.name, Telemetry(time=1.0, state="training", round=round_), 1.0)
        progress.record_end(row.process.name, 0)
    assert progress.phase == phase


def test_a_root_that_saves_its_optimizer_is_waited_for() -> None:
    progress, linger = Progress.of(planned(), 0.0), Linger(300.0)
    assert not linger.is_over(progress, 0.0, 1e9), "the workers still train"
    for row in progress.training_rows:
        progress.record_end(row.process.name, 0)
    assert not linger.is_over(progress, 1.0, 1e9) and not linger.is_over(progress, 301.0 + LINGER, 1e9)
    root = next(name for name, row in progress.rows.items() if row.process.role == "global_server")
    progress.apply(root, StateChanged(state="saving", time=1.0), 1.0)
    assert not linger.is_over(progress, 500.0, 1e9)
    progress.apply(root, ProcessFinished(time=2.0), 2.0)
    assert not linger.is_over(progress, 501.0, 1e9) and not linger.is_over(progress, 802.0 + LINGER, 1.0)
    assert linger.is_over(progress, 802.0 + LINGER, 1e9)
    progress.apply(root, StateChanged(state="saving", time=3.0), 3.0)
    assert linger.is_over(progress, 2.0 + SAVING, 1e9)
