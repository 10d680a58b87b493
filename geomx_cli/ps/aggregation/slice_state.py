"""What a server keeps of one slice: its value, the rounds that are open, and results that not all members have."""

import time
from dataclasses import dataclass, field

from geomx_cli.ps.aggregation.accumulator import Accumulator
from geomx_cli.ps.aggregation.algorithm import SliceView
from geomx_cli.ps.aggregation.compression import Encoded
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import DTYPES, Array, Content
from geomx_cli.ps.net.rows import Rows
from geomx_cli.ps.net.wire import Reply

__all__ = ["Cohort", "Result", "RoundState", "SliceState", "Waiter"]


@dataclass(slots=True)
class Waiter:
    """Who waits for a result, by its rank among the contributors and the number of its request.

    reply: see wire.Reply. codec: in which the result may come, "" for none. follows: it has the result of the round
    before. newest: of a pull: what rounds of others have led to, not an initial value. numbers: those of the rows that
    a pull is for, None for all.
    """

    link: Link
    rank: int
    request: int
    priority: int
    reply: Reply = Reply.FULL
    codec: str = ""
    follows: bool = False
    newest: bool = False
    numbers: Array | None = None


@dataclass(slots=True)
class RoundState:
    """A round that is not over. `waiters` by the lowest rank in the contribution that they have brought."""

    accumulator: Accumulator = field(default_factory=Accumulator)
    waiters: dict[int, Waiter] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Result:
    """What the members of a round were answered: the value, its version, the ranks and weight that are in it.

    `array` is None if nobody in the round wants it. `encoded` is the same by `codec`, if there is one. changed: the
    rows that a round of rows has changed.
    `owed` are the ranks of those who have brought contributions and not acknowledged it: one whose answer was lost asks
    again.
    """

    array: Array | None
    version: int
    contributors: tuple[int, ...] = ()
    weight: float = 0.0
    owed: set[int] = field(default_factory=set)
    changed: Rows | None = None
    encoded: Encoded | None = None
    codec: str = ""

    def content(self, reply: Reply, row: int) -> Content | None:
        """What goes to one who wants this; None if that was not kept."""
        if reply == Reply.NONE:
            return Rows.none(row, DTYPES[0])
        return self.changed if reply == Reply.CHANGED and self.changed is not None else self.array


@dataclass(slots=True)
class Cohort:
    """The rounds of members who go through them together: all of a server's, or one party's where each goes alone.

    closed: the last round that is decided. finished: the last one that is answered. results: of finished rounds, kept
    until all have acknowledged them; members acknowledge with their next contributions, so in a job where each worker
    has one round under way this is the value itself, and else as many as there are rounds under way.
    held: who is in a root's round that is in the value and not yet answered, because others are too far behind.
    version: that of the value which the last round has led to, or which its members were given since.
    changed: the rows that a round has changed which is closed and not finished, if it was one of rows.
    """

    member: int
    rounds: dict[int, RoundState] = field(default_factory=dict)
    closed: int = 0
    finished: int = 0
    results: dict[int, Result] = field(default_factory=dict)
    held: Accumulator | None = None
    version: int = 0
    changed: Rows | None = None

    def acknowledge(self, rank: int, round_: int) -> None:
        """This rank has the results of all rounds up to this one."""
        for number in [number for number in self.results if number <= round_]:
            owed = self.results[number].owed
            owed.discard(rank)
            if not owed:
                del self.results[number]


@dataclass(slots=True)
class SliceState:
    """One slice. `row`: elements in a row. `forwarded`: rounds that have gone up to the root. `fetching`: the value is
    on its way from there. `hyper`: what its optimizer was told.
    """

    slot: SliceView
    root: int
    length: int
    dtype: int
    offset: int
    row: int = 1
    forwarded: int = 0
    fetching: bool = False
    cohorts: dict[int, Cohort] = field(default_factory=dict)
    pulls: list[Waiter] = field(default_factory=list)
    hyper: dict[str, float] = field(default_factory=dict)
    _own: Array | None = None  # the value, as long as nobody else may read it

    def write(self, rows: Rows) -> None:
        """Put rows in the place of the value's. What was given out as the value does not change."""
        assert self.slot.value is not None
        if not len(rows):
            return
        if self._own is not self.slot.value:
            self._own = self.slot.value = self.slot.value.copy()
        rows.write_to(self._own)

    def give(self) -> Array:
        """The value, which from now on others read at any time."""
        assert self.slot.value is not None
        self._own = None
        return self.slot.value

    def cohort(self, member: int) -> Cohort:
        """That of one member, or with 0 of all who go together."""
        cohort = self.cohorts.get(member)
        if cohort is None:
            cohort = self.cohorts[member] = Cohort(member)
        return cohort
