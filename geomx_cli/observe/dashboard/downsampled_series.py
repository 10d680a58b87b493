"""Time series with a bounded number of points, whatever a job's duration."""

__all__ = ["DownsampledSeries", "Flow", "StepSeries"]

MOST = 480
STEPS = 240
FIRST_STEP = 1.0


class DownsampledSeries:
    """Time is divided into steps, whose length doubles, merging their values, when there are too many. In a step the
    curve has the mean of its values, and with `summed` this mean times the number of sources: exact where all sources
    add values equally often, and bounded in size for thousands of them. Values may arrive in any order.

    Not thread-safe.
    """

    def __init__(self, *, summed: bool = False) -> None:
        self._summed = summed
        self._step = FIRST_STEP
        self._steps: dict[int, tuple[float, int, int]] = {}  # step number -> sum, count, bit set of sources
        self._sources: dict[str, int] = {}

    def add(self, seconds: float, value: float, source: str) -> None:
        """Add a value at this time."""
        bit = 1 << self._sources.setdefault(source, len(self._sources))
        self._merge(int(seconds // self._step), (value, 1, bit))
        while len(self._steps) > MOST:
            self._step *= 2
            steps, self._steps = self._steps, {}
            for number, content in steps.items():
                self._merge(number // 2, content)

    def points(self) -> list[tuple[float, float]]:
        """Return (seconds, value) pairs, ordered by time."""
        return [
            (round((number + 0.5) * self._step, 2), _short(total / count * (bits.bit_count() if self._summed else 1)))
            for number, (total, count, bits) in sorted(self._steps.items())
        ]

    def _merge(self, number: int, content: tuple[float, int, int]) -> None:
        total, count, bits = self._steps.get(number, (0.0, 0, 0))
        self._steps[number] = total + content[0], count + content[1], bits | content[2]


class StepSeries:
    """Values by step, in STEPS points at most: steps are merged in groups whose size doubles. Values may arrive in any
    order.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._size = 1
        self._groups: dict[int, tuple[int, float, int]] = {}  # group -> its last step, sum, count

    def add(self, step: int, value: float) -> None:
        """Add a finite value."""
        self._merge(step, value, 1)
        while len(self._groups) > STEPS:
            self._size *= 2
            groups, self._groups = self._groups, {}
            for last, total, count in groups.values():
                self._merge(last, total, count)

    def points(self) -> list[tuple[int, float]]:
        """Return (step, value) pairs, ordered by step: the last step of each group, and the mean of its values."""
        return [(last, _short(total / count)) for _, (last, total, count) in sorted(self._groups.items())]

    def _merge(self, step: int, total: float, count: int) -> None:
        last, before, times = self._groups.get(step // self._size, (step, 0.0, 0))
        self._groups[step // self._size] = max(last, step), before + total, times + count


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


def _short(value: float) -> float:
    return float(f"{value:.5g}")
