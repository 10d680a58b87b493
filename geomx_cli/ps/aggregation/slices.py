"""The slices of a server: the value and arrays of each, and its rounds (rounds.py).

A slice has one open round for each cohort. A member contributes to the next round only when it has the result of the
one before, so a server keeps one result, and asks no member what it has received.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from geomx_cli.ps.aggregation.algorithm import RowAlgorithm, ServerAlgorithm, SliceView, Sum
from geomx_cli.ps.aggregation.codec import SliceRound
from geomx_cli.ps.aggregation.rounds import Cohort, RoundState, Waiter
from geomx_cli.ps.arrays import Array, Arrays
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import DTYPES, Rows, as_payload, digest
from geomx_cli.ps.net.wire import EVERY, BadMessage, Header

__all__ = ["SliceState", "SliceTable"]

MAX_SLICES = 1_000_000


@dataclass(slots=True, eq=False, kw_only=True)
class SliceState(SliceView):
    """One slice of a server. It owns the value and, in its parts, all other arrays that are kept with the slice.

    algorithm: decides on its rounds.
    root: rank of the global server that owns it.
    length, offset: its length, and its first element's position in the tensor, in elements.
    row: elements in a row.
    size: elements of the tensor.
    dtype: code of its dtype.
    shard: see Tensor.
    forwarded: rounds sent to the root.
    missed_to: at a local server whose party was left out: the newest round that was over at the root without the party,
        until the party takes part in a round again; otherwise 0.
    has_missed: whether that has ever happened.
    fetching: whether the value was requested from the root.
    pulls: the pulls that wait for the value, by request number.
    hyper: the hyper-parameters set for its optimizer.
    initial_digest: at a local server, the digest of the first PUSH.
    initial_from: the process whose PUSH came first.
    """

    algorithm: ServerAlgorithm
    root: int
    length: int
    dtype: int
    offset: int
    row: int
    size: int
    shard: int
    forwarded: int = 0
    missed_to: int = 0
    has_missed: bool = False
    fetching: bool = False
    cohorts: dict[int, Cohort] = field(default_factory=dict)
    pulls: dict[Link, dict[int, Waiter]] = field(default_factory=dict)
    hyper: dict[str, float] = field(default_factory=dict)
    initial_digest: bytes = b""
    initial_from: str = ""
    _own: Array | None = None  # the value, while no other object may read it: then it is written in place

    @property
    def id(self) -> tuple[int, int]:
        """(key, index)."""
        return (self.key, self.index)

    def size_in_bytes(self, rows: int | None = None) -> int:
        """The bytes of the value, or of so many rows of it."""
        return (self.length if rows is None else rows * self.row) * DTYPES[self.dtype].itemsize

    def in_round(self, number: int) -> SliceRound:
        """This slice in a round, for its codec."""
        return SliceRound(self, self.dtype, self.size, number)

    def write(self, rows: Rows) -> None:
        """Write rows into the value. A value handed out by `share` is copied first, so readers never see the change."""
        assert self.value is not None
        if not len(rows):
            return
        if self._own is not self.value:
            self._own = self.value = self.value.copy()
        rows.write_to(self._own)

    def share(self) -> Array:
        """The value. Others may read it from now on, so it is no longer modified in place."""
        assert self.value is not None
        self._own = None
        return self.value

    def was_given(self, expected: bytes) -> bool:
        """Whether this is the digest of the initial value, if that is known, or of the present value."""
        value = self.value
        return expected == self.initial_digest or (value is not None and self.digest_of(value) == expected)

    def digest_of(self, value: Array) -> bytes:
        """The digest of `value` in this slice's dtype."""
        return digest(as_payload(value, self.dtype), self.dtype)

    def cohort(self, member: int) -> Cohort:
        """The cohort of this member; 0 is the cohort of all members in a synchronous job."""
        cohort = self.cohorts.get(member)
        if cohort is None:
            cohort = self.cohorts[member] = Cohort(member)
        return cohort


