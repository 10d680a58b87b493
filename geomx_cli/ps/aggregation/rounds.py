"""The rounds of a slice: the sum of a round's contributions, the members that wait for its result, and the result."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from geomx_cli.ps.aggregation.codec import Encoded
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import DTYPES, Content, Rows
from geomx_cli.ps.net.wire import BadMessage, Reply

__all__ = [
    "Accumulator", "Cohort", "Contribution", "Overlap", "Result",
    "RoundState", "SERIAL", "View", "Waiter", "merge_hyper",
]  # fmt: skip

SERIAL = "optimizer"
"""Hyper-parameter with which a contribution requests an optimizer, by the optimizer's serial number (from 1 on)."""


def merge_hyper(known: dict[str, float], news: Mapping[str, float]) -> dict[str, float]:
    """Merge the hyper-parameters `news` into `known` and return `known`. Hyper-parameters of an older optimizer (lower
    SERIAL) are ignored. Hyper-parameters of a newer optimizer replace all.
    """
    before, now = known.get(SERIAL, 0.0), news.get(SERIAL, 0.0)
    if now > before:
        known.clear()
    if now >= before:
        known.update(news)
    return known


class Overlap(BadMessage):
    """Some ranks of a merged contribution have arrived by another way."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """A member's message for one slice and round.

    ranks: the ranks whose contributions the message contains.
    array: read-only elements or rows. Without an array the contribution abstains: it counts as received and adds
        nothing.
    done: returns the credit of the message.
    sender: the member whose link brought the message. It may have passed on another member's message.
    """

    ranks: tuple[int, ...]
    array: Content | None
    weight: float
    hyper: dict[str, float]
    done: Callable[[], None]
    sender: int | None = None

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks whose windows it may occupy: the sender's rank, and the ranks of members for which the sender
        sends.
        """
        return self.ranks if self.sender is None else (*self.ranks, self.sender)


@dataclass(slots=True)
class Accumulator:
    """Sums the contributions to one slice in one round.

    Contributions may arrive in any order, but floating-point sums depend on the order. So contributions are added in
    rank order, and a contribution that arrives before a lower rank's is parked. Results have the same bits in every
    run. Credit is returned only when the round is complete. So no member is ahead of another by more than its window,
    and results leave a shared link as evenly as contributions arrive.

    total: the sum, fp32 (fp64 for fp64 contributions); Rows as long as only rows were received; None if all abstained.
        With a single contribution it may be that contribution's own, read-only array.
    ranks: the ranks added so far.
    weight: the sum of their weights.
    hyper: the hyper-parameters that any of these ranks sent, without hyper-parameters of an older optimizer.
    conflicts: names to which ranks gave different values, with one differing value; the lower rank's value is in
        `hyper`.
    set_by: for each hyper-parameter, the lowest rank of the contribution that has it.
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
        """Keep a contribution for `merge`. Returns False for a duplicate, of which all ranks are present.

        A merged contribution replaces the parked contributions that it includes. Raises Overlap for any other overlap,
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


@dataclass(slots=True)
class Waiter:
    """A member waiting for a result.

    rank: its rank among the contributors. ranks: the ranks whose contributions it brings. request: number of its
        request.
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
        """The decoded value, None before the first use."""
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
    missed_to: of a round that was over without its members: the newest such round. Such a result has no value.
    """

    views: tuple[View, ...]
    version: int
    contributors: tuple[int, ...] = ()
    weight: float = 0.0
    changed: Rows | None = None
    is_sum: bool = False
    missed_to: int = 0

    def rows(self, reply: Reply, row: int) -> Rows | None:
        """The rows that this kind of reply has; None if it has all elements."""
        if reply == Reply.NONE or self.missed_to:
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
