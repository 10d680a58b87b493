"""What is known of a job, folded from its processes' events: the same for one that runs and one that is over."""

import math
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from geomx_cli.dashboard.curve import Curve
from geomx_cli.events import Event
from geomx_cli.host_words import plain
from geomx_cli.plan import Plan, Process

__all__ = ["Live"]

MESSAGES = 200
MOST_CURVES = 12
CURVES = ("accuracy", "loss", "speed", "waiting", "wan")
TOLD = ("warning", "failed")


@dataclass
class _Row:
    """The newest of one process. rates: bytes a second [sent, received] to and from each process of other parties."""

    process: Process
    state: str = "starting"
    seen: float = 0.0
    shown: dict[str, float] = field(default_factory=dict)
    peers: dict[str, tuple[int, int]] = field(default_factory=dict)
    rates: dict[str, tuple[float, float]] = field(default_factory=dict)
    wan: tuple[int, int] = (0, 0)


class Live:
    """`take` folds an event in, `snapshot` tells what is known by now. Any thread may call either.

    Times are seconds since the job `began` (Unix seconds), by the clocks of its hosts.
    """

    def __init__(self, plan: Plan, began: float) -> None:
        self._began = began
        self._rows = {process.name: _Row(process) for process in plan.processes}
        self._last = 0.0
        self._curves: dict[str, dict[str, Curve]] = {name: {} for name in CURVES}
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
                self._take(row, event, float(event["time"]))
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                return

    def say(self, message: str) -> None:
        """Add a message of the dashboard's own."""
        with self._lock:
            self._messages.append({"seconds": self._last, "process": "", "kind": "note", "text": plain(message)})

    def snapshot(self) -> dict[str, Any]:
        """As JSON: processes, curves, links between parties, messages."""
        with self._lock:
            return {
                "seconds": round(self._last, 1),
                "processes": [_shown(row) for row in self._rows.values()],
                "curves": {
                    name: {group: curve.points() for group, curve in sorted(curves.items())}
                    for name, curves in self._curves.items()
                },
                "links": self._links(),
                "messages": list(self._messages),
            }

    def _take(self, row: _Row, event: Event, when: float) -> None:
        seconds = max(0.0, when - self._began)
        self._last = max(self._last, seconds)
        row.seen = max(row.seen, seconds)
        kind, name = event["event"], row.process.name
        if kind == "state":
            row.state = str(event["state"])
        elif kind == "telemetry":
            self._add_telemetry(row, event, seconds)
        elif kind == "evaluation":
            self._add("accuracy", "accuracy", seconds, event["accuracy"], name)
        elif kind == "finished":
            row.state = "finished"
            row.rates = {}
            if event.get("accuracy") is not None:
                self._add("accuracy", "accuracy", seconds, event["accuracy"], name)
                row.shown["accuracy"] = float(event["accuracy"])
        elif kind == "failed":
            row.state = "failed"
        if kind in TOLD:
            text = " ".join(filter(None, (str(event.get("message", "")), str(event.get("hint", "") or ""))))
            self._messages.append({"seconds": round(seconds, 1), "process": name, "kind": kind, "text": plain(text)})

    def _add_telemetry(self, row: _Row, event: Event, seconds: float) -> None:
        if row.state != "failed":
            row.state = str(event.get("state", row.state))
        for field_ in ("round", "samples_per_s", "loss", "accuracy", "waiting", "progress", "left_s"):
            value = event.get(field_)
            if isinstance(value, int | float) and math.isfinite(value):
                row.shown[field_] = value
        group = self._groups.get(row.process.name)
        if group is not None and row.state == "training" and "samples_per_s" in row.shown:
            for curve, field_ in (("loss", "loss"), ("speed", "samples_per_s"), ("waiting", "waiting")):
                if field_ in row.shown:
                    self._add(curve, group, seconds, row.shown[field_], row.process.name)
        self._add_bytes(row, event["bytes"], float(event["time"]), seconds)

    def _add_bytes(self, row: _Row, counted: Any, when: float, seconds: float) -> None:
        peers = {str(peer): (int(pair[0]), int(pair[1])) for peer, pair in counted["peers"].items()}
        passed = when - row.shown.get("bytes_at", when)
        row.shown["bytes_at"] = when
        if passed > 0:
            row.rates = {
                peer: (max(0, sent - row.peers.get(peer, (0, 0))[0]) / passed,
                       max(0, received - row.peers.get(peer, (0, 0))[1]) / passed)
                for peer, (sent, received) in peers.items()
            }  # fmt: skip
            rate = sum(sent for sent, _ in row.rates.values())
            self._add("wan", row.process.party, seconds, rate, row.process.name)
        row.peers, row.wan = peers, (int(counted["wan"][0]), int(counted["wan"][1]))

    def _add(self, curve: str, group: str, seconds: float, value: float, process: str) -> None:
        number = float(value)
        if math.isfinite(number):
            known = self._curves[curve].setdefault(group, Curve(summed=curve == "wan"))
            known.add(seconds, number, process)

    def _links(self) -> list[dict[str, Any]]:
        """What goes from each party to each other one now, and has gone in all."""
        total: dict[tuple[str, str], list[float]] = {}
        for row in self._rows.values():
            for peer, (sent, _) in row.peers.items():
                other = self._rows.get(peer)
                if other is not None and other.process.party != row.process.party:
                    pair = total.setdefault((row.process.party, other.process.party), [0.0, 0.0])
                    pair[0] += sent
                    pair[1] += row.rates.get(peer, (0.0, 0.0))[0]
        return [
            {"from": sender, "to": receiver, "bytes": round(sent), "bytes_per_s": round(rate)}
            for (sender, receiver), (sent, rate) in sorted(total.items())
        ]


def _shown(row: _Row) -> dict[str, Any]:
    process = row.process
    kept = {name: value for name, value in row.shown.items() if name != "bytes_at"}
    return {
        "name": process.name, "party": process.party, "role": process.role, "host": process.host,
        "trains": process.global_rank is not None, "state": row.state, "wan": row.wan, **kept,
    }  # fmt: skip
