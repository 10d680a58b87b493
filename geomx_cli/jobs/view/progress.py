"""A job's progress: the states of its processes and their totals."""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from geomx_cli.core import events
from geomx_cli.core.agent_status import AgentStatus
from geomx_cli.core.events import VALIDATION_LOSS, Evaluated, Event
from geomx_cli.core.root_cause import Failure
from geomx_cli.jobs.view.outputs import outputs_of
from geomx_cli.jobs.view.reducer import ProcessState, result_warnings
from geomx_cli.plan import Plan, Process

__all__ = ["Progress", "Totals", "evaluator", "precedence"]

# Which process's test accuracy is the job's: the same for status, results, records, comparisons and the dashboard.


def precedence(process: Process) -> tuple[float, str]:
    """Return a key that is lowest for the process whose accuracy counts: by global rank, those without one last."""
    return (math.inf if process.global_rank is None else process.global_rank), process.name


def evaluator(rows: Iterable[ProcessState]) -> ProcessState | None:
    """Return the training worker of the lowest global rank that reports an accuracy; without one, another process that
    does; None if none does. The job's accuracy is its newest.
    """
    known = [row for row in rows if row.accuracy is not None]
    return min(known, key=lambda row: precedence(row.process), default=None)


_PHASES = ("starting", "waiting", "training", "evaluating", "finished")


