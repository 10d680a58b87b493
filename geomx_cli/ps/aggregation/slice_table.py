"""All slices at one server, and the rounds that are open: who goes through them together, and who is missing."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable

from geomx_cli.ps.aggregation.algorithm import ServerAlgorithm, SliceView
from geomx_cli.ps.aggregation.slice_state import Cohort, RoundState, SliceState
from geomx_cli.ps.net.payload import DTYPES
from geomx_cli.ps.net.wire import BadMessage, Header

__all__ = ["SliceTable"]

MAX_SLICES = 1_000_000


class SliceTable:
    """`roots` gives the number of roots above; None at a root. `owing` gives the ranks that owe contributions, None
    while no round may close.

    `declared` tells whether a message is about a slice that there is, as far as this server knows.
    `alone` tells with which rank this one goes through rounds where not all go together. `moves` grows with all that
    may change what is missing, `came` counts the contributions of each rank. Used by the loop's thread only.
    """

    def __init__(
        self,
        *,
        algorithm: ServerAlgorithm,
        roots: Callable[[], int] | None,
        owing: Callable[[], Collection[int] | None],
        alone: Callable[[int], int] = lambda rank: rank,
        declared: Callable[[Header], bool] = lambda _: True,
    ) -> None:
        self.algorithm = algorithm
        self.owing = owing
        self.entries: dict[tuple[int, int], SliceState] = {}
        self._roots = roots
        self._alone = alone
        self._declared = declared
        self._open: dict[tuple[int, int, int, int], tuple[SliceState, Cohort, RoundState]] = {}
        self.moves = 0
        self.came: Counter[int] = Counter()

    def entry(self, header: Header) -> SliceState:
        """The slice that a message is about. Raises BadMessage where that is impossible or another one."""
        entry, roots = self.entries.get((header.key, header.slice)), None if self._roots is None else self._roots()
        if roots is not None and header.root >= roots:
            raise BadMessage(f"a slice of global server {header.root} of {roots}")
        if entry is None:
            if len(self.entries) >= MAX_SLICES:
                raise BadMessage("too many slices")
            if not self._declared(header):
                raise BadMessage(f"slice {header.slice} of key {header.key} was not declared as it is here")
            slot = SliceView(header.key, header.slice)
            entry = SliceState(slot, header.root, header.length, header.dtype, header.offset, header.row)
            self.entries[header.key, header.slice] = entry
        if (header.length, header.dtype, header.root, header.row) != (entry.length, entry.dtype, entry.root, entry.row):
            found = f"{header.length} elements of {DTYPES[header.dtype]} in rows of {header.row}"
            raise BadMessage(f"{found} for a slice of {entry.length} in rows of {entry.row}")
        return entry

    def member(self, rank: int) -> int:
        """The number of the cohort that this rank goes at: 0 where all go through rounds together."""
        return self._alone(rank) if self.algorithm.asynchronous and self._roots is None else 0

    def round(
        self, entry: SliceState, cohort: Cohort, number: int, priority: int, ranks: Iterable[int]
    ) -> RoundState:
        """This round of a slice, which is open from now on, for a contribution of these ranks that has come."""
        self.moves += 1
        self.came.update(ranks)
        round_ = cohort.rounds.get(number)
        if round_ is None:
            round_ = cohort.rounds[number] = RoundState()
            round_.accumulator.priority = priority
            self._open[entry.slot.key, entry.slot.index, cohort.member, number] = (entry, cohort, round_)
        return round_

    def members(self, cohort: Cohort) -> list[int]:
        """The ranks that owe contributions to rounds of this cohort."""
        return [rank for rank in self.owing() or () if self.member(rank) == cohort.member]

    def too_far_behind(self, entry: SliceState, cohort: Cohort) -> set[int]:
        """The ranks that are more than the bound behind this cohort, whose next result waits for them."""
        bound = self.algorithm.max_staleness
        if not self.algorithm.asynchronous or bound < 0 or self._roots is not None:
            return set()
        return {
            rank for rank in self.owing() or () if cohort.closed - entry.cohort(self.member(rank)).closed > bound
        }

    def waits_no_more(self, entry: SliceState, cohort: Cohort) -> None:
        """The round that is decided waits for no member."""
        self._open.pop((entry.slot.key, entry.slot.index, cohort.member, cohort.closed), None)

    def go_alone(self, *, late: bool) -> bool:
        """Have a root take each member's contributions by themselves from now on, also those that wait for others'.

        False if it is too `late` for that, also because some have been added up, here or before they came.
        """
        if self.algorithm.asynchronous:
            return True
        open_ = [round_.accumulator for _, _, round_ in self._open.values()]
        if late or any(item.ranks or any(len(given.ranks) > 1 for given in item.parked()) for item in open_):
            return False
        self.algorithm.asynchronous = True
        for entry in self.entries.values():
            together = entry.cohorts.pop(0, Cohort(0))
            for number, round_ in together.rounds.items():
                del self._open[entry.slot.key, entry.slot.index, 0, number]
                for given in round_.accumulator.parked():
                    rank = given.ranks[0]
                    cohort = entry.cohort(self.member(rank))
                    own = self.round(entry, cohort, number, round_.accumulator.priority, given.ranks)
                    own.waiters[rank] = round_.waiters[rank]
                    own.accumulator.offer(given)
        return True

    def lengths(self) -> dict[tuple[int, int], int]:
        """How many elements each slice has, by key and index."""
        return {where: entry.length for where, entry in self.entries.items()}

    def changed(self) -> None:
        """Members have come or left, or a round is over: other contributions may be missing now."""
        self.moves += 1

    def open_rounds(self) -> Iterable[tuple[SliceState, Cohort, RoundState]]:
        """All that are open, in the order in which they were opened."""
        return self._open.values()

    def oldest(self) -> tuple[int, float, frozenset[int]] | None:
        """Of the rounds that wait for members, the one that was opened first: its number, when (time.monotonic
        seconds), and those members' ranks; none of them for a round that only waits to be decided.
        """
        first = None
        for (_, _, _, number), (entry, cohort, round_) in self._open.items():
            missing = self.missing(cohort, round_) or self.too_far_behind(entry, cohort)
            if missing:
                return number, round_.started, frozenset(missing)
            first = first or (number, round_.started, frozenset[int]())
        return first

    def missing(self, cohort: Cohort, round_: RoundState) -> set[int]:
        """The ranks whose contributions to this round have not come."""
        return round_.accumulator.missing(self.members(cohort))
