"""The slices of a server: the value and arrays of each, its open rounds, and the sums of their contributions.

A slice has one open round for each cohort. A member contributes to the next round only when it has the result of the
one before, so a server keeps one result, and asks no member what it has received.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from geomx_cli.ps.aggregation.algorithm import RowAlgorithm, ServerAlgorithm, SliceView, Sum
from geomx_cli.ps.aggregation.codec import Encoded, SliceRound
from geomx_cli.ps.arrays import Array, Arrays
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import DTYPES, Content, Rows, as_payload, digest
from geomx_cli.ps.net.wire import EVERY, BadMessage, Header, Reply

__all__ = [
    "Accumulator", "Cohort", "Contribution", "Overlap", "Result", "RoundState", "SERIAL", "SliceState", "SliceTable",
    "View", "Waiter", "merge_hyper",
]  # fmt: skip

MAX_SLICES = 1_000_000
SERIAL = "optimizer"
"""Name of the hyper-parameter by which a contribution asks for the optimizer of this serial number, from 1 on."""


def merge_hyper(known: dict[str, float], news: Mapping[str, float]) -> dict[str, float]:
    """Merge the hyper-parameters `news` into `known` and return `known`. Those of an older optimizer (lower SERIAL) are
    ignored; those of a newer one replace all.
    """
    before, now = known.get(SERIAL, 0.0), news.get(SERIAL, 0.0)
    if now > before:
        known.clear()
    if now >= before:
        known.update(news)
    return known


# The sum of a round.


class Overlap(BadMessage):
    """A merged contribution some of whose ranks have come by another way."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """A member's message for one slice and round.

    ranks: those whose contributions it has merged.
    array: read-only elements or rows. Without it the contribution abstains: it counts as received and adds nothing.
    done: returns the credit of its message.
    sender: the member whose link brought it, which may be another that passed it on.
    """

    ranks: tuple[int, ...]
    array: Content | None
    weight: float
    hyper: dict[str, float]
    done: Callable[[], None]
    sender: int | None = None

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks whose windows it may occupy: the sender's, and those of members that it speaks for."""
        return self.ranks if self.sender is None else (*self.ranks, self.sender)


@dataclass(slots=True)
class Accumulator:
    """Sums the contributions to one slice in one round.

    Contributions may arrive in any order, but floating-point sums depend on the order. So they are added in rank order:
    one that arrives before one of a lower rank is parked, and results are the same bits in every run. Credit is
    returned only when the round is complete: so no member gets ahead of another by more than its window, and results
    leave a shared link as evenly as contributions arrive.

    total: the sum, fp32 (fp64 for fp64 contributions); Rows as long as only rows were received; None if all abstained.
    With a single contribution it may be that contribution's own, read-only array.
    ranks: those added so far. weight: the sum of their weights.
    hyper: the hyper-parameters that any of them sent; those for an older optimizer are ignored.
    conflicts: names to which ranks gave different values, with the other value; the lower rank's is in `hyper`.
    set_by: the lowest rank of the contribution that each hyper-parameter is from.
    """

    total: Content | None = None
    ranks: set[int] = field(default_factory=set)
    weight: float = 0.0
    hyper: dict[str, float] = field(default_factory=dict)
    conflicts: dict[str, float] = field(default_factory=dict)
    set_by: dict[str, int] = field(default_factory=dict)
    priority: int = 0
    _parked: dict[int, Contribution] = field(default_factory=dict)
    _added: list[Contribution] = field(default_factory=list)
    _owned: bool = False

    def park(self, contribution: Contribution) -> bool:
        """Keep a contribution for `merge`. Returns False for a duplicate, that is if all of its ranks are present.

        A merged contribution replaces the parked ones that it includes. Raises Overlap for any other overlap,
        because some rank would count twice.
        """
        if self.has(contribution.ranks):
            return False
        ranks = set(contribution.ranks)
        parts = [item for item in self._parked.values() if not ranks.isdisjoint(item.ranks)]
        if not self.ranks.isdisjoint(ranks) or not all(ranks.issuperset(part.ranks) for part in parts):
            raise Overlap(f"contributions of ranks {contribution.ranks}, and some of them are here with others")
        for part in parts:
            self._parked.pop(min(part.ranks)).done()
        self._parked[min(ranks)] = contribution
        return True

    def has(self, ranks: Iterable[int]) -> bool:
        """Whether the contributions of all these ranks are present, added or parked."""
        return self.ranks.union(*(item.ranks for item in self._parked.values())).issuperset(ranks)

    def merge(self, required_contributors: Iterable[int]) -> bool:
        """Add parked contributions in rank order, up to the first missing rank. Returns True if none is missing.

        required_contributors: the ranks that have not left. They and the parked ranks make up the order of the sum.
        """
        for rank in sorted({*required_contributors, *self._parked} - self.ranks):
            if rank in self.ranks:  # merged with a lower one
                continue
            contribution = self._parked.pop(rank, None)
            if contribution is None:
                return False
            self._add(contribution)
        while self._added:
            self._added.pop().done()
        return True

    def hyper_names(self) -> set[str]:
        """The names of all hyper-parameters received."""
        return set(self.hyper).union(*(item.hyper for item in self._parked.values()))

    def parked(self) -> list[Contribution]:
        """The contributions received and not yet added."""
        return list(self._parked.values())

    def missing(self, required_contributors: Iterable[int]) -> set[int]:
        """The ranks of `required_contributors` whose contributions were not received."""
        return set(required_contributors).difference(self.ranks, *(item.ranks for item in self._parked.values()))

    def without_credit(self) -> set[int]:
        """The ranks whose windows contributions occupy that are held until others arrive."""
        return {rank for item in (*self._parked.values(), *self._added) for rank in item.holders}

    def _add(self, contribution: Contribution) -> None:
        if contribution.array is not None:
            self._add_content(contribution.array)
        self.ranks.update(contribution.ranks)
        self.weight += contribution.weight
        if contribution.hyper:
            self._add_hyper(contribution)
        self._added.append(contribution)

    def _add_hyper(self, contribution: Contribution) -> None:
        before = dict(self.hyper)
        if contribution.hyper.get(SERIAL, 0.0) == self.hyper.get(SERIAL, 0.0):
            for name, value in contribution.hyper.items():
                if self.hyper.setdefault(name, value) != value:
                    self.conflicts[name] = value
        else:
            merge_hyper(self.hyper, contribution.hyper)
        self.set_by |= {name: min(contribution.ranks) for name in self.hyper if before.get(name) != self.hyper[name]}

    def _add_content(self, given: Content) -> None:
        if (given.values if isinstance(given, Rows) else given).dtype == np.float16:
            given = given.astype(np.float32)
        # The first contribution becomes `total` without a copy, so it is written to only if `_owned`.
        if self.total is None:
            self.total = given
        elif isinstance(self.total, Rows) and isinstance(given, Rows):
            self.total = self.total.plus(given)
        elif isinstance(self.total, Rows):
            self.total, self._owned = self.total.dense(len(given)), True
            self._add_content(given)
        elif isinstance(given, Rows):
            # Sparse contributions are not made dense: only their rows of the sum are touched.
            if not self._owned:
                self.total, self._owned = self.total.copy(), True
            self.total.reshape(-1, given.row)[given.numbers] += given.values
        elif self._owned:
            np.add(self.total, given, out=self.total)
        else:
            self.total, self._owned = np.add(self.total, given), True


