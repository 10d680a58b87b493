"""One slice in one round at a server: contributions come in any order and are added in rank order.

Adding in rank order makes the sum the same, bit for bit, whatever the order of arrival. A contribution that comes
before that of a lower rank is parked. Senders get their credit back when none is missing: so no member is ahead of
another by more than its window, and the results of a shared link go out as evenly as contributions come in.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from geomx_cli.ps.net.payload import Content
from geomx_cli.ps.net.rows import Rows
from geomx_cli.ps.net.wire import BadMessage

__all__ = ["SERIAL", "Accumulator", "Contribution", "merge_hyper"]

SERIAL = "optimizer"
"""Name of the hyper-parameter by which a contribution asks for the optimizer of this serial number, from 1 on."""


def merge_hyper(known: dict[str, float], news: Mapping[str, float]) -> dict[str, float]:
    """Add later hyper-parameters to those that are known, and return these. Those of an older optimizer count for
    nothing; those of a newer one take the place of all.
    """
    before, now = known.get(SERIAL, 0.0), news.get(SERIAL, 0.0)
    if now > before:
        known.clear()
    if now >= before:
        known.update(news)
    return known


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one member brings: the ranks merged in, an array or rows that nobody writes to, what to call at the end.

    Without an array it abstains: it counts as having come, and adds nothing.
    """

    ranks: tuple[int, ...]
    array: Content | None
    weight: float
    hyper: dict[str, float]
    done: Callable[[], None]


@dataclass(slots=True)
class Accumulator:
    """The contributions to one slice and round.

    `total` is fp32 (fp64 for fp64 contributions); with a single contribution it may be that contribution's own,
    read-only array; rows as long as only rows have come; None if all have abstained. `ranks` are those added so far,
    `weight` the sum of their weights, `hyper` the hyper-parameters that any of them sent. Where two sent different
    values, that of the lower rank holds, and `conflicts` has the name with the other value; those for an older
    optimizer count for nothing.
    """

    total: Content | None = None
    ranks: set[int] = field(default_factory=set)
    weight: float = 0.0
    hyper: dict[str, float] = field(default_factory=dict)
    conflicts: dict[str, float] = field(default_factory=dict)
    priority: int = 0
    _parked: dict[int, Contribution] = field(default_factory=dict)
    _added: list[tuple[tuple[int, ...], Callable[[], None]]] = field(default_factory=list)
    _owned: bool = False

    def offer(self, contribution: Contribution) -> bool:
        """Take a contribution, to be added by `merge`. False if those of all of its ranks are here already.

        One that merges parked ones with others takes their place. Raises BadMessage for any other overlap, where some
        rank would count twice.
        """
        if self.has(contribution.ranks):
            return False
        ranks = set(contribution.ranks)
        parts = [item for item in self._parked.values() if not ranks.isdisjoint(item.ranks)]
        if not self.ranks.isdisjoint(ranks) or not all(ranks.issuperset(part.ranks) for part in parts):
            raise BadMessage(f"contributions of ranks {contribution.ranks}, and some of them are here with others")
        for part in parts:
            self._parked.pop(min(part.ranks)).done()
        self._parked[min(ranks)] = contribution
        return True

    def has(self, ranks: Iterable[int]) -> bool:
        """Whether the contributions of all of these are here, added or parked."""
        return self.ranks.union(*(item.ranks for item in self._parked.values())).issuperset(ranks)

    def merge(self, owing: Iterable[int]) -> bool:
        """Add what can be added in rank order; `owing` are the ranks that have not left. True when none is missing."""
        for rank in sorted({*owing, *self._parked} - self.ranks):
            if rank in self.ranks:
                continue
            contribution = self._parked.pop(rank, None)
            if contribution is None:
                return False
            self._add(contribution)
        while self._added:
            self._added.pop()[1]()
        return True

    def hyper_names(self) -> set[str]:
        """The names of the hyper-parameters that have come."""
        return set(self.hyper).union(*(item.hyper for item in self._parked.values()))

    def parked(self) -> list[Contribution]:
        """The contributions that are here and not added yet."""
        return list(self._parked.values())

    def missing(self, owing: Iterable[int]) -> set[int]:
        """The ranks that have not come yet."""
        return set(owing).difference(self.ranks, self.without_credit())

    def without_credit(self) -> set[int]:
        """The ranks whose contributions are here and wait for others: they fill their senders' windows."""
        parked = {rank for item in self._parked.values() for rank in item.ranks}
        return parked.union(*(ranks for ranks, _ in self._added))

    def _add(self, contribution: Contribution) -> None:
        if contribution.array is not None:
            self._add_content(contribution.array)
        self.ranks.update(contribution.ranks)
        self.weight += contribution.weight
        if contribution.hyper.get(SERIAL, 0.0) == self.hyper.get(SERIAL, 0.0):
            for name, value in contribution.hyper.items():
                if self.hyper.setdefault(name, value) != value:
                    self.conflicts[name] = value
        else:
            merge_hyper(self.hyper, contribution.hyper)
        self._added.append((contribution.ranks, contribution.done))

    def _add_content(self, given: Content) -> None:
        if (given.values if isinstance(given, Rows) else given).dtype == np.float16:
            given = given.astype(np.float32)
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
