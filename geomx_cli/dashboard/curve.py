"""One value over time, however long a job takes: at most so many points."""

__all__ = ["Curve"]

MOST = 480
FIRST_STEP = 1.0


class Curve:
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
            (round((number + 0.5) * self._step, 2), self._value(sources))
            for number, sources in sorted(self._steps.items())
        ]

    def _merge(self, number: int, source: str, total: float, count: int) -> None:
        sources = self._steps.setdefault(number, {})
        before, times = sources.get(source, (0.0, 0))
        sources[source] = (before + total, times + count)

    def _value(self, sources: dict[str, tuple[float, int]]) -> float:
        value = sum(total / count for total, count in sources.values())
        return float(f"{value if self._summed else value / len(sources):.5g}")
