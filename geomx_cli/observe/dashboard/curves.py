"""The curves of a job over time: accuracy, loss, speed, waiting time, traffic between parties, rounds and bytes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from geomx_cli.core.events import Reported, Telemetry
from geomx_cli.observe.dashboard.downsampled_series import DownsampledSeries, Flow, MeasuredSeries, StepSeries
from geomx_cli.plan import Process

__all__ = ["Curves"]

ALL, ALL_PARTIES = "all workers", "all parties"
MOST_CURVES = 12
MOST_METRICS = 16  # names of scripts' metrics with curves
MEANS = ("loss", "waiting", "rounds")
FROM_TELEMETRY = ("loss", "speed", "waiting", "rounds")


class Curves:
    """One curve for each training worker, with values as measured; if they are many, one for each party, with means or
    sums; if these are many too, one in all. Beside them `overall`, one for the whole job. The accuracy is that of the
    process with the most evaluations, as in reports. Sizes depend on the number of curves only.

    Not thread-safe. Times are seconds since the job began.
    """

    def __init__(self, training: Sequence[Process]) -> None:
        parties = {process.party for process in training}
        self._by_party = len(parties) <= MOST_CURVES
        self._groups = {
            one.name: one.name if len(training) <= MOST_CURVES else f"party {one.party}" if self._by_party else ALL
            for one in training
        }
        self._averaged = len(training) > MOST_CURVES
        self._single = len(training) == 1
        self._series: dict[str, dict[str, DownsampledSeries | MeasuredSeries]] = {name: {} for name in FROM_TELEMETRY}
        self._accuracies: dict[str, MeasuredSeries] = {}
        self._metrics: dict[str, dict[str, StepSeries | MeasuredSeries]] = {}
        self._sent: dict[str, Flow] = {}
        self._sent_in_all = Flow()

    def telemetry(self, process: str, event: Telemetry, seconds: float) -> None:
        """Add what a training worker reports."""
        values = {
            "loss": event.loss, "speed": event.samples_per_s, "waiting": event.waiting, "rounds": event.round or None
        }  # fmt: skip
        for name, value in values.items():
            self._add(name, process, value, seconds)

    def reported(self, process: str, event: Reported, seconds: float) -> None:
        """Add what a training worker's script reports."""
        group = self._groups.get(process)
        if group is None:
            return
        self._add("loss", process, event.loss, seconds)
        self._add("speed", process, event.samples_per_s, seconds)
        self.accuracy(process, event.accuracy, seconds)
        for name, number in event.metrics.items():
            if math.isfinite(number) and (name in self._metrics or len(self._metrics) < MOST_METRICS):
                new = StepSeries() if self._averaged else MeasuredSeries()
                self._metrics.setdefault(name, {}).setdefault(group, new).add(event.step, number)

    def accuracy(self, process: str, value: float | None, seconds: float) -> None:
        """Add a test accuracy."""
        has_curve = process in self._accuracies or len(self._accuracies) < MOST_CURVES
        if value is not None and math.isfinite(value) and has_curve:
            self._accuracies.setdefault(process, MeasuredSeries()).add(seconds, value)

    def sent(self, party: str, begin: float, end: float, amount: float) -> None:
        """Add bytes that a party has sent to others in this time."""
        self._sent.setdefault(party if self._by_party else ALL_PARTIES, Flow()).add(begin, end, amount)
        self._sent_in_all.add(begin, end, amount)

    def snapshot(self) -> dict[str, Any]:
        """Return, for JSON, the `curves`, and whether those of workers are `averaged` over several; scripts' `metrics`
        by name and group as [step, value] pairs; and the `axes` over which curves can be drawn instead of time: the
        `rounds` of each group, and the total of `bytes` between parties.
        """
        found = {
            name: {group: one.points() for group, one in sorted(known.items()) if group != ALL or len(known) == 1}
            for name, known in self._series.items()
        }
        accuracy = self._accuracy()
        return {
            "averaged": self._averaged,
            "curves": {
                "accuracy": {"accuracy": accuracy} if accuracy else {},
                **{name: found[name] for name in ("loss", "speed", "waiting")},
                "wan": {party: flow.points() for party, flow in sorted(self._sent.items())},
            },
            "metrics": {
                name: {group: one.points() for group, one in sorted(known.items())}
                for name, known in sorted(self._metrics.items())
            },
            "axes": {"rounds": {**found["rounds"], ALL: self._overall("rounds")}, "bytes": self._sent_in_all.totals()},
        }

    def overall(self) -> Mapping[str, Any]:
        """Return the same with one curve for the whole job, for comparisons."""
        accuracy = self._accuracy()
        curves = {"accuracy": accuracy, "wan": self._sent_in_all.points()}
        curves |= {name: self._overall(name) for name in ("loss", "speed", "waiting")}
        axes = {"rounds": {ALL: self._overall("rounds")}, "bytes": self._sent_in_all.totals()}
        shown = {name: {ALL: points} if points else {} for name, points in curves.items()}
        return {"averaged": not self._single, "curves": shown, "axes": axes}

    def _accuracy(self) -> list[tuple[float, float]]:
        known = max(self._accuracies.values(), key=len, default=None)
        return known.points() if known is not None else []

    def _add(self, name: str, process: str, value: float | None, seconds: float) -> None:
        if value is None or not math.isfinite(value):
            return
        known = self._series[name]
        for group in {self._groups.get(process, ALL), ALL}:
            if group == process or self._single:
                series = known.setdefault(group, MeasuredSeries())
            else:
                series = known.setdefault(group, DownsampledSeries(summed=name not in MEANS))
            if isinstance(series, MeasuredSeries):
                series.add(seconds, value)
            else:
                series.add(seconds, value, process)

    def _overall(self, name: str) -> list[tuple[float, float]]:
        series = self._series[name].get(ALL)
        return series.points() if series is not None else []
