"""Reduces events to process states; status, dashboard, reports and exports all read these states.

Additional data (curves, columns of rounds) is kept by each reader, from the same typed events.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from geomx_cli.core.agent_status import MAX_METRICS
from geomx_cli.core.conventions import life_of
from geomx_cli.core.events import (
    VALIDATION_LOSS,
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
from geomx_cli.core.units import some_of
from geomx_cli.plan import Process

__all__ = ["left_at", "result_warnings", "ProcessState"]

_End = TypeVar("_End", ProcessFailed, ProcessFinished, ProcessLeft)
_TELEMETRY_LIVES, _REPORTS_LIVE = 10.0, 30.0
"""Seconds for which a rate is current: telemetry comes once a second, reports as often as a script makes them."""


@dataclass
class ProcessState:
    """The state of one process. Events may be applied in any order.

    state: as last reported by the process, or how it ended; "restarted" until it reports again. restarts: how often it
    was started again alone. together: how often with all others of the job; reports of an earlier life about its end
    then no longer count. traffic: bytes so far, of all its lives. evaluations, validation_losses: test accuracy and
    validation loss by round.
    samples, training_s: totals over all rounds counted by agents, or all reports, and their duration. recorded: the
    algorithm's own metrics of its newest round. awaited, left_out: see Telemetry. step, metrics: the newest values that
    its script has reported, and the newest validation loss.
    trains_since: by the job's clock, None before training. first_step: end of its first step, by the same clock as
    the times given to `apply`. failure: the cause that the process reports. finished: it has completed its work.
    left: it has died, and the job continues without it. outputs: its saved files. result_warning: its first warning
    that affects the result.

    status, ended, asked: exit status, end time, and whether the end was requested; reported by agents, not by events.
    """

    process: Process
    clock: Callable[[], float] = time.monotonic
    state: str = "starting"
    restarts: int = 0
    together: int = 0
    round: int = 0
    samples_per_s: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    waiting: float | None = None
    progress: float | None = None
    left_s: float | None = None
    awaited: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    datagrams: dict[str, int] = field(default_factory=dict)
    relayed: dict[str, int] = field(default_factory=dict)
    evaluations: dict[int, float] = field(default_factory=dict)
    validation_losses: dict[int, float] = field(default_factory=dict)
    samples: int = 0
    training_s: float = 0.0
    recorded: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    trains_since: float | None = None
    first_step: float | None = None
    failure: ProcessFailed | None = None
    finished: ProcessFinished | None = None
    left: ProcessLeft | None = None
    outputs: OutputsWritten | None = None
    result_warning: str = ""
    status: int | None = None
    ended: float = 0.0
    asked: bool = False
    _rate_ends: float = 0.0
    _traffic: dict[int, Traffic] = field(default_factory=dict)
    _datagrams: dict[int, dict[str, int]] = field(default_factory=dict)
    _relayed: dict[int, dict[str, int]] = field(default_factory=dict)
    _newest: dict[str, tuple[int, float]] = field(default_factory=dict)
    _began_again: tuple[int, float] = (0, 0.0)
    _rounds: dict[int, int] = field(default_factory=dict)  # by life

    @property
    def trains(self) -> bool:
        """Whether it is a training worker."""
        return self.process.global_rank is not None

    @property
    def runs(self) -> bool:
        """Whether it runs, as far as is known: its agent may be gone, or not have started it."""
        return self.status is None and self.state != "not started" and not self.state.startswith("?")

    @property
    def current_rate(self) -> float:
        """Its samples per second; 0 if unknown, some seconds after the last news of it (the process saves, or cannot
        write its log), and once it has finished or ended.
        """
        trains = self.status is None and self.finished is None and self.clock() < self._rate_ends
        return self.samples_per_s or 0.0 if trains else 0.0

    @property
    def telemetry_time(self) -> float:
        """When it wrote its newest telemetry, by the job's clock; 0 before the first."""
        return self._newest.get("telemetry", (0, 0.0))[1]

    def apply(self, event: Event, when: float) -> None:
        """Apply an event written at `when`, by the caller's clock."""
        match event:
            case StateChanged(state=state):
                self._enter(state, event)
                if state == "training":
                    self.trains_since = min(event.time, self.trains_since or event.time)
            case Telemetry():
                self._apply_telemetry(event, when)
            case RoundCompleted():
                self._apply_round(event, when)
            case Reported():
                self._apply_report(event, when)
            case Evaluated():
                self._apply_evaluation(event)
            case ProcessFailed() | ProcessFinished() | ProcessLeft() if event.order < self._began_again:
                pass
            case ProcessFailed():
                self.failure = event if self.failure is None or event.order < self.failure.order else self.failure
            case WarningRaised(affects_result=True):
                self.result_warning = self.result_warning or event.message
            case ProcessRestarted():
                self.restarts = max(self.restarts, event.incarnation - event.together)
                if event.together > self.together:
                    self._begin_again(event)
                self._enter("restarted", event)
            case ProcessLeft():
                self.left = event
                self.result_warning = f"{self.process.name} {left_at(event)}"
                self._enter("leaving", event)
            case OutputsWritten():
                self.outputs = event if self._is_newest("outputs", event) else self.outputs
            case ProcessFinished():
                self.accuracy = self.accuracy if event.accuracy is None else event.accuracy
                if event.validation_loss is not None:
                    self._note_metric(VALIDATION_LOSS, event.validation_loss, event)
                self._enter("finished", event)
                self.finished = event

    def _begin_again(self, event: ProcessRestarted) -> None:
        self.together, self._began_again = event.together, event.order
        self.failure = _since(self.failure, event)
        self.finished = _since(self.finished, event)
        self.left = _since(self.left, event)
        self._count_rounds()

    def live_again(self) -> None:
        """The process was started again with all others, after its end was recorded."""
        self.status, self.ended, self.asked = None, 0.0, False

    def record_end(self, status: int, when: float, *, asked: bool) -> None:
        """Record the end of the process."""
        self.status, self.ended, self.asked = status, when, asked
        done = "finished" if self.left is None else "left"
        self.state = done if status == 0 else "stopped" if asked else "ended"

    def _apply_telemetry(self, event: Telemetry, when: float) -> None:
        self._note_round(event.round, event)
        self._note_loss(event.loss, event)
        self._note_accuracy(event.accuracy, event)
        if self._is_newest("telemetry", event):
            self.awaited, self.left_out = event.awaited, event.left_out
        if event.state:
            self._enter(event.state, event)
        self._note_rate(event.samples_per_s, event, when + _TELEMETRY_LIVES)
        for name in ("waiting", "progress", "left_s"):
            if (value := getattr(event, name)) is not None and self._is_newest(name, event):
                setattr(self, name, value)
        life = life_of(event.number)
        if event.bytes is not None and self._is_newest(f"traffic {life}", event):
            self._traffic[life] = event.bytes
            self.traffic = _all_of(list(self._traffic.values()))
        if event.datagrams and self._is_newest(f"datagrams {life}", event):
            self._datagrams[life] = event.datagrams
            self.datagrams = _added(self._datagrams.values())
        if event.relayed and self._is_newest(f"relayed {life}", event):
            self._relayed[life] = event.relayed
            self.relayed = _added(self._relayed.values())

    def _apply_round(self, event: RoundCompleted, when: float) -> None:
        self._note_round(event.num_iters, event)
        self.samples = max(self.samples, event.samples)
        self.training_s = max(self.training_s, event.total_time)
        first = when
        if event.first_step is not None:  # a round may have thousands of steps
            # Training may have begun in an earlier job, whose seconds `total_time` has too.
            here = event.time - self.trains_since if self.trains_since is not None else event.total_time
            first -= max(0.0, min(event.total_time, here) - event.first_step)
        self.first_step = first if self.first_step is None else min(self.first_step, first)
        self._note_loss(event.loss, event)
        self._note_accuracy(event.accuracy, event)
        if self._is_newest("recorded", event):
            self.recorded = event.recorded

    def _apply_report(self, event: Reported, when: float) -> None:
        self.samples = max(self.samples, event.samples)
        self.training_s = max(self.training_s, event.total_time)
        self._note_loss(event.loss, event)
        self._note_accuracy(event.accuracy, event)
        if self._is_newest("step", event):
            self.step = event.step
        self._note_rate(event.samples_per_s, event, when + _REPORTS_LIVE)
        for name, value in event.metrics.items():
            self._note_metric(name, value, event)

    def _apply_evaluation(self, event: Evaluated) -> None:
        if event.accuracy is not None:
            self.evaluations[event.round] = event.accuracy
            self._note_accuracy(event.accuracy, event)
        if event.validation_loss is not None:
            self.validation_losses[event.round] = event.validation_loss
            self._note_metric(VALIDATION_LOSS, event.validation_loss, event)

    def _note_metric(self, name: str, value: float, event: Event) -> None:
        if (name in self.metrics or len(self.metrics) < MAX_METRICS) and self._is_newest(f"metric {name}", event):
            self.metrics[name] = value

    def _enter(self, state: str, event: Event) -> None:
        # Telemetry written while the process finished may arrive after the finish event.
        ended = self.finished is not None and life_of(event.number) <= life_of(self.finished.number)
        if self._is_newest("state", event) and self.status is None and not ended:
            self.state = state

    def _note_round(self, round_: int, event: Event) -> None:
        life = life_of(event.number)
        self._rounds[life] = max(round_, self._rounds.get(life, 0))
        self._count_rounds()

    def _count_rounds(self) -> None:
        """Rounds begin anew where all processes have."""
        first = life_of(self._began_again[0])
        self.round = max((round_ for life, round_ in self._rounds.items() if life >= first), default=0)

    def _note_rate(self, rate: float | None, event: Event, ends: float) -> None:
        if rate is not None and self._is_newest("samples_per_s", event):
            self.samples_per_s, self._rate_ends = rate, ends

    def _note_loss(self, loss: float | None, event: Event) -> None:
        if loss is not None and self._is_newest("loss", event):
            self.loss = loss

    def _note_accuracy(self, accuracy: float | None, event: Event) -> None:
        # The final accuracy is kept, even if an earlier evaluation arrives later.
        if accuracy is not None and self._is_newest("accuracy", event):
            is_final = self.finished is not None and self.finished.accuracy is not None
            self.accuracy = self.accuracy if is_final else accuracy

    def _is_newest(self, what: str, event: Event) -> bool:
        """Return whether `event` is the newest of its kind; if so, remember it."""
        is_newest = event.order >= self._newest.get(what, (0, 0.0))
        if is_newest:
            self._newest[what] = event.order
        return is_newest


