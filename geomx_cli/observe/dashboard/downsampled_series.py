"""Time series with a bounded number of points, whatever a job's duration."""

__all__ = ["DownsampledSeries", "Flow"]

MOST = 480
FIRST_STEP = 1.0


class DownsampledSeries:
    """Time is divided into steps, whose length doubles, merging their values, when there are too many. In a step each
    source has the mean of its values, and the curve has the sum or the mean over the sources. Values may arrive in any
    order.

    Not thread-safe.
    """

    def __init__(self, *, summed: bool = False) -> None:
        self._summed = summed
        self._step = FIRST_STEP
        self._steps: dict[int, dict[str, tuple[float, int]]] = {}  # step number -> source -> sum, count

    def add(self, seconds: float, value: float, source: str) -> None:
        """Add a value at this time."""
        self._merge(int(seconds // self._step), source, value, 1)
        while len(self._steps) > MOST:
            self._step *= 2
            steps, self._steps = self._steps, {}
            for number, sources in steps.items():
                for name, (total, count) in sources.items():
                    self._merge(number // 2, name, total, count)

    def points(self) -> list[tuple[float, float]]:
        """Return (seconds, value) pairs, ordered by time."""
        return [
            (round((number + 0.5) * self._step, 2), _short(self._value(sources)))
            for number, sources in sorted(self._steps.items())
        ]

    def _merge(self, number: int, source: str, total: float, count: int) -> None:
        sources = self._steps.setdefault(number, {})
        before, times = sources.get(source, (0.0, 0))
        sources[source] = (before + total, times + count)

    def _value(self, sources: dict[str, tuple[float, int]]) -> float:
        value = sum(total / count for total, count in sources.values())
        return value if self._summed else value / len(sources)


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

    def _widen(self) -> None:
        self._step *= 2
        steps, self._steps = self._steps, {}
        for number, amount in steps.items():
            self._steps[number // 2] = self._steps.get(number // 2, 0.0) + amount


def _short(value: float) -> float:
    return float(f"{value:.5g}")