# A round and its result.


@dataclass(slots=True)
class Waiter:
    """A member waiting for a result.

    rank: its rank among the contributors. ranks: those that it brings. request: number of its request.
    reply: see wire.Reply. codec: accepted encoding of the result, "" for none.
    follows: whether the member has the previous round's result, to which a change could be applied.
    newest: of a pull: it wants the value after other members' rounds, and not an initial value.
    numbers: the pulled rows, None for all.
    split: it was told to send its own contribution instead of a merged one.
    """

    link: Link
    rank: int
    request: int
    priority: int
    ranks: tuple[int, ...] = ()
    reply: Reply = Reply.FULL
    codec: str = ""
    follows: bool = False
    newest: bool = False
    numbers: Array | None = None
    split: bool = False


@dataclass(slots=True)
class RoundState:
    """An open round. waiters: by their rank, then by request. started: in time.monotonic seconds."""

    accumulator: Accumulator = field(default_factory=Accumulator)
    waiters: dict[int, dict[int, Waiter]] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def wait(self, waiter: Waiter) -> None:
        """Answer this request at the end of the round, once."""
        self.waiters.setdefault(waiter.rank, {})[waiter.request] = waiter

    def waiting(self) -> list[Waiter]:
        """All who wait for the result."""
        return [waiter for each in self.waiters.values() for waiter in each.values()]

    def waiter_of(self, rank: int) -> Waiter | None:
        """Who waits for the result of this rank's contribution."""
        return next((waiter for waiter in self.waiting() if rank in waiter.ranks), None)


