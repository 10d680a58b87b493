"""How far a job is: what its processes have said, and what that comes to."""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from geomx_cli.core.agent_protocol import AgentStatus
from geomx_cli.core.events import Event
from geomx_cli.plan import Plan, Process

__all__ = ["Progress", "Row", "Totals"]

_PHASES = ("starting", "waiting", "training", "evaluating", "finished")


@dataclass
class Row:
    """The newest that is known of one process. Bytes are (sent, received); `status` and `ended` (when) are set once it
    has ended; `asked`: because somebody asked for it. is_final: it has said what its training has come to.
    """

    process: Process
    state: str = "starting"
    round: int = 0
    samples_per_s: float = 0.0
    loss: float | None = None
    accuracy: float | None = None
    lan: tuple[int, int] = (0, 0)
    wan: tuple[int, int] = (0, 0)
    progress: float | None = None
    left_s: float | None = None
    status: int | None = None
    ended: float = 0.0
    asked: bool = False
    samples: int = 0
    training_s: float = 0.0
    is_final: bool = False

    @property
    def trains(self) -> bool:
        """Whether it is a training worker."""
        return self.process.global_rank is not None


@dataclass(frozen=True)
class Totals:
    """What the whole job comes to; None where nothing is known.

    `samples_per_s` has the samples of all training workers over the seconds that the longest of them trained.
    """

    accuracy: float | None
    loss: float | None
    rounds: int
    samples_per_s: float
    training_s: float
    first_step_s: float | None
    lan: tuple[int, int]
    wan: tuple[int, int]

    def to_json(self) -> dict[str, Any]:
        """Its fields; bytes are under "bytes"."""
        fields = asdict(self)
        lan, wan = fields.pop("lan"), fields.pop("wan")
        return {**fields, "bytes": {"lan": list(lan), "wan": list(wan)}}


