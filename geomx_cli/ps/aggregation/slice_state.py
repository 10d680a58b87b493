"""A server's state of one slice: its value, the open rounds, and results not acknowledged by all members."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from geomx_cli.ps.aggregation.accumulator import Accumulator
from geomx_cli.ps.aggregation.algorithm import ServerAlgorithm, SliceView
from geomx_cli.ps.aggregation.codec import Encoded, SliceRound
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import DTYPES, as_payload, digest
from geomx_cli.ps.net.rows import Rows
from geomx_cli.ps.net.wire import EVERY, Reply

__all__ = ["Cohort", "Result", "RoundState", "SliceState", "View", "Waiter"]


@dataclass(slots=True)
class Waiter:
    """A member waiting for a result: its rank among the contributors, its request number and the ranks that it brings.

    reply: see wire.Reply. codec: accepted encoding of the result, "" for none. follows: whether the member has the
    previous round's result, to which a change could be applied. newest: for a pull, whether it wants the value after
    other members' rounds and not an initial value. numbers: the pulled rows, None for all. digest: of the value that a
    pulling member has, if any. split: it was told to send its own contribution instead of a merged one.
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
    digest: bytes = b""
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
    `hyper`: the hyper-parameters set for its optimizer. `offered`: at a root without the value, the first one that a
    member offered. `initial_digest`: at a root, of the offer, then of the initial value, once needed;
    at a local server, of the first PUSH. `initial_from`: the process whose PUSH came first.
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
    offered: Array | None = None
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

    def has_initial(self, expected: bytes) -> bool:
        """At a root: whether the value is the initial one, and has this digest."""
        if self.slot.version or self.slot.value is None or not expected:
            return False
        self.initial_digest = self.initial_digest or self.digest_of(self.slot.value)
        return self.initial_digest == expected

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
