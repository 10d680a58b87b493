"""One value over time, however long a job takes: at most so many points."""

__all__ = ["DownsampledSeries", "Flow"]

MOST = 480
FIRST_STEP = 1.0


class DownsampledSeries:
    """Steps of time that double, with what is known, whenever there are too many. In a step each source has the mean
    of its values, and the curve the sum of the sources', or their mean. Values may come in any order.

    For one thread, or several that hold a lock.
    """

    def __init__(self, *, summed: bool = False) -> None:
        self._summed = summed
        self._step = FIRST_STEP
        self._steps: dict[int, dict[str, tuple[float, int]]] = {}  # number -> source -> sum, count

    def add(self, seconds: float, value: float, source: str) -> None:
        """A value at that time."""
        self._merge(int(seconds // self._step), source, value, 1)
        while len(self._steps) > MOST:
            self._step *= 2
            steps, self._steps = self._steps, {}
            for number, sources in steps.items():
                for name, (total, count) in sources.items():
                    self._merge(number // 2, name, total, count)

    def points(self) -> list[tuple[float, float]]:
        """(seconds, value), by time."""
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
    """Amounts that were moved from one time to another, as a rate: the same steps, each with what fell into it."""

    def __init__(self) -> None:
        self._step = FIRST_STEP
        self._steps: dict[int, float] = {}

    def add(self, begin: float, end: float, amount: float) -> None:
        """So much, evenly between these times."""
        while end - begin > MOST * self._step or len(self._steps) > MOST:
            self._widen()
        first, last = int(begin // self._step), int(end // self._step)
        for number in range(first, last + 1):
            inside = min(end, (number + 1) * self._step) - max(begin, number * self._step)
            part = inside / (end - begin) if end > begin else 1.0
            self._steps[number] = self._steps.get(number, 0.0) + amount * part

    def points(self) -> list[tuple[float, float]]:
        """(seconds, amount a second), by time; the newest step is left out, as it is not over."""
        steps = sorted(self._steps.items())[:-1]
        return [(round((number + 0.5) * self._step, 2), _short(amount / self._step)) for number, amount in steps]

    def _widen(self) -> None:
        self._step *= 2
        steps, self._steps = self._steps, {}
        for number, amount in steps.items():
            self._steps[number // 2] = self._steps.get(number // 2, 0.0) + amount


def _short(value: float) -> float:
    return float(f"{value:.5g}")
