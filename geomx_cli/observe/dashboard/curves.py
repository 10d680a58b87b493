"""The curves of a job over time: accuracy, loss, speed, waiting time, traffic between parties, rounds and bytes."""

import math
from bisect import insort
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from geomx_cli.core.events import Reported, Telemetry
from geomx_cli.jobs.view.progress import precedence
from geomx_cli.plan import Process

__all__ = ["Curves", "DownsampledSeries", "Flow", "MeasuredSeries"]

# Time series with a bounded number of points, whatever a job's duration.

MOST = 480
FIRST_STEP = 1.0
FINEST_STEP = 2.0**-7


class MeasuredSeries:
    """Values of one source as they were measured, up to MOST of them. If there are more, x is divided into steps. Then
    the smallest, the largest and the newest value of each step remain, and the very first. Values may arrive in any
    order.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._step = FINEST_STEP
        self._values: list[tuple[float, float]] = []

    def add(self, x: float, value: float) -> None:
        """Add a finite value at a time in seconds."""
        insort(self._values, (x, value), key=_x)
        if len(self._values) > MOST:
            while len(thinned := self._thinned()) > MOST // 2:
                self._step *= 2
            self._values = thinned

    def points(self) -> list[tuple[float, float]]:
        """Return (x, value) pairs, ordered by x."""
        return [(round(x, 3), _short(value)) for x, value in self._values]

    def _thinned(self) -> list[tuple[float, float]]:
        found = self._values[:1]
        for _, step in groupby(self._values[1:], lambda point: point[0] // self._step):
            known = list(step)
            kept = (min(known, key=_value), max(known, key=_value), known[-1])
            found += dict.fromkeys(point for point in known if point in kept)
        return found


class DownsampledSeries:
    """Values of several sources. Time is divided into steps. When there are too many, the length of steps doubles, and
    their values are merged. In a step the curve has the mean of its values, and with `summed` this mean times the
    number of sources. That is exact if all sources add values equally often, and its size is bounded for thousands of
    sources. The last point of a mean is the mean of each source's newest value, at the newest time. Values may arrive
    in any order.

    Not thread-safe.
    """

    def __init__(self, *, summed: bool = False) -> None:
        self._summed = summed
        self._step = FIRST_STEP
        self._steps: dict[int, tuple[float, int, int]] = {}  # step number -> sum, count, bit set of sources
        self._sources: dict[str, int] = {}
        self._newest: dict[str, tuple[float, float]] = {}

    def add(self, seconds: float, value: float, source: str) -> None:
        """Add a finite value at this time."""
        bit = 1 << self._sources.setdefault(source, len(self._sources))
        if seconds >= self._newest.get(source, (0.0, 0.0))[0]:
            self._newest[source] = seconds, value
        self._merge(int(seconds // self._step), (value, 1, bit))
        while len(self._steps) > MOST:
            self._step *= 2
            steps, self._steps = self._steps, {}
            for number, content in steps.items():
                self._merge(number // 2, content)

    def points(self) -> list[tuple[float, float]]:
        """Return (seconds, value) pairs, ordered by time."""
        found = [
            (round((number + 0.5) * self._step, 2), _short(total / count * (bits.bit_count() if self._summed else 1)))
            for number, (total, count, bits) in sorted(self._steps.items())
        ]
        if self._newest and not self._summed:
            values = [value for _, value in self._newest.values()]
            newest = round(max(seconds for seconds, _ in self._newest.values()), 3)
            found[-1] = newest, _short(sum(values) / len(values))
        return found

    def _merge(self, number: int, content: tuple[float, int, int]) -> None:
        total, count, bits = self._steps.get(number, (0.0, 0, 0))
        self._steps[number] = total + content[0], count + content[1], bits | content[2]


class Flow:
    """Amounts transferred over intervals, as a rate: the same steps, each with the amount that falls into it."""

    def __init__(self) -> None:
        self._step = FIRST_STEP
        self._steps: dict[int, float] = {}

    def add(self, begin: float, end: float, amount: float) -> None:
        """Add an amount, spread evenly over the interval."""
        while end - begin > MOST * self._step or len(self._steps) > MOST:
            self._widen()
        first, last = int(begin // self._step), int(end // self._step)
        for number in range(first, last + 1):
            inside = min(end, (number + 1) * self._step) - max(begin, number * self._step)
            part = inside / (end - begin) if end > begin else 1.0
            self._steps[number] = self._steps.get(number, 0.0) + amount * part

    def points(self) -> list[tuple[float, float]]:
        """Return (seconds, amount per second) pairs, ordered by time, without the newest step, which is incomplete."""
        steps = sorted(self._steps.items())[:-1]
        return [(round((number + 0.5) * self._step, 2), _short(amount / self._step)) for number, amount in steps]

    def totals(self) -> list[tuple[float, float]]:
        """Return (seconds, amount until then) pairs, one at the end of each step that has an amount."""
        total, found = 0.0, []
        for number, amount in sorted(self._steps.items()):
            total += amount
            found.append((round((number + 1) * self._step, 2), float(round(total))))
        return found

    def _widen(self) -> None:
        self._step *= 2
        steps, self._steps = self._steps, {}
        for number, amount in steps.items():
            self._steps[number // 2] = self._steps.get(number // 2, 0.0) + amount


def _x(point: tuple[float, float]) -> float:
    return point[0]


def _value(point: tuple[float, float]) -> float:
    return point[1]


def _short(value: float) -> float:
    return float(f"{value:.5g}")


ALL, ALL_PARTIES = "all workers", "all parties"
MOST_CURVES = 12
MOST_METRICS = 16  # names of scripts' metrics with curves
KINDS = ("loss", "speed", "waiting", "rounds", "steps")

Series = DownsampledSeries | MeasuredSeries


class Curves:
    """The curves of the training workers, one for each worker, with values as measured. If workers are many, one curve
    for each party, with means or sums. If parties are many too, one curve. In addition, `overall` has one for the whole
    job. The accuracy is the job's, see `evaluator` in jobs/view/progress.py. Sizes depend only on the number of curves.

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
        self._processes = {one.name: one for one in training}
        self._series: dict[str, dict[str, Series]] = {name: {} for name in KINDS}
        self._newest: dict[str, tuple[int, float | None]] = {}
        self._evaluator: Process | None = None
        self._accuracies = MeasuredSeries()
        self._metrics: dict[str, dict[str, Series]] = {}
        self._sent: dict[str, Flow] = {}
        self._sent_in_all = Flow()
        self._not_finite: dict[str, set[str]] = {"curves": set(), "metrics": set()}

    def telemetry(self, process: str, event: Telemetry, seconds: float, *, trains: bool) -> None:
        """Add the report of a training worker. If a worker evaluates or has finished, add only new values: the last
        round and its loss.
        """
        newest = event.round, event.loss
        is_new = newest != self._newest.get(process, (0, None))
        self._newest[process] = newest
        values = {"loss": event.loss, "rounds": event.round or None} if trains or is_new else {}
        values |= {"speed": event.samples_per_s, "waiting": event.waiting} if trains else {}
        for name, value in values.items():
            self._add(name, self._series[name], process, value, seconds, summed=name == "speed")

    def reported(self, process: str, event: Reported, seconds: float) -> None:
        """Add the values that a training worker's script reports."""
        if process not in self._processes:
            return
        self._add("loss", self._series["loss"], process, event.loss, seconds)
        self._add("speed", self._series["speed"], process, event.samples_per_s, seconds, summed=True)
        self._add("steps", self._series["steps"], process, event.step, seconds)
        self.accuracy(self._processes[process], event.accuracy, seconds)
        for name, number in event.metrics.items():
            self.metric(process, name, number, seconds)

    def metric(self, process: str, name: str, value: float, seconds: float) -> None:
        """Add a metric of a training worker."""
        if process not in self._processes:
            return
        if name in self._metrics or len(self._metrics) < MOST_METRICS:
            self._add(name, self._metrics.setdefault(name, {}), process, value, seconds)

    def accuracy(self, process: Process, value: float | None, seconds: float) -> None:
        """Add a test accuracy. Accuracies of processes that are not the evaluator, as known so far, are dropped."""
        if value is None:
            return
        if self._evaluator is None or precedence(process) < precedence(self._evaluator):
            self._evaluator, self._accuracies = process, MeasuredSeries()
        if process.name != self._evaluator.name:
            return
        if math.isfinite(value):
            self._accuracies.add(seconds, value)
        else:
            self._not_finite["curves"].add("accuracy")

    def sent(self, party: str, begin: float, end: float, amount: float) -> None:
        """Add the bytes that a party has sent to other parties in this time."""
        self._sent.setdefault(party if self._by_party else ALL_PARTIES, Flow()).add(begin, end, amount)
        self._sent_in_all.add(begin, end, amount)

    def snapshot(self) -> dict[str, Any]:
        """Return an object for JSON:

        curves: the curves.
        averaged: whether curves of workers are averaged over several workers.
        metrics: scripts' metrics, by name and group.
        axes: the axes over which curves can be drawn instead of time: `rounds` and scripts' `steps` of each group, and
            the total `bytes` between parties.
        not_finite: names of curves and metrics of which values are not drawn, because they were NaN or infinite.
        """
        found = {name: _points(known) for name, known in self._series.items()}
        accuracy = self._accuracies.points()
        axes = {name: {**found[name], ALL: self._overall(name)} for name in ("rounds", "steps")}
        return {
            "averaged": self._averaged,
            "curves": {
                "accuracy": {"accuracy": accuracy} if accuracy else {},
                **{name: found[name] for name in ("loss", "speed", "waiting")},
                "wan": {party: flow.points() for party, flow in sorted(self._sent.items())},
            },
            "metrics": {name: _points(known) for name, known in sorted(self._metrics.items())},
            "not_finite": {kind: sorted(names) for kind, names in self._not_finite.items()},
            "axes": {**axes, "bytes": self._sent_in_all.totals()},
        }

    def overall(self) -> Mapping[str, Any]:
        """Return the same object with one curve for the whole job, for comparisons."""
        curves = {"accuracy": self._accuracies.points(), "wan": self._sent_in_all.points()}
        curves |= {name: self._overall(name) for name in ("loss", "speed", "waiting")}
        axes = {name: {ALL: self._overall(name)} for name in ("rounds", "steps")}
        shown = {name: {ALL: points} if points else {} for name, points in curves.items()}
        return {"averaged": not self._single, "curves": shown, "axes": {**axes, "bytes": self._sent_in_all.totals()}}

    def _add(
        self, name: str, known: dict[str, Series], process: str, value: float | None, seconds: float, *,
        summed: bool = False,
    ) -> None:  # fmt: skip
        """Add a value to the curve of its worker or party in `known`, and to the curve of the whole job.

        name: of the kind or the metric.
        """
        if value is None:
            return
        if not math.isfinite(value):
            self._not_finite["metrics" if known is self._metrics.get(name) else "curves"].add(name)
            return
        for group in {self._groups.get(process, ALL), ALL}:
            if group == process or self._single:
                series = known.setdefault(group, MeasuredSeries())
            else:
                series = known.setdefault(group, DownsampledSeries(summed=summed))
            if isinstance(series, MeasuredSeries):
                series.add(seconds, value)
            else:
                series.add(seconds, value, process)

    def _overall(self, name: str) -> list[tuple[float, float]]:
        series = self._series[name].get(ALL)
        return series.points() if series is not None else []


def _points(known: Mapping[str, Series]) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each curve. The curve of the whole job is left out, unless it is the only one."""
    return {group: one.points() for group, one in sorted(known.items()) if group != ALL or len(known) == 1}
