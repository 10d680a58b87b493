"""Time series with a bounded number of points, whatever a job's duration."""

from bisect import insort
from itertools import groupby

__all__ = ["DownsampledSeries", "Flow", "MeasuredSeries"]

MOST = 480
FIRST_STEP = 1.0
FINEST_STEP = 2.0**-7


class MeasuredSeries:
    """Values of one source as they were measured: all of them up to MOST. Of more, x is divided into steps, and the
    smallest, the largest and the newest value of each step remain, and the very first. Values may arrive in any order.

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
    """Values of several sources. Time is divided into steps, whose length doubles, merging their values, when there are
    too many. In a step the curve has the mean of its values, and with `summed` this mean times the number of sources:
    exact where all sources add values equally often, and bounded in size for thousands of them. The last point of a
    mean is that of each source's newest value, at the newest time. Values may arrive in any order.

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