class SliceTable:
    """All slices of one server. Used by the loop's thread only.

    roots: returns the number of roots above; None at a root.
    required_contributors: returns the ranks that owe contributions; None while no round may close.
    cohort_of: maps a rank to the number of its cohort in an asynchronous job.
    shard_of: maps a rank to the shard that it contributes; EVERY for a rank that contributes all shards.
    declared: whether the slice in a header was declared, as far as this server knows.
    asynchronous: whether the roots handle each party's contributions separately. A local server learns this from their
        results.
    takes_rows: whether the algorithm accepts sums of rows.
    finished: the highest finished round of each cohort number, in any slice.
    contributed: the highest round to which any member has contributed.
    moves: increases with every change that may affect which contributions are missing.
    came: counts the contributions of each rank.
    bytes: the bytes of all slices' values.
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
        # the rounds that wait for members, by slice and cohort, in the order in which they were opened
        self._open: dict[tuple[int, int, int], tuple[SliceState, Cohort, RoundState]] = {}
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
            entry = self.add(header)
        known = (entry.length, entry.dtype, entry.root, entry.row, entry.size)
        if (header.length, header.dtype, header.root, header.row, header.size) != known:
            found = f"{header.length} of {header.size} elements of {DTYPES[header.dtype]} in rows of {header.row}"
            own = f"{entry.length} of {entry.size} in rows of {entry.row}"
            where = f", of global server {header.root} and {entry.root}" if header.root != entry.root else ""
            raise BadMessage(f"{found} for a slice of {own}{where}")
        if header.shard != entry.shard:
            raise BadMessage(f"shard {header.shard} for a slice of shard {entry.shard}")
        return entry

    def add(self, header: Header) -> SliceState:
        """A new slice, as a header describes it."""
        entry = SliceState(
            key=header.key, index=header.slice, algorithm=self._algorithm_for(header.dtype), root=header.root,
            length=header.length, dtype=header.dtype, offset=header.offset, row=header.row, size=header.size,
            shard=header.shard,
        )  # fmt: skip
        self.entries[header.key, header.slice] = entry
        self.bytes += entry.size_in_bytes()
        return entry

    def _algorithm_for(self, dtype: int) -> ServerAlgorithm:
        """Collective operations carry bytes. An algorithm that updates values must not touch them."""
        return Sum() if self.algorithm.starts_from_value and DTYPES[dtype].kind != "f" else self.algorithm

    def trains(self, entry: SliceState) -> bool:
        """Whether the job's algorithm decides on the rounds of the slice."""
        return entry.algorithm is self.algorithm

    # Members.

    def member(self, rank: int) -> int:
        """The cohort number of this rank: 0 if all members complete rounds together."""
        return self._cohort_of(rank) if self.asynchronous and self.is_root else 0

    def contributes(self, entry: SliceState | None, rank: int) -> bool:
        """Whether this rank contributes to the slice. To a shard's slice, only one worker of each party contributes.

        entry: None for a slice of which no message has arrived.
        """
        return entry is None or entry.shard == EVERY or self._shard_of(rank) in (EVERY, entry.shard)

    def members(self, entry: SliceState | None, cohort: Cohort) -> list[int]:
        """The ranks that owe contributions to this cohort's rounds of the slice."""
        ranks = [rank for rank in self.required_contributors() or () if self.contributes(entry, rank)]
        return [rank for rank in ranks if self.member(rank) == cohort.member]

    def too_far_behind(self, entry: SliceState, cohort: Cohort) -> set[int]:
        """The ranks that are behind this cohort by more than the bound on staleness. Its next result waits for them."""
        bound = self.algorithm.max_staleness
        if not self.asynchronous or bound < 0 or not self.is_root:
            return set()
        ranks = [rank for rank in self.required_contributors() or () if self.contributes(entry, rank)]
        return {rank for rank in ranks if cohort.closed - entry.cohort(self.member(rank)).closed > bound}

    def changed(self) -> None:
        """Membership has changed, so other contributions may be missing now."""
        self.moves += 1

    # Rounds.

    def round(self, entry: SliceState, cohort: Cohort, priority: int, ranks: Iterable[int]) -> RoundState:
        """The open round, for a received contribution of these ranks."""
        self.moves += 1
        self.came.update(ranks)
        if cohort.round is None:
            cohort.round = RoundState()
            cohort.round.accumulator.priority = priority
            self._open[entry.key, entry.index, cohort.member] = (entry, cohort, cohort.round)
        return cohort.round

    def waits_no_more(self, entry: SliceState, cohort: Cohort) -> None:
        """The cohort's closed round no longer waits for members."""
        self._open.pop((entry.key, entry.index, cohort.member), None)

    def finish(self, entry: SliceState, cohort: Cohort) -> RoundState:
        """Remove the cohort's closed round, which is finished."""
        self.waits_no_more(entry, cohort)
        assert cohort.round is not None
        round_, cohort.round = cohort.round, None
        cohort.finished = cohort.closed
        self.moves += 1  # the next round may close now
        self.note_finished(entry, cohort, contributed=bool(round_.accumulator.weight))
        return round_

    def note_finished(self, entry: SliceState, cohort: Cohort, *, contributed: bool) -> None:
        """The cohort has finished a round. contributed: a member has contributed to it."""
        if self.trains(entry):
            self.finished[cohort.member] = max(self.finished.get(cohort.member, 0), cohort.finished)
            if contributed:
                self.contributed = max(self.contributed, cohort.finished)

    def forget_requests(self, link: Link) -> None:
        """The process at this link was restarted, so it asks for everything again."""
        for entry in self.entries.values():
            entry.pulls.pop(link, None)
            for cohort in entry.cohorts.values():
                for own in cohort.round.waiters.values() if cohort.round is not None else ():
                    # Keep the newest request, because the waiting requests decide the forms of a result. The link drops
                    # an answer to a request of an earlier life.
                    for request in [request for request, waiter in own.items() if waiter.link is link][:-1]:
                        del own[request]

    @property
    def last_round(self) -> int:
        """The highest finished round of any slice."""
        return max(self.finished.values(), default=0)

    def closed(self) -> dict[int, int]:
        """The highest round of each key that is decided in at least one of its slices."""
        found: dict[int, int] = {}
        for (key, _), entry in self.entries.items():
            found[key] = max(found.get(key, 0), *(cohort.closed for cohort in entry.cohorts.values()), 0)
        return {key: round_ for key, round_ in found.items() if round_}

    def switch_to_async(self) -> bool:
        """Switch a root to handling each member's contributions separately, including contributions that wait for
        others.

        Returns False if a round is finished, or if contributions were already summed, here or before they were sent.
        """
        if self.asynchronous:
            return True
        open_ = [round_.accumulator for _, _, round_ in self._open.values()]
        if self.finished or any(item.ranks or any(len(given.ranks) > 1 for given in item.parked()) for item in open_):
            return False
        self.asynchronous = self.algorithm.asynchronous = True
        for entry, together, round_ in list(self._open.values()):
            self.waits_no_more(entry, together)
            for given in round_.accumulator.parked():
                rank = given.ranks[0]
                own = self.round(entry, entry.cohort(self.member(rank)), round_.accumulator.priority, given.ranks)
                if (waiter := round_.waiter_of(rank)) is not None:
                    own.wait(waiter)
                own.accumulator.park(given)
        for entry in self.entries.values():
            entry.cohorts.pop(0, None)
        return True

    def open_rounds(self) -> Iterable[tuple[SliceState, Cohort, RoundState]]:
        """All rounds that wait for members, in the order in which they were opened."""
        return self._open.values()

    def oldest(self) -> tuple[int, float, frozenset[int]] | None:
        """The first-opened round that waits for members. Returns its number, when it was opened (time.monotonic
        seconds), and the missing members' ranks. If no round waits for members: the first-opened round, with no ranks.
        """
        first = None
        for entry, cohort, round_ in self._open.values():
            missing = self.missing(entry, cohort, round_) or self.too_far_behind(entry, cohort)
            found = cohort.finished + 1, round_.started, frozenset(missing)
            if missing:
                return found
            first = first or found
        return first

    def missing(self, entry: SliceState, cohort: Cohort, round_: RoundState) -> set[int]:
        """The ranks whose contributions to this round of the slice were not received."""
        return round_.accumulator.missing(self.members(entry, cohort))

    # The arrays kept with slices, by part.

    @property
    def holds_sums(self) -> bool:
        """Whether results are sums of their rounds, of which the workers make the weights."""
        return any(
            cohort.is_sum for entry in self.entries.values() if self.trains(entry) for cohort in entry.cohorts.values()
        )

    def lengths(self) -> dict[tuple[int, int], int]:
        """The number of elements of each slice, by key and index."""
        return {where: entry.length for where, entry in self.entries.items()}

    def updates(self) -> int:
        """The total number of updates that optimizers have made of all slices."""
        states = (entry.optimizer_state for entry in self.entries.values())
        return sum(int(state["step"][0]) for state in states if state)

    def copy_of(self, part: str) -> Arrays:
        """Copies of the arrays that all slices have in a part, named "key/index/name"."""
        return {
            f"{key}/{index}/{name}": array.copy()
            for (key, index), entry in sorted(self.entries.items())
            for name, array in entry.part(part).items()
        }

    def replace(self, part: str, arrays: Mapping[tuple[int, int], Arrays]) -> None:
        """Give each slice these arrays in a part. A slice for which there are none loses its arrays in this part."""
        for where, entry in self.entries.items():
            entry.parts[part] = arrays.get(where, {})