class View:
    """A value as the members in one plane see it: its encoding by `codec`, if any, and what these decode, which is made
    when first needed.
    """

    def __init__(self, array: Array | Callable[[], Array], encoded: Encoded | None = None, codec: str = "") -> None:
        self._array = array
        self.encoded = encoded
        self.codec = codec

    @property
    def made(self) -> Array | None:
        """The value, None while nobody has needed it decoded."""
        return None if callable(self._array) else self._array

    @property
    def array(self) -> Array:
        """The value in the slice's dtype."""
        if callable(self._array):
            self._array = self._array()
        return self._array


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to a round's members.

    views: the value as each plane's members see it; none if no member of the round wants it.
    version: of the value. contributors, weight: whose contributions are in the round.
    changed: the rows changed by a round of rows.
    is_sum: whether it is the sum of its round alone, not a value that rounds update.
    """

    views: tuple[View, ...]
    version: int
    contributors: tuple[int, ...] = ()
    weight: float = 0.0
    changed: Rows | None = None
    is_sum: bool = False

    def rows(self, reply: Reply, row: int) -> Rows | None:
        """The rows that this kind of reply has; None if it has all elements."""
        if reply == Reply.NONE:
            return Rows.none(row, DTYPES[0])
        return self.changed if reply == Reply.CHANGED else None


@dataclass(slots=True)
class Cohort:
    """Members whose rounds complete together: all members of a server, or a single party at a root of an asynchronous
    job. So synchronous and asynchronous jobs share the code for summing, repeats and departures.

    round: the open round, which has the number `finished` + 1; None before its first contribution.
    closed: the last decided round. finished: the last answered one, `closed` or the one before.
    result: of the round `finished`. A member may ask for it again until it has contributed to the next round, which
    does not close before. So a result before this one is never asked for.
    deferred: at a root: the closed round is in the value, and its answer waits for cohorts that are too far behind.
    version: of the value that the last round produced, or that the members have received since.
    changed: the rows changed by a round of rows that is closed and not finished.
    is_sum: whether the result of the last closed round is a sum, see Result.
    """

    member: int
    round: RoundState | None = None
    closed: int = 0
    finished: int = 0
    result: Result | None = None
    deferred: bool = False
    version: int = 0
    changed: Rows | None = None
    is_sum: bool = False

    @property
    def seen(self) -> tuple[View, ...]:
        """The value as each plane's members have got it in the last finished round, where a codec made it differ from
        the server's.
        """
        views = self.result.views if self.result is not None else ()
        return views if any(view.encoded is not None for view in views) else ()

    def cleared(self, total: Rows) -> Rows:
        """A sum of rows, with zeros where members have elements of the last sum that codecs sent with it."""
        for view in self.seen:
            total = total.with_zeros(total.not_zero(view.array))
        return total


# Slices.


@dataclass(slots=True, eq=False, kw_only=True)
class SliceState(SliceView):
    """One slice of a server. It owns the value and, in its parts, all other arrays that are kept with the slice.

    algorithm: decides on its rounds. root: rank of the global server that owns it.
    length, offset: in elements of the tensor. row: elements in a row. size: elements of the tensor. dtype: its code.
    shard: see Tensor.
    forwarded: rounds sent to the root. fetching: the value was requested from the root.
    pulls: those that wait for the value, by request number.
    hyper: the hyper-parameters set for its optimizer.
    initial_digest: at a local server, of the first PUSH. initial_from: the process whose PUSH came first.
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
    fetching: bool = False
    cohorts: dict[int, Cohort] = field(default_factory=dict)
    pulls: dict[Link, dict[int, Waiter]] = field(default_factory=dict)
    hyper: dict[str, float] = field(default_factory=dict)
    initial_digest: bytes = b""
    initial_from: str = ""
    _own: Array | None = None  # the value, while no one else may read it: then it is written in place

    @property
    def id(self) -> tuple[int, int]:
        """(key, index)."""
        return (self.key, self.index)

    def size_in_bytes(self, rows: int | None = None) -> int:
        """The size of the value, or of so many rows of it."""
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
        """The value. Others may read it from now on, so it is not modified in place any more."""
        assert self.value is not None
        self._own = None
        return self.value

    def was_given(self, expected: bytes) -> bool:
        """Whether this digest is of the initial value, as far as that is known, or of the present one."""
        value = self.value
        return expected == self.initial_digest or (value is not None and self.digest_of(value) == expected)

    def digest_of(self, value: Array) -> bytes:
        """The digest of such a value of this slice."""
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
    required_contributors: returns the ranks that owe contributions, None while no round may close.
    cohort_of: maps a rank to the number of its cohort in an asynchronous job.
    shard_of: maps a rank to the shard that it contributes, EVERY for one that contributes all.
    declared: whether the slice in a header was declared, as far as this server knows.

    asynchronous: whether the roots handle each party's contributions separately; a local server learns it from their
    results. takes_rows: whether the algorithm takes sums of rows.
    finished: the highest finished round of each cohort number, in any slice.
    contributed: the highest of all to which a member has contributed.
    moves: increases with every change that may affect which contributions are missing.
    came: counts the contributions of each rank. bytes: of the values of all slices.
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
        """Bytes are what collective operations carry: an algorithm that updates values must not touch them."""
        return Sum() if self.algorithm.starts_from_value and DTYPES[dtype].kind != "f" else self.algorithm

    def trains(self, entry: SliceState) -> bool:
        """Whether the job's algorithm decides on the rounds of the slice."""
        return entry.algorithm is self.algorithm

    # Members.

    def member(self, rank: int) -> int:
        """The cohort number of this rank: 0 if all members complete rounds together."""
        return self._cohort_of(rank) if self.asynchronous and self.is_root else 0

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
                    # The newest stays: a result is made in the form that those want who wait for it. The answer to a
                    # request of an earlier life is dropped there.
                    for request in [request for request, waiter in own.items() if waiter.link is link][:-1]:
                        del own[request]

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
        """The first-opened round that waits for members: its number, when it was opened (time.monotonic seconds), and
        the missing members' ranks. If none waits for members, the first-opened round, with no ranks.
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
        """Give each slice these arrays in a part; slices without any lose theirs."""
        for where, entry in self.entries.items():
            entry.parts[part] = arrays.get(where, {})
