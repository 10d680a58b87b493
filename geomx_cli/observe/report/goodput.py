"""Goodput: the share of a worker's time spent on training that was kept."""

from array import array

from geomx_cli.core.conventions import life_of
from geomx_cli.core.events import Event, Reported, RoundCompleted, StateChanged

__all__ = ["Goodput"]


class Goodput:
    """Adds up a worker's rounds, or a script's reports with a step, as its event log has them.

    A round counts from the end of the one before, or from the begin of training in the same life of the worker. So
    these times do not count: imports, joining, the time between a death and the next life, and rounds that a later life
    has repeated. Waiting for others in a round counts.
    """

    def __init__(self) -> None:
        self._numbers, self._ends = array("q"), array("d")  # of rounds that stayed, and the seconds up to them
        self._since: dict[int, float] = {}  # by life: when its newest round ended, or its training began
        self._life = 0
        self._first = self._last = 0.0

    def add(self, event: Event) -> None:
        """Add the next event of the log."""
        self._first = self._first or event.time
        self._last = max(self._last, event.time)
        life = life_of(event.number)
        match event:
            case StateChanged(state="training"):
                self._since.setdefault(life, event.time)
            case RoundCompleted(num_iters=number):
                self._complete(number, life, event.time)
            case Reported(step=int(number)):
                self._complete(number, life, event.time)

    def _complete(self, number: int, life: int, now: float) -> None:
        seconds = max(0.0, now - self._since.get(life, now))
        if life != self._life:
            while self._numbers and self._numbers[-1] >= number:  # an earlier life had come further
                self._numbers.pop()
                self._ends.pop()
        elif self._numbers and self._numbers[-1] >= number:  # a second report of a step
            number, seconds = self._numbers.pop(), seconds + self._ends.pop() - self._up_to
        self._numbers.append(number)
        self._ends.append(self._up_to + seconds)
        self._since[life], self._life = now, life

    @property
    def _up_to(self) -> float:
        return self._ends[-1] if self._ends else 0.0

    @property
    def share(self) -> float | None:
        """From 0 to 1; None without any round, or report with a step."""
        if not self._ends or self._last <= self._first:
            return None
        return min(1.0, self._ends[-1] / (self._last - self._first))
