"""Measures the phases of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Stopwatch"]


class Stopwatch:
    """Accumulates seconds by name."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the body of a `with`."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - begun

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count so many of one name's seconds, at most all, as another's."""
        moved = min(seconds, self._seconds.get(source, 0.0))
        if moved:
            self._seconds[source] -= moved
            self._seconds[target] = self._seconds.get(target, 0.0) + moved

    def take(self, but: str = "") -> dict[str, float]:
        """Return and reset the sums, rounded to 0.1 ms, of all names `but` one."""
        taken = {name: round(seconds, 4) for name, seconds in self._seconds.items() if name != but}
        self._seconds = {name: seconds for name, seconds in self._seconds.items() if name == but}
        return taken
