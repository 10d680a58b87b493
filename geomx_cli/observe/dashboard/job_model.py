"""What is known of a job, folded from its processes' events: the same for one that runs and one that is over."""

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from geomx_cli.core.events import Event
from geomx_cli.core.untrusted import plain
from geomx_cli.observe.dashboard.downsampled_series import DownsampledSeries, Flow
from geomx_cli.plan import Plan, Process

__all__ = ["ENDS", "JobModel"]

MESSAGES = 200
MOST_CURVES = 12
AHEAD = 600.0  # seconds that a clock may be ahead, or that lie between two counts of bytes
MOST = 1e18
MARGIN = 5.0  # seconds that an event may take to come here
FIELDS = ("round", "samples_per_s", "loss", "accuracy", "waiting", "progress", "left_s")
MEANS = ("accuracy", "loss", "waiting")
ENDS = ("finished", "failed")
"""States after which a process says no more."""


@dataclass
class _Row:
    """The newest of one process. heard: when, by this machine's clock. shown: its newest figures; None for one that is
    no number. rates: bytes a second that it sends to each process of other parties.
    """

    process: Process
    state: str = "starting"
    heard: float = 0.0
    counted: float = 0.0
    shown: dict[str, float | None] = field(default_factory=dict)
    peers: dict[str, int] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    wan: tuple[int, int] = (0, 0)


class JobModel:
    """`take` folds an event in, `snapshot` tells what is known by now. Any thread may call either.

    Times are seconds since the job `began` (Unix seconds), by the clocks of its hosts.
    """

    def __init__(self, plan: Plan, began: float) -> None:
        self._began = began
        self._silence = float(plan.spec.options["silence"]) + MARGIN
        self._rows = {process.name: _Row(process) for process in plan.processes}
        self._last = 0.0
        self._curves: dict[str, dict[str, DownsampledSeries]] = {"accuracy": {}, "loss": {}, "waiting": {}, "speed": {}}
        self._sent: dict[str, Flow] = {}
        self._messages: deque[dict[str, Any]] = deque(maxlen=MESSAGES)
        self._lock = threading.Lock()
        training = [process for process in plan.processes if process.global_rank is not None]
        self._groups = {
            one.name: one.name if len(training) <= MOST_CURVES else f"party {one.party}" for one in training
        }

    def take(self, process: str, event: Event) -> None:
        """Take in what a process wrote. What makes no sense in it is passed over."""
        row = self._rows.get(process)
        if row is None:
            return
        with self._lock:
            try:
                when = float(event["time"])
                if 0 < when < time.time() + AHEAD:
                    self._take(row, event, max(0.0, when - self._began))
            except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
                return

    def say(self, message: str) -> None:
        """Add a message of the dashboard's own."""
        with self._lock:
            self._messages.append(_message(self._last, "", "note", message))

    def snapshot(self, *, over: bool = False) -> dict[str, Any]:
        """As JSON: processes, curves, links between parties, messages. `over`: nothing of the job runs any more."""
        now = time.monotonic()
        with self._lock:
            for row in self._rows.values():
                silent = row.heard and now - row.heard > self._silence
                if row.state not in ENDS and (over or silent):
                    row.state = "ended" if over else "lost"
                if over or silent or row.state in ENDS:
                    row.rates = {}
            curves = {
                name: {group: curve.points() for group, curve in sorted(known.items())}
                for name, known in self._curves.items()
            }
            return {
                "seconds": round(self._last, 1),
                "processes": [_shown(row) for row in self._rows.values()],
                "curves": {**curves, "wan": {party: flow.points() for party, flow in sorted(self._sent.items())}},
                "links": self._links(),
                "messages": list(self._messages),
            }

    def _take(self, row: _Row, event: Event, seconds: float) -> None:
        kind, name = event["event"], row.process.name
        row.heard = time.monotonic()
        self._last = max(self._last, seconds)
        match kind:
            case "state":
                row.state = str(event["state"])
            case "telemetry":
                self._add_telemetry(row, event, seconds)
            case "evaluation":
                self._add("accuracy", "accuracy", seconds, event["accuracy"], name)
            case "finished":
                row.state = "finished"
                if event.get("accuracy") is not None:
                    self._add("accuracy", "accuracy", seconds, event["accuracy"], name)
            case "failed":
                row.state = "failed"
        if kind in ("warning", "failed"):
            text = "; ".join(filter(None, (str(event.get("message", "")), str(event.get("hint", "") or ""))))
            self._messages.append(_message(seconds, name, kind, text))

    def _add_telemetry(self, row: _Row, event: Event, seconds: float) -> None:
        if row.state not in ENDS:
            row.state = str(event.get("state", row.state))
        for name in FIELDS:
            if name in event:
                value = event[name]
                is_number = isinstance(value, int | float) and abs(value) < MOST
                row.shown[name] = value if is_number else None
        group = self._groups.get(row.process.name)
        if group is not None and row.state == "training":
            for curve, name in (("loss", "loss"), ("speed", "samples_per_s"), ("waiting", "waiting")):
                self._add(curve, group, seconds, event.get(name), row.process.name)
        self._add_bytes(row, event["bytes"], seconds)

    def _add_bytes(self, row: _Row, counts: Any, seconds: float) -> None:
        peers = {str(peer): _count(pair[0]) for peer, pair in counts["peers"].items()}
        passed = seconds - row.counted
        if row.counted and 0 < passed < AHEAD:
            sent = {peer: max(0, count - row.peers.get(peer, 0)) for peer, count in peers.items()}
            row.rates = {peer: count / passed for peer, count in sent.items()}
            self._sent.setdefault(row.process.party, Flow()).add(row.counted, seconds, sum(sent.values()))
        row.counted, row.peers = seconds, peers
        row.wan = (_count(counts["wan"][0]), _count(counts["wan"][1]))

    def _add(self, curve: str, group: str, seconds: float, value: object, process: str) -> None:
        if isinstance(value, int | float) and abs(value) < MOST:
            known = self._curves[curve].setdefault(group, DownsampledSeries(summed=curve not in MEANS))
            known.add(seconds, float(value), process)

    def _links(self) -> list[dict[str, Any]]:
        """What goes from each party to each other one now, and has gone in all."""
        total: dict[tuple[str, str], list[float]] = {}
        for row in self._rows.values():
            for peer, sent in row.peers.items():
                other = self._rows.get(peer)
                if other is not None and other.process.party != row.process.party:
                    pair = total.setdefault((row.process.party, other.process.party), [0.0, 0.0])
                    pair[0] += sent
                    pair[1] += row.rates.get(peer, 0.0)
        return [
            {"from": sender, "to": receiver, "bytes": round(sent), "bytes_per_s": round(rate)}
            for (sender, receiver), (sent, rate) in sorted(total.items())
        ]


def _count(value: int) -> int:
    """Raises ValueError for what is no number of bytes."""
    if not 0 <= value < MOST:
        raise ValueError("no number of bytes")
    return int(value)


def _message(seconds: float, process: str, kind: str, text: str) -> dict[str, Any]:
    return {"seconds": round(seconds, 1), "process": process, "kind": kind, "text": plain(text)}


def _shown(row: _Row) -> dict[str, Any]:
    process = row.process
    return {
        "name": process.name, "party": process.party, "role": process.role, "host": process.host,
        "trains": process.global_rank is not None, "state": row.state, "wan": row.wan, **row.shown,
    }  # fmt: skip
