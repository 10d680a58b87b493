"""A server's state of one slice: its value, the open rounds, and results not acknowledged by all members."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from geomx_cli.ps.aggregation.algorithm import ServerAlgorithm, SliceView
from geomx_cli.ps.aggregation.codec import Encoded, SliceRound
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import DTYPES, Content, Rows, as_payload, digest
from geomx_cli.ps.net.wire import EVERY, BadMessage, Reply

__all__ = [
    "Accumulator", "Cohort", "Contribution", "Overlap", "Result", "RoundState", "SERIAL", "SliceState", "View",
    "Waiter", "merge_hyper",
]  # fmt: skip

# Accumulates the contributions to one slice in one round. Contributions may arrive in any order but are added in rank
# order, so the sum is bit-for-bit reproducible. A contribution that arrives before one of a lower rank is parked.
# Credit is returned only when the round is complete: so no member gets ahead of another by more than its window, and
# results leave a shared link as evenly as contributions arrive.

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


class Overlap(BadMessage):
    """A merged contribution some of whose ranks have come by another way."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """A member's message for one slice and round: the merged ranks, a read-only array or rows, their weight, and the
    callback that returns the credit.

    Without an array it abstains: it counts as received and adds nothing. sender: the member whose link brought it,
    which may be another that passed it on.
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
    """The contributions to one slice and round.

    `total` is fp32 (fp64 for fp64 contributions). With a single contribution it may be that contribution's own,
    read-only array; it stays Rows as long as only rows were received, and is None if all members abstained. `ranks`:
    those added so far; `weight`: the sum of their weights; `hyper`: the hyper-parameters that any of them sent. If two
    ranks sent different values, the lower rank's wins and `conflicts` holds the name with the other value; values for
    an older optimizer are ignored. `set_by`: the lowest rank of the contribution that each is from.
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

    def offer(self, contribution: Contribution) -> bool:
        """Park a contribution for `merge`. Returns False for a duplicate, that is if all of its ranks are present.

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
            if rank in self.ranks:
                continue
            contribution = self._parked.pop(rank, None)
            if contribution is None:
                return False
            self._add(contribution)
        # Credit is returned only when the round is complete (see the module's docstring).
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
            if not self._owned:
                self.total, self._owned = self.total.copy(), True
            self.total.reshape(-1, given.row)[given.numbers] += given.values
        elif self._owned:
            np.add(self.total, given, out=self.total)
        else:
            self.total, self._owned = np.add(self.total, given), True


@dataclass(slots=True)
class Waiter:
    """A member waiting for a result: its rank among the contributors, its request number and the ranks that it brings.

    reply: see wire.Reply. codec: accepted encoding of the result, "" for none. follows: whether the member has the
    previous round's result, to which a change could be applied. newest: for a pull, whether it wants the value after
    other members' rounds and not an initial value. numbers: the pulled rows, None for all. split: it was told to send
    its own contribution instead of a merged one.
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
    """An open round. `waiters`: by their rank, then by request."""

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
    def array(self) -> Array:
        """The value in the slice's dtype."""
        if callable(self._array):
            self._array = self._array()
        return self._array


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to a round's members: the value, its version, the contributing ranks and their weight.

    views: the value as each plane's members see it; none if no member of the round wants it. changed: the rows changed
    by a round of rows. `owed`: the contributors that have not acknowledged the result; any of them may ask again if its
    answer was lost. is_sum: whether it is the sum of its round alone, not a value that rounds update.
    """

    views: tuple[View, ...]
    version: int
    contributors: tuple[int, ...] = ()
    weight: float = 0.0
    owed: set[int] = field(default_factory=set)
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

    closed: the last decided round. finished: the last answered round. results: of finished rounds, kept until all
    members have acknowledged them. Members acknowledge with their next contribution, so in a job with one round per
    worker in flight this is only the value itself, otherwise one per round in flight. deferred: at a root, the round
    that is in the value and not yet answered because other cohorts are too far behind. version: of the value that the
    last round produced, or that the members have received since. changed: the rows changed by a round of rows that is
    closed and not finished. is_sum: whether the result of the last closed round is a sum, see Result. seen: the value
    as each plane's members have got it in the last finished round, where a codec made it differ from the server's.
    """

    member: int
    rounds: dict[int, RoundState] = field(default_factory=dict)
    closed: int = 0
    finished: int = 0
    results: dict[int, Result] = field(default_factory=dict)
    deferred: Accumulator | None = None
    version: int = 0
    changed: Rows | None = None
    is_sum: bool = False
    seen: tuple[View, ...] = ()

    def cleared(self, total: Rows) -> Rows:
        """A sum of rows, with zeros where members have elements of the last sum that codecs sent with it."""
        for view in self.seen:
            total = total.with_zeros(total.not_zero(view.array))
        return total

    def acknowledge(self, rank: int, round_: int) -> None:
        """Record that this rank has received the results of all rounds up to `round_`."""
        for number in [number for number in self.results if number <= round_]:
            owed = self.results[number].owed
            owed.discard(rank)
            if not owed:
                del self.results[number]


@dataclass(slots=True)
class SliceState:
    """One slice. `algorithm`: decides on its rounds. `row`: elements in a row. `size`: elements of its tensor.
    `shard`: see Tensor. `forwarded`: rounds sent to the root. `fetching`: the value was requested from the root.
    `pulls`: those that wait for the value, by request number.
    `hyper`: the hyper-parameters set for its optimizer. `initial_digest`: at a local server, of the first PUSH.
    `initial_from`: the process whose PUSH came first.
    """

    slot: SliceView
    algorithm: ServerAlgorithm
    root: int
    length: int
    dtype: int
    offset: int
    row: int = 1
    forwarded: int = 0
    size: int = 0
    shard: int = EVERY
    fetching: bool = False
    cohorts: dict[int, Cohort] = field(default_factory=dict)
    pulls: dict[Link, dict[int, Waiter]] = field(default_factory=dict)
    hyper: dict[str, float] = field(default_factory=dict)
    initial_digest: bytes = b""
    initial_from: str = ""
    _own: Array | None = None  # the value, while no one else may read it: then it is written in place

    def size_in_bytes(self, rows: int | None = None) -> int:
        """The size of the value, or of so many rows of it."""
        return (self.length if rows is None else rows * self.row) * DTYPES[self.dtype].itemsize

    def in_round(self, number: int) -> SliceRound:
        """This slice in a round, for its codec."""
        return SliceRound(self.slot.key, self.slot.index, self.dtype, self.size, number)

    def write(self, rows: Rows) -> None:
        """Write rows into the value. A value handed out by `give` is copied first, so readers never see the change."""
        assert self.slot.value is not None
        if not len(rows):
            return
        if self._own is not self.slot.value:
            self._own = self.slot.value = self.slot.value.copy()
        rows.write_to(self._own)

    def give(self) -> Array:
        """Hand out the value. Others may read it from now on, so it must not be modified in place."""
        assert self.slot.value is not None
        self._own = None
        return self.slot.value

    def was_given(self, expected: bytes) -> bool:
        """Whether this digest is of the initial value, as far as that is known, or of the present one."""
        value = self.slot.value
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
