"""All slices of one server and their open rounds: which members take part, and which are missing."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable

from geomx_cli.ps.aggregation.algorithm import RowAlgorithm, ServerAlgorithm, SliceView, Sum
from geomx_cli.ps.aggregation.slice_state import Cohort, RoundState, SliceState
from geomx_cli.ps.net.payload import DTYPES
from geomx_cli.ps.net.wire import EVERY, BadMessage, Header

__all__ = ["SliceTable"]

MAX_SLICES = 1_000_000


class SliceTable:
    """All slices of one server. Used by the loop's thread only.

    roots: returns the number of roots above; None at a root. required_contributors: returns the ranks that owe
    contributions, None while no round may close. cohort_of: maps a rank to the number of its cohort in an asynchronous
    job. shard_of: maps a rank to the shard that it contributes, EVERY for one that contributes all.
    declared: whether the slice in a header was declared, as far as this server knows.

    `asynchronous`: whether the roots handle each party's contributions separately; a local server learns it from their
    results. `takes_rows`: whether the algorithm takes sums of rows. `finished`: the highest finished round of each
    cohort number, in any slice; `contributed`: the highest of all to which a member has contributed. `moves` increases
    with every change that may affect which contributions are missing; `came` counts the contributions of each rank.
    `bytes`: of the values of all slices.
    """

    def __init__(
        self,
        *,
        algorithm: ServerAlgorithm,
        roots: Callable[[], int] | None,
        required_contributors: Callable[[], Collection[int] | None],
        cohort_of: Callable[[int], int] = lambda rank: rank,
        shard_of: Callable[[int], int] = lambda rank: rank,
        declared: Callable[[Header], bool] = lambda _: True,
    ) -> None:
        self.algorithm = algorithm
        self.asynchronous = algorithm.asynchronous
        self.takes_rows = isinstance(algorithm, RowAlgorithm) and algorithm.takes_rows
        self.is_root = roots is None
        self.required_contributors = required_contributors
        self.entries: dict[tuple[int, int], SliceState] = {}
        self._roots = roots
        self._cohort_of = cohort_of
        self._shard_of = shard_of
        self._declared = declared
        self._open: dict[tuple[int, int, int, int], tuple[SliceState, Cohort, RoundState]] = {}
        self.finished: dict[int, int] = {}
        self.contributed = 0
        self.moves = 0
        self.came: Counter[int] = Counter()
        self.bytes = 0

    def entry(self, header: Header) -> SliceState:
        """The slice that a message refers to. Raises BadMessage if it is impossible or differs from the known one."""
        entry, roots = self.entries.get((header.key, header.slice)), None if self._roots is None else self._roots()
        if roots is not None and header.root >= roots:
            raise BadMessage(f"a slice of global server {header.root} of {roots}")
        if entry is None:
            if len(self.entries) >= MAX_SLICES:
                raise BadMessage("too many slices")
            if not self._declared(header):
                raise BadMessage(f"slice {header.slice} of key {header.key} was not declared as it is here")
            slot = SliceView(header.key, header.slice)
            entry = SliceState(
                slot, self._algorithm_for(header.dtype), header.root, header.length, header.dtype, header.offset,
                header.row, size=header.size, shard=header.shard,
            )  # fmt: skip
            self.entries[header.key, header.slice] = entry
            self.bytes += entry.size_in_bytes()
        known = (entry.length, entry.dtype, entry.root, entry.row, entry.size)
        if (header.length, header.dtype, header.root, header.row, header.size) != known:
            found = f"{header.length} of {header.size} elements of {DTYPES[header.dtype]} in rows of {header.row}"
            own = f"{entry.length} of {entry.size} in rows of {entry.row}"
            where = f", of global server {header.root} and {entry.root}" if header.root != entry.root else ""
            raise BadMessage(f"{found} for a slice of {own}{where}")
        if header.shard != entry.shard:
            raise BadMessage(f"shard {header.shard} for a slice of shard {entry.shard}")
        return entry

    def _algorithm_for(self, dtype: int) -> ServerAlgorithm:
        """Bytes are what collective operations carry: an algorithm that updates values must not touch them."""
        return Sum() if self.algorithm.starts_from_value and DTYPES[dtype].kind != "f" else self.algorithm

    def trains(self, entry: SliceState) -> bool:
        """Whether the job's algorithm decides on the rounds of the slice."""
        return entry.algorithm is self.algorithm

    def member(self, rank: int) -> int:
        """The cohort number of this rank: 0 if all members complete rounds together."""
        return self._cohort_of(rank) if self.asynchronous and self.is_root else 0

    def round(
        self, entry: SliceState, cohort: Cohort, number: int, priority: int, ranks: Iterable[int]
    ) -> RoundState:
        """The round for a received contribution of these ranks; opened if it is the first."""
        self.moves += 1
        self.came.update(ranks)
        round_ = cohort.rounds.get(number)
        if round_ is None:
            round_ = cohort.rounds[number] = RoundState()
            round_.accumulator.priority = priority
            self._open[entry.slot.key, entry.slot.index, cohort.member, number] = (entry, cohort, round_)
        return round_

    def contributes(self, entry: SliceState | None, rank: int) -> bool:
        """Whether this rank contributes to the slice: to a shard's, only one of a party's workers does. entry: None for
        a slice of which no message has come.
        """
        return entry is None or entry.shard == EVERY or self._shard_of(rank) in (EVERY, entry.shard)

    def members(self, entry: SliceState | None, cohort: Cohort) -> list[int]:
        """The ranks that owe contributions to this cohort's rounds of the slice."""
        ranks = [rank for rank in self.required_contributors() or () if self.contributes(entry, rank)]
        return [rank for rank in ranks if self.member(rank) == cohort.member]

    def too_far_behind(self, entry: SliceState, cohort: Cohort) -> set[int]:
        """The ranks that are behind this cohort by more than the bound on staleness; its next result waits for them."""
        bound = self.algorithm.max_staleness
        if not self.asynchronous or bound < 0 or not self.is_root:
            return set()
        ranks = [rank for rank in self.required_contributors() or () if self.contributes(entry, rank)]
        return {rank for rank in ranks if cohort.closed - entry.cohort(self.member(rank)).closed > bound}

    def waits_no_more(self, entry: SliceState, cohort: Cohort) -> None:
        """The cohort's closed round no longer waits for members."""
        self._open.pop((entry.slot.key, entry.slot.index, cohort.member, cohort.closed), None)

    def finish(self, entry: SliceState, cohort: Cohort) -> RoundState:
        """Remove the cohort's closed round, which is finished."""
        self.waits_no_more(entry, cohort)
        cohort.finished = cohort.closed
        if self.trains(entry):
            self.finished[cohort.member] = max(self.finished.get(cohort.member, 0), cohort.finished)
        self.moves += 1  # the next round may close now
        round_ = cohort.rounds.pop(cohort.finished)
        if round_.accumulator.weight and self.trains(entry):
            self.contributed = max(self.contributed, cohort.finished)
        return round_

    @property
    def last_round(self) -> int:
        """The highest finished round of any slice."""
        return max(self.finished.values(), default=0)

    def closed(self) -> dict[int, int]:
        """The highest round of each key that is decided in any of its slices."""
        found: dict[int, int] = {}
        for (key, _), entry in self.entries.items():
            found[key] = max(found.get(key, 0), *(cohort.closed for cohort in entry.cohorts.values()), 0)
        return {key: round_ for key, round_ in found.items() if round_}

    def switch_to_async(self) -> bool:
        """Switch a root to handling each member's contributions separately, including those waiting for others.

        Returns False if a round is finished, or if contributions were already added up, here or before they were sent.
        """
        if self.asynchronous:
            return True
        open_ = [round_.accumulator for _, _, round_ in self._open.values()]
        if self.finished or any(item.ranks or any(len(given.ranks) > 1 for given in item.parked()) for item in open_):
            return False
        self.asynchronous = self.algorithm.asynchronous = True
        for entry in self.entries.values():
            together = entry.cohorts.pop(0, Cohort(0))
            for number, round_ in together.rounds.items():
                del self._open[entry.slot.key, entry.slot.index, 0, number]
                for given in round_.accumulator.parked():
                    rank = given.ranks[0]
                    cohort = entry.cohort(self.member(rank))
                    own = self.round(entry, cohort, number, round_.accumulator.priority, given.ranks)
                    if (waiter := round_.waiter_of(rank)) is not None:
                        own.wait(waiter)
                    own.accumulator.offer(given)
        return True

    def lengths(self) -> dict[tuple[int, int], int]:
        """The number of elements of each slice, by key and index."""
        return {where: entry.length for where, entry in self.entries.items()}

    def changed(self) -> None:
        """Membership has changed, so other contributions may be missing now."""
        self.moves += 1

    def open_rounds(self) -> Iterable[tuple[SliceState, Cohort, RoundState]]:
        """All open rounds, in the order in which they were opened."""
        return self._open.values()

    def oldest(self) -> tuple[int, float, frozenset[int]] | None:
        """The first-opened round that waits for members: its number, when it was opened (time.monotonic seconds), and
        the missing members' ranks. If none waits for members, the first-opened round, with no ranks.
        """
        first = None
        for (_, _, _, number), (entry, cohort, round_) in self._open.items():
            due = min(number, cohort.closed + 1)
            if due < number and due in cohort.rounds:
                continue  # who has skipped a round is waited for, not those that have yet to contribute to a later one
            missing = self.missing(entry, cohort, round_) if due == number else set(self.members(entry, cohort))
            missing = missing or self.too_far_behind(entry, cohort)
            if missing:
                return due, round_.started, frozenset(missing)
            first = first or (due, round_.started, frozenset[int]())
        return first

    def missing(self, entry: SliceState, cohort: Cohort, round_: RoundState) -> set[int]:
        """The ranks whose contributions to this round of the slice were not received."""
        return round_.accumulator.missing(self.members(entry, cohort))