@dataclass
class Progress:
    """One row for each process of the plan, in its order. Times are of this machine's monotonic clock."""

    rows: Mapping[str, Row]
    began: float
    first_step: float | None = None
    accuracy: float | None = None
    evaluations: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, plan: Plan, began: float) -> "Progress":
        """That of a job which began at `began` and has said nothing yet."""
        return cls({process.name: Row(process) for process in plan.processes}, began)

    @property
    def training_rows(self) -> list[Row]:
        """Those of the training workers."""
        return [row for row in self.rows.values() if row.trains]

    @property
    def phase(self) -> str:
        """The state of the training worker that is least far; "stopping" once a process has failed, and
        "stopped" when all have ended then.
        """
        rows = self.rows.values()
        if any(row.status for row in rows) and all(row.status is not None for row in rows):
            return "stopped"
        if any(row.status and not row.asked for row in rows):
            return "stopping"
        known = [_PHASES.index(row.state) for row in self.training_rows if row.state in _PHASES]
        return _PHASES[min(known, default=0)]

    @property
    def listening(self) -> bool:
        """Whether all schedulers and servers have taken their ports, or have ended."""
        return all(row.state != "starting" for row in self.rows.values() if row.process.role != "worker")

    @property
    def done(self) -> float | None:
        """The part of the training that is done, between 0 and 1: that of the worker that is furthest back. None where
        no worker says: a script need not.
        """
        rows = self.training_rows
        if all(row.progress is None for row in rows) and not all(row.status == 0 for row in rows):
            return None
        return min((1.0 if row.status == 0 else row.progress or 0.0 for row in rows), default=0.0)

    @property
    def left_s(self) -> float | None:
        """Seconds until the last worker is done, as far as they know."""
        return max((row.left_s for row in self.training_rows if row.left_s is not None), default=None)

    @property
    def samples_per_s(self) -> float:
        """What the training workers do together now."""
        return sum(row.samples_per_s for row in self.training_rows if row.status is None)

    @property
    def loss(self) -> float | None:
        """The mean over the training workers."""
        known = [row.loss for row in self.training_rows if row.loss is not None]
        return sum(known) / len(known) if known else None

    def add(self, process: str, event: Event, age: float) -> None:
        """Take in an event that a process wrote `age` seconds ago. One that makes no sense is passed over."""
        row = self.rows.get(process)
        if row is None:
            return
        try:
            self._add(row, event, time.monotonic() - age)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
            return

    def end(self, process: str, status: int, *, asked: bool = False, age: float = 0.0) -> None:
        """A process has ended, `age` seconds ago."""
        row = self.rows[process]
        row.status, row.ended, row.asked = status, time.monotonic() - age, asked
        row.state = "finished" if status == 0 else "stopped" if asked else "ended"

    def restore(self, host: str, status: AgentStatus, late: float = 0.0) -> None:
        """Take in what an agent knew of the processes of its `host`, `late` seconds ago. What makes no sense in it is
        passed over.
        """
        for name, known in status["processes"].items():
            if name not in self.rows or self.rows[name].process.host != host:
                continue
            events = [event for event in known["newest"].values() if isinstance(event.get("time"), int | float)]
            for event in sorted(events, key=lambda event: event["time"]):
                age = late + status["time"] - event["time"]
                # An evaluation that was shown before is not to be shown again.
                self.add(name, {**event, "event": "restored"} if event.get("event") == "evaluation" else event, age)
            if known["status"] is not None:
                age = late + status["time"] - (known["ended"] or status["time"])
                self.end(name, known["status"], asked=known["asked"], age=age)
            elif known["state"] == "not started" and status["stage"] == "over":
                self.rows[name].state = "not started"

    def absentee(self, patience: float) -> tuple[Row, Row] | None:
        """A worker that ended well, longer than `patience` seconds ago, and the scheduler that still waits for
        workers to join.
        """
        schedulers = {row.process.party: row for row in self.rows.values() if row.process.role == "scheduler"}
        limit = time.monotonic() - patience
        for row in self.rows.values():
            if row.process.role == "worker" and row.status == 0 and row.ended < limit:
                # With one plane for all, one party has the scheduler.
                scheduler = schedulers.get(row.process.party) or next(iter(schedulers.values()))
                if scheduler.state == "waiting":
                    return row, scheduler
        return None

    def totals(self) -> Totals:
        """What it comes to so far."""
        rows = self.rows.values()
        trained = self.training_rows
        training_s = max((row.training_s for row in trained), default=0.0)
        return Totals(
            accuracy=self.accuracy,
            loss=self.loss,
            rounds=max((row.round for row in trained), default=0),
            samples_per_s=sum(row.samples for row in trained) / training_s if training_s else 0.0,
            training_s=training_s,
            first_step_s=None if self.first_step is None else self.first_step - self.began,
            lan=(sum(row.lan[0] for row in rows), sum(row.lan[1] for row in rows)),
            wan=(sum(row.wan[0] for row in rows), sum(row.wan[1] for row in rows)),
        )

    def _add(self, row: Row, event: Event, when: float) -> None:
        match event["event"]:
            case "state":
                row.state = str(event["state"])
            case "telemetry":
                _add_telemetry(row, event)
            case "round":
                _add_round(row, event)
                if row.trains:
                    self.first_step = when if self.first_step is None else min(self.first_step, when)
            case "finished":
                row.state, row.is_final = "finished", True
        # Telemetry that was being written when training ended may come behind "finished", and so does the newest round
        # of those that an agent passes on together: with an older accuracy.
        if event.get("accuracy") is not None and (event["event"] == "finished" or not row.is_final):
            row.accuracy = float(event["accuracy"])
            self.accuracy = row.accuracy
            if event["event"] == "evaluation":
                self.evaluations.append(row.accuracy)


def _add_telemetry(row: Row, event: Event) -> None:
    row.state = str(event.get("state", row.state))
    row.round = int(event.get("round", row.round))
    row.samples_per_s = float(event.get("samples_per_s", row.samples_per_s))
    row.loss = _number(event.get("loss"), row.loss)
    row.progress = _finite(_number(event.get("progress"), row.progress))
    row.left_s = _finite(_number(event.get("left_s"), row.left_s))
    counted = event.get("bytes", {})
    row.lan = _pair(counted.get("lan", row.lan))
    row.wan = _pair(counted.get("wan", row.wan))


def _add_round(row: Row, event: Event) -> None:
    row.round = int(event["num_iters"])
    row.loss = _number(event.get("loss"), row.loss)
    row.training_s = _finite(float(event["total_time"])) or 0.0
    row.samples = int(event["samples"])


def _number(value: Any, otherwise: float | None) -> float | None:
    return otherwise if value is None else float(value)


def _finite(value: float | None) -> float | None:
    """What can be shown as a duration or a bar; a loss may well be NaN."""
    return value if value is not None and math.isfinite(value) else None


def _pair(values: Any) -> tuple[int, int]:
    sent, received = values
    return int(sent), int(received)
