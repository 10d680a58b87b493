"""The one place where events become the state of a process: status, dashboard, reports and exports read that state.

What each of them shows beside it (curves, columns of rounds) it keeps itself, of the same typed events.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from geomx_cli.core.events import (
    Evaluated,
    Event,
    ProcessFailed,
    ProcessFinished,
    RoundCompleted,
    StateChanged,
    Telemetry,
    Traffic,
)
from geomx_cli.plan import Process

__all__ = ["ProcessState"]


@dataclass
class ProcessState:
    """What is known of one process, in whatever order its events are taken.

    state: as the process has said last, or how it ended. traffic: bytes so far. evaluations: test accuracy by round.
    samples, training_s: of all rounds, as far as agents have counted them, and what those took. recorded: the
    algorithm's own figures of its newest round. trains_since: Unix seconds of its host, None before it trains.
    first_round: when its first round was over, by the clock of the caller of `take`. failure: why it says that it
    fails; finished: that it has done its part.

    status, ended, asked: exit status, when it ended, whether somebody asked for that; an agent says so, not an event.
    """

    process: Process
    state: str = "starting"
    round: int = 0
    samples_per_s: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    waiting: float | None = None
    progress: float | None = None
    left_s: float | None = None
    traffic: Traffic = field(default_factory=Traffic)
    evaluations: dict[int, float] = field(default_factory=dict)
    samples: int = 0
    training_s: float = 0.0
    recorded: Mapping[str, float] = field(default_factory=dict)
    trains_since: float | None = None
    first_round: float | None = None
    failure: ProcessFailed | None = None
    finished: ProcessFinished | None = None
    status: int | None = None
    ended: float = 0.0
    asked: bool = False
    _newest: dict[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """Whether it is a training worker."""
        return self.process.global_rank is not None

    @property
    def accuracy_time(self) -> tuple[bool, float]:
        """Orders accuracies of several processes: that of the end, then the newest."""
        return self.finished is not None, self._newest.get("accuracy", (0, 0.0))[1]

    @property
    def telemetry_time(self) -> float:
        """When it wrote its newest telemetry, Unix seconds of its host; 0 before."""
        return self._newest.get("telemetry", (0, 0.0))[1]

    def take(self, event: Event, when: float) -> None:
        """Take in an event that was written at `when`, by the caller's clock."""
        match event:
            case StateChanged(state=state):
                self._enter(state, event)
                if state == "training":
                    self.trains_since = min(event.time, self.trains_since or event.time)
            case Telemetry():
                self._take_telemetry(event)
            case RoundCompleted():
                self._take_round(event, when)
            case Evaluated(round=number, accuracy=accuracy):
                self.evaluations[number] = accuracy
                self._note_accuracy(accuracy, event)
            case ProcessFailed():
                self.failure = event if self.failure is None or event.order < self.failure.order else self.failure
            case ProcessFinished():
                self.accuracy = self.accuracy if event.accuracy is None else event.accuracy
                self._enter("finished", event)
                self.finished = event

    def end(self, status: int, when: float, *, asked: bool) -> None:
        """The process has ended."""
        self.status, self.ended, self.asked = status, when, asked
        self.state = "finished" if status == 0 else "stopped" if asked else "ended"

    def _take_telemetry(self, event: Telemetry) -> None:
        self.round = max(self.round, event.round)
        self._note_loss(event.loss, event)
        self._note_accuracy(event.accuracy, event)
        self._is_newest("telemetry", event)
        if event.state:
            self._enter(event.state, event)
        for name in ("samples_per_s", "waiting", "progress", "left_s"):
            if (value := getattr(event, name)) is not None and self._is_newest(name, event):
                setattr(self, name, value)
        if event.bytes is not None and self._is_newest("traffic", event):
            self.traffic = event.bytes

    def _take_round(self, event: RoundCompleted, when: float) -> None:
        self.round = max(self.round, event.num_iters)
        self.samples = max(self.samples, event.samples)
        self.training_s = max(self.training_s, event.total_time)
        self.first_round = when if self.first_round is None else min(self.first_round, when)
        self._note_loss(event.loss, event)
        self._note_accuracy(event.accuracy, event)
        if self._is_newest("recorded", event):
            self.recorded = event.recorded

    def _enter(self, state: str, event: Event) -> None:
        # Telemetry that was being written when the process finished may come behind that.
        if self._is_newest("state", event) and self.status is None and self.finished is None:
            self.state = state

    def _note_loss(self, loss: float | None, event: Event) -> None:
        if loss is not None and self._is_newest("loss", event):
            self.loss = loss

    def _note_accuracy(self, accuracy: float | None, event: Event) -> None:
        # That of the end stands, whatever was evaluated before and is heard of later.
        if accuracy is not None and self._is_newest("accuracy", event):
            is_final = self.finished is not None and self.finished.accuracy is not None
            self.accuracy = self.accuracy if is_final else accuracy

    def _is_newest(self, what: str, event: Event) -> bool:
        """Whether nothing newer than `event` is known of it; then this is, from now on."""
        is_newest = event.order >= self._newest.get(what, (0, 0.0))
        if is_newest:
            self._newest[what] = event.order
        return is_newest