def _since(end: _End | None, event: Event) -> _End | None:
    """The end that a process has reported, if the report is newer than `event`; otherwise None."""
    return None if end is None or end.order < event.order else end


def left_at(event: ProcessLeft) -> str:
    """What the death of a worker means for the job's result, as a phrase to follow its name."""
    return f"left at round {event.round}; means are over the other workers from then on"


def _all_of(lives: Sequence[Traffic]) -> Traffic:
    """Add up what the lives of a process have sent and received."""
    if len(lives) == 1:
        return lives[0]
    names = dict.fromkeys(peer for one in lives for peer in one.peers)
    return Traffic(
        lan=_pair(one.lan for one in lives), wan=_pair(one.wan for one in lives),
        peers={peer: _pair(one.peers.get(peer, (0, 0)) for one in lives) for peer in names},
        encoded=_pair(one.encoded for one in lives), encoded_lan=_pair(one.encoded_lan for one in lives),
    )  # fmt: skip


def _pair(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    known = list(pairs)
    return sum(first for first, _ in known), sum(second for _, second in known)


def _added(lives: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return dict(sum((Counter(one) for one in lives), Counter[str]()))


# Which workers of a script have contributed to no round of the job, or to none between parties.

_MOST = 3  # names in a warning
_KEYLESS = (
    "no worker gave its parameters to geomx, as Trainer(..., kvstore=kv) does in MXNet and geomx.wrap in PyTorch"
)


def result_warnings(rows: Iterable[ProcessState]) -> list[str]:
    """Return why a job may not have trained one model on all its data, by its processes' ends and own warnings."""
    known = list(rows)
    return list(dict.fromkeys(filter(None, (_no_contribution(known), *(row.result_warning for row in known)))))


def _no_contribution(rows: Iterable[ProcessState]) -> str:
    """Return the warning of training workers whose script has ended without a contribution, or with contributions to
    rounds of their party only; "" for none.

    A script that only reads is no case: none of its workers contributes, and none reports training. A worker that
    pulls repeatedly beside others that train may evaluate.
    """
    training = [row for row in rows if row.trains]
    ends = {row.process.name: row.finished.contribution for row in training if row.finished is not None}
    apart = [name for name, end in ends.items() if end == "party"]
    if apart and len(apart) == len(training):
        return "nothing was exchanged between parties: the scripts ended before that (in hfa: after K1 x K2 steps)"
    if ends and len(ends) == len(training) and all(end == "keyless" for end in ends.values()):
        return f"no gradients were exchanged: {_KEYLESS}"
    others = any(end in ("rounds", "party") for end in ends.values())
    idle = [name for name, end in ends.items() if end == "alone" or (others and end in ("none", "keyless"))]
    if not idle:
        return f"{some_of(apart, _MOST)} exchanged with their own party only" if apart else ""
    if len(ends) == len(training) and all(end in ("alone", "keyless", "none") for end in ends.values()):
        return "no gradients were exchanged: each worker trained alone"
    return f"{some_of(idle, _MOST)} contributed to no round"
