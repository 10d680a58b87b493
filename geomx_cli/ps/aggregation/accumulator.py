"""Accumulates the contributions to one slice in one round.

Contributions may arrive in any order but are added in rank order, so the sum is bit-for-bit reproducible. A
contribution that arrives before one of a lower rank is parked. Credit is returned only when the round is complete: so
no member gets ahead of another by more than its window, and results leave a shared link as evenly as contributions
arrive.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from geomx_cli.ps.net.payload import Content
from geomx_cli.ps.net.rows import Rows
from geomx_cli.ps.net.wire import BadMessage

__all__ = ["SERIAL", "Accumulator", "Contribution", "Overlap", "merge_hyper"]

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