@dataclass(frozen=True)
class Totals:
    """Totals over the job; None if unknown.

    samples_per_s: samples of all training workers divided by the longest training time of one.
    encoded, encoded_lan: see Traffic.
    datagrams, relayed: see Telemetry.
    outputs: see outputs.py.
    data: of each worker of the bundled job that has ended well: the place in its data (see ProcessFinished), and the
        samples on which it has trained.
    restarts: how often each restarted process was started again alone, and how often all workers were. warnings: why
    the numbers may not represent the algorithm.
    """

    accuracy: float | None
    validation_loss: float | None
    loss: float | None
    rounds: int
    samples_per_s: float
    training_s: float
    first_step_s: float | None
    lan: tuple[int, int]
    wan: tuple[int, int]
    encoded: tuple[int, int]
    encoded_lan: tuple[int, int]
    datagrams: dict[str, int] = field(default_factory=dict)
    relayed: dict[str, int] = field(default_factory=dict)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    data: dict[str, dict[str, int]] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The fields, with bytes under "bytes"."""
        fields = asdict(self)
        counted = {name: list(fields.pop(name)) for name in ("lan", "wan", "encoded", "encoded_lan")}
        return {**fields, "bytes": counted}


@dataclass
class Progress:
    """One row per process of the plan, in its order. All times are of one caller-supplied clock: launch and status use
    this machine's monotonic clock, as hosts' clocks may be wrong.

    evaluations: with their times, in order of arrival.
    failed_first: the processes whose failure ended the job, as far as known.
    ended: the phase of a job that is known to have ended, though hosts may not be reachable; "" of others.
    script_warning: see JobSpec.
    interrupted: the user has ended the job, and it is being stopped.
    """

    job: str
    rows: Mapping[str, ProcessState]
    began: float
    evaluations: list[tuple[float, Evaluated]] = field(default_factory=list)
    failed_first: Collection[str] = ()
    ended: Literal["", "finished", "stopped"] = ""
    script_warning: str = ""
    interrupted: bool = False

    @classmethod
    def of(cls, plan: Plan, began: float, clock: Callable[[], float] = time.monotonic) -> "Progress":
        """The progress of a job that started at `began`, by `clock`, without any events yet."""
        rows = {process.name: ProcessState(process, clock) for process in plan.processes}
        return cls(plan.job, rows, began, script_warning=plan.spec.script_warning)

    def mark_first_failure(self, failure: Failure) -> None:
        """Mark what failed, a process or all of a host, as the cause of the job's failure."""
        on_host = [name for name, row in self.rows.items() if row.process.host == failure.host]
        self.failed_first = [failure.process] if failure.process else on_host

    @property
    def training_rows(self) -> list[ProcessState]:
        """The rows of the training workers."""
        return [row for row in self.rows.values() if row.trains]

    @property
    def phase(self) -> str:
        """The state of the training worker that is furthest behind; "waiting" if all ended before they joined;
        "stopping" once a process has failed, or the user has interrupted the job, then "stopped" when all have ended.
        """
        if self.ended:
            return self.ended
        rows = self.rows.values()
        if self.interrupted:
            return "stopped" if self.over else "stopping"
        if any(row.status for row in rows) and all(row.status is not None for row in rows):
            return "stopped"
        if any(row.status and not row.asked for row in rows):
            return "stopping"
        known = [_PHASES.index(row.state) for row in self.training_rows if row.state in _PHASES]
        phase = _PHASES[min(known, default=0)]
        # Workers that ended without joining have not finished the job: its schedulers still wait for them.
        trained = any(row.round or row.samples or row.finished for row in self.training_rows)
        before = ("waiting",) if trained else ("starting", "waiting")  # events of a scheduler may be lost
        incomplete = any(row.process.role == "scheduler" and row.state in before for row in rows)
        return "waiting" if phase == "finished" and incomplete else phase

    @property
    def all_worked(self) -> bool:
        """Whether all workers have ended with status 0."""
        return all(row.status == 0 for row in self.rows.values() if row.process.role == "worker")

    @property
    def ended_as_asked(self) -> bool:
        """Whether a worker of the bundled job has ended because the job was asked to stop."""
        ends = [row.finished for row in self.rows.values()]
        return any(end is not None and end.stopped == "asked" for end in ends)

    @property
    def over(self) -> bool:
        """Whether all processes have ended."""
        return all(row.status is not None for row in self.rows.values())

    @property
    def listening(self) -> bool:
        """Whether all schedulers and servers have bound their ports, or have ended."""
        return all(row.state != "starting" for row in self.rows.values() if row.process.role != "worker")

    @property
    def done(self) -> float | None:
        """The completed fraction of the training, in [0, 1], of the slowest worker whose state is known. None if no
        worker reports it; scripts need not. Parties that are left out do not count.
        """
        rows = [row for row in self._present if not row.state.startswith("?") or row.progress is not None]
        if not rows or (all(row.progress is None for row in rows) and not all(row.status == 0 for row in rows)):
            return None
        return min((1.0 if row.status == 0 else row.progress or 0.0 for row in rows), default=0.0)

    @property
    def left_out(self) -> Mapping[str, str]:
        """The parties that are left out, see Telemetry."""
        told = (row.left_out for row in self.rows.values() if row.left_out and row.status is None)
        return next(told, {})

    @property
    def _present(self) -> list[ProcessState]:
        out = self.left_out
        return [row for row in self.training_rows if row.process.party not in out]

    @property
    def left_s(self) -> float | None:
        """Estimated seconds until the last worker is done; None once all have ended."""
        left = [row.left_s for row in self._present if row.left_s is not None and row.status is None]
        return max(left, default=None)

    @property
    def samples_per_s(self) -> float:
        """The current total rate of the training workers."""
        return sum(row.current_rate for row in self.training_rows)

    @property
    def loss(self) -> float | None:
        """The mean over the training workers."""
        known = [row.loss for row in self.training_rows if row.loss is not None]
        return sum(known) / len(known) if known else None

    @property
    def accuracy(self) -> float | None:
        """The newest test accuracy of the `evaluator`."""
        found = evaluator(self.rows.values())
        return None if found is None else found.accuracy

    @property
    def metrics(self) -> dict[str, float]:
        """The validation loss, and scripts' metrics: the mean of each over the training workers that report it."""
        known: dict[str, list[float]] = {}
        for row in self.training_rows:
            for name, value in row.metrics.items():
                known.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in known.items()}

    @property
    def first_step(self) -> float | None:
        """When the first training worker completed a step."""
        return min((row.first_step for row in self.training_rows if row.first_step is not None), default=None)

    def apply(self, process: str, event: Event, when: float) -> None:
        """Apply an event that a process wrote at `when`."""
        if (row := self.rows.get(process)) is not None:
            row.apply(event, when)
            if isinstance(event, Evaluated):
                self.evaluations.append((when, event))

    def begin_again(self) -> None:
        """All processes of the job are started again."""
        for row in self.rows.values():
            row.live_again()
        self.failed_first = ()

    def record_end(self, process: str, status: int, *, asked: bool = False, age: float = 0.0) -> None:
        """Record that a process ended `age` seconds ago."""
        self.rows[process].record_end(status, time.monotonic() - age, asked=asked)

    def apply_snapshot(self, host: str, status: AgentStatus, late: float = 0.0) -> None:
        """Merge an agent's status of the processes on its `host`, `late` seconds old. Malformed events are ignored;
        evaluations already shown are not shown again.
        """
        for name, known in status["processes"].items():
            if name not in self.rows or self.rows[name].process.host != host:
                continue
            row, now = self.rows[name], time.monotonic() - late
            for fields in known["newest"].values():
                with suppress(ValueError):
                    if (event := events.parse(fields)) is not None:
                        row.apply(event, now - (status["time"] - event.time))
            if known["status"] is not None:
                age = late + status["time"] - (known["ended"] or status["time"])
                self.record_end(name, known["status"], asked=known["asked"], age=age)
            elif known["state"] == "not started" and status["stage"] == "over":
                row.state = "not started"

    def absentee(self, patience: float) -> tuple[ProcessState, ProcessState] | None:
        """Return a worker that exited with status 0 more than `patience` seconds ago, and the scheduler that still
        waits for workers to join.
        """
        schedulers = {row.process.party: row for row in self.rows.values() if row.process.role == "scheduler"}
        limit = time.monotonic() - patience
        for row in self.rows.values():
            if row.process.role == "worker" and row.status == 0 and row.ended < limit:
                # With a single plane, one party has the scheduler.
                scheduler = schedulers.get(row.process.party) or next(iter(schedulers.values()))
                # A restarted scheduler waits for members that had joined before.
                if scheduler.state == "waiting" and not scheduler.restarts:
                    return row, scheduler
        return None

    def abandoned(self) -> Failure | None:
        """The failure of a job with `--on-worker-loss leave` in which no training worker is left; None while one is."""
        lost = [(row, row.left) for row in self.training_rows if row.left is not None]
        if not lost or len(lost) < len(self.training_rows):
            return None
        row, left = min(lost, key=lambda item: item[1].time)
        process = row.process
        return Failure(process.name, process.host, left.message, time.monotonic(), "no worker is left to go on")

    def totals(self) -> Totals:
        """The totals so far."""
        rows = self.rows.values()
        trained = self.training_rows
        training_s = max((row.training_s for row in trained), default=0.0)
        return Totals(
            accuracy=self.accuracy,
            validation_loss=self.metrics.get(VALIDATION_LOSS),
            loss=self.loss,
            rounds=max((row.round for row in trained), default=0),
            samples_per_s=sum(row.samples for row in trained) / training_s if training_s else 0.0,
            training_s=training_s,
            first_step_s=None if self.first_step is None else self.first_step - self.began,
            lan=_sum(row.traffic.lan for row in rows),
            wan=_sum(row.traffic.wan for row in rows),
            encoded=_sum(row.traffic.encoded for row in rows),
            encoded_lan=_sum(row.traffic.encoded_lan for row in rows),
            datagrams=dict(sum((Counter(row.datagrams) for row in rows), Counter[str]())),
            relayed=dict(sum((Counter(row.relayed) for row in rows), Counter[str]())),
            outputs=outputs_of(rows),
            data=_data(trained),
            restarts=_restarts(rows),
            warnings=list(filter(None, [self.script_warning, *result_warnings(rows)])),
        )


def _sum(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    known = list(pairs)
    return sum(first for first, _ in known), sum(second for _, second in known)


def _data(rows: Iterable[ProcessState]) -> dict[str, dict[str, int]]:
    ends = {row.process.name: row.finished for row in rows}
    return {
        name: {"epoch": end.place[0], "batches": end.place[1], "samples": end.samples or 0}
        for name, end in ends.items()
        if end is not None and end.place is not None
    }


def _restarts(rows: Iterable[ProcessState]) -> dict[str, int]:
    known = list(rows)
    together = max((row.together for row in known), default=0)
    own = {row.process.name: row.restarts for row in known if row.restarts}
    return {**({"all workers": together} if together else {}), **own}
