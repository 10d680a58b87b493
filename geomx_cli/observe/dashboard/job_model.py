"""The page's model of a running or finished job: the states of its processes, and curves, links between parties, and
messages.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from geomx_cli.core.events import Evaluated, Event, ProcessFailed, ProcessFinished, Telemetry, Traffic, WarningRaised
from geomx_cli.core.untrusted import plain
from geomx_cli.jobs.view.progress import Progress
from geomx_cli.jobs.view.reducer import ProcessState
from geomx_cli.observe.dashboard.downsampled_series import DownsampledSeries, Flow
from geomx_cli.plan import Plan

__all__ = ["ENDS", "JobModel"]

MESSAGES = 200
MOST_CURVES = 12
AHEAD = 600.0  # seconds: largest accepted clock offset, and gap between byte counts
MARGIN = 5.0  # seconds: largest expected delay of an event
FIELDS = ("round", "samples_per_s", "loss", "accuracy", "waiting", "progress", "left_s")
MEANS = ("accuracy", "loss", "waiting")
ENDS = ("finished", "failed")
"""Final states of a process."""


@dataclass
class _Sender:
    """heard: time of the process's last event, by this machine's clock; 0 for never. counted: seconds of its newest
    byte count. rates: bytes per second that it sends to each process of other parties.
    """

    heard: float = 0.0
    counted: float = 0.0
    rates: Mapping[str, float] = field(default_factory=dict)


class JobModel:
    """`take` adds an event, `snapshot` returns the current state. Both are thread-safe.

    Times are seconds since the job `began` (Unix seconds), by the clocks of its hosts.
    """

    def __init__(self, plan: Plan, began: float) -> None:
        self.progress = Progress.of(plan, began)
        self._silence = float(plan.spec.options["silence"]) + MARGIN
        self._senders = {name: _Sender() for name in self.progress.rows}
        self._last = 0.0
        self._curves: dict[str, dict[str, DownsampledSeries]] = {"accuracy": {}, "loss": {}, "waiting": {}, "speed": {}}
        self._sent: dict[str, Flow] = {}
        self._messages: deque[dict[str, Any]] = deque(maxlen=MESSAGES)
        self._lock = threading.Lock()
        training = [row.process for row in self.progress.training_rows]
        self._groups = {
            one.name: one.name if len(training) <= MOST_CURVES else f"party {one.party}" for one in training
        }

    def take(self, process: str, event: Event) -> None:
        """Add an event of a process; events of unknown processes or from the future are ignored."""
        row = self.progress.rows.get(process)
        if row is None or event.time > time.time() + AHEAD:
            return
        with self._lock:
            seconds = max(0.0, event.time - self.progress.began)
            self._senders[process].heard = time.monotonic()
            self._last = max(self._last, seconds)
            before = row.traffic
            self.progress.take(process, event, event.time)
            self._extend(row, event, seconds, before)

    def say(self, message: str) -> None:
        """Add a message of the dashboard itself."""
        with self._lock:
            self._messages.append(_message(self._last, "", "note", message))

    def snapshot(self, *, over: bool = False) -> dict[str, Any]:
        """Return processes, curves, links and messages for JSON, and the bytes before and after encoding by each
        option that names a codec. `over`: nothing of the job runs any more.
        """
        with self._lock:
            rows = self.progress.rows
            states = {name: self._state(row, over=over) for name, row in rows.items()}
            curves = {
                name: {group: curve.points() for group, curve in sorted(known.items())}
                for name, known in self._curves.items()
            }
            totals = self.progress.totals()
            return {
                "seconds": round(self._last, 1),
                "encoded": {"compress": totals.encoded, "compress-lan": totals.encoded_lan},
                "processes": [_shown(row, states[name]) for name, row in rows.items()],
                "curves": {**curves, "wan": {party: flow.points() for party, flow in sorted(self._sent.items())}},
                "links": self._links({name for name, state in states.items() if state not in (*ENDS, "ended", "lost")}),
                "messages": list(self._messages),
            }

    def _state(self, row: ProcessState, *, over: bool) -> str:
        state, heard = "failed" if row.failure else row.state, self._senders[row.process.name].heard
        silent = heard and time.monotonic() - heard > self._silence
        return state if state in ENDS or not (over or silent) else "ended" if over else "lost"

    def _extend(self, row: ProcessState, event: Event, seconds: float, before: Traffic) -> None:
        """Extend curves and messages by an event already applied to `row`; `before`: its bytes before that."""
        name = row.process.name
        match event:
            case Telemetry():
                group = self._groups.get(name)
                if group is not None and row.state == "training":
                    for curve, value in (
                        ("loss", event.loss), ("speed", event.samples_per_s), ("waiting", event.waiting)
                    ):  # fmt: skip
                        self._add(curve, group, seconds, value, name)
                if event.bytes is not None:
                    self._add_bytes(row, event.bytes, before, seconds)
            case Evaluated() | ProcessFinished():
                self._add("accuracy", "accuracy", seconds, event.accuracy, name)
            case WarningRaised():
                self._messages.append(_message(seconds, name, "warning", event.message))
            case ProcessFailed():
                text = "; ".join(filter(None, (event.message, event.hint)))
                self._messages.append(_message(seconds, name, "failed", text))

    def _add_bytes(self, row: ProcessState, counts: Traffic, before: Traffic, seconds: float) -> None:
        sender = self._senders[row.process.name]
        passed = seconds - sender.counted
        if sender.counted and 0 < passed < AHEAD:
            sent = {peer: max(0, pair[0] - before.peers.get(peer, (0, 0))[0]) for peer, pair in counts.peers.items()}
            sender.rates = {peer: count / passed for peer, count in sent.items()}
            self._sent.setdefault(row.process.party, Flow()).add(sender.counted, seconds, sum(sent.values()))
        sender.counted = max(seconds, sender.counted)

    def _add(self, curve: str, group: str, seconds: float, value: float | None, process: str) -> None:
        if value is not None and math.isfinite(value):
            known = self._curves[curve].setdefault(group, DownsampledSeries(summed=curve not in MEANS))
            known.add(seconds, value, process)

    def _links(self, running: set[str]) -> list[dict[str, Any]]:
        """Return the current rate between each pair of parties, from the `running` processes, and the total."""
        total: dict[tuple[str, str], list[float]] = {}
        rows = self.progress.rows
        for name, row in rows.items():
            for peer, (sent, _) in row.traffic.peers.items():
                other = rows.get(peer)
                if other is not None and other.process.party != row.process.party:
                    pair = total.setdefault((row.process.party, other.process.party), [0.0, 0.0])
                    pair[0] += sent
                    pair[1] += self._senders[name].rates.get(peer, 0.0) if name in running else 0.0
        return [
            {"from": sender, "to": receiver, "bytes": round(sent), "bytes_per_s": round(rate)}
            for (sender, receiver), (sent, rate) in sorted(total.items())
        ]


def _message(seconds: float, process: str, kind: str, text: str) -> dict[str, Any]:
    return {"seconds": round(seconds, 1), "process": process, "kind": kind, "text": plain(text)}


def _shown(row: ProcessState, state: str) -> dict[str, Any]:
    """Return a process's known figures; unknown ones are omitted, None stands for NaN or infinity."""
    process = row.process
    said = FIELDS if row.telemetry_time else ()
    known = {name: value for name in said if (value := getattr(row, name)) is not None}
    return {
        "name": process.name, "party": process.party, "role": process.role, "host": process.host,
        "trains": row.trains, "state": state, "wan": row.traffic.wan,
        **{name: value if math.isfinite(value) else None for name, value in known.items()},
    }  # fmt: skip
