"""All slices at one server, and the rounds that are open: who goes through them together, and who is missing."""

import time
from collections.abc import Callable, Collection

from geomx_cli.ps.algorithm import ServerPart, Slot
from geomx_cli.ps.book import Book, Pace, Round
from geomx_cli.ps.link import Link
from geomx_cli.ps.wire import DTYPES, BadMessage, Header

__all__ = ["STALL", "Ledger"]

MAX_SLICES = 1_000_000
STALL = 0.02
MAX_ASKED = 4
LONGEST_LOOK = 0.5
"""Seconds after which `unstall` looks also while contributions still come."""


class Ledger:
    """`roots` gives the number of roots above; None at a root. `owing` gives the ranks that owe contributions, None
    while no round may close.

    `links_of` finds the links of a rank, for asking a stalled member for one slice; `alone` tells with which rank this
    one goes through rounds where not all go together. Used by the loop's thread only.
    """

    def __init__(
        self,
        *,
        algorithm: ServerPart,
        roots: Callable[[], int] | None,
        owing: Callable[[], Collection[int] | None],
        links_of: Callable[[int], list[Link]],
        alone: Callable[[int], int] = lambda rank: rank,
    ) -> None:
        self.algorithm = algorithm
        self.owing = owing
        self.books: dict[tuple[int, int], Book] = {}
        self._roots = roots
        self._links_of = links_of
        self._alone = alone
        self._open: dict[tuple[int, int, int, int], tuple[Book, Pace, Round]] = {}
        self._changed, self._looked, self._stalled = False, 0.0, False

    def book(self, header: Header) -> Book:
        """The slice that a message is about. Raises BadMessage where that is impossible or another one."""
        book, roots = self.books.get((header.key, header.slice)), None if self._roots is None else self._roots()
        if roots is not None and header.root >= roots:
            raise BadMessage(f"a slice of root {header.root}, and there are {roots}")
        if book is None:
            if len(self.books) >= MAX_SLICES:
                raise BadMessage("too many slices")
            slot = Slot(header.key, header.slice)
            book = Book(slot, header.root, header.length, header.dtype, header.offset, header.row)
            self.books[header.key, header.slice] = book
        if (header.length, header.dtype, header.root, header.row) != (book.length, book.dtype, book.root, book.row):
            found = f"{header.length} elements of {DTYPES[header.dtype]} in rows of {header.row}"
            raise BadMessage(f"{found} for a slice of {book.length} in rows of {book.row}")
        return book

    def member(self, rank: int) -> int:
        """The number of the pace that this rank goes at: 0 where all go through rounds together."""
        return self._alone(rank) if self.algorithm.asynchronous and self._roots is None else 0

    def round(self, book: Book, pace: Pace, number: int, priority: int) -> Round:
        """This round of a slice, which is open from now on, for a contribution that has come."""
        self._changed = True
        round_ = pace.rounds.get(number)
        if round_ is None:
            round_ = pace.rounds[number] = Round()
            round_.gathering.priority = priority
            self._open[book.slot.key, book.slot.index, pace.member, number] = (book, pace, round_)
        return round_

    def members(self, pace: Pace) -> list[int]:
        """The ranks that owe contributions to rounds of this pace."""
        return [rank for rank in self.owing() or () if self.member(rank) == pace.member]

    def too_far_behind(self, book: Book, pace: Pace) -> set[int]:
        """The ranks that are more than the bound behind this pace, whose next result waits for them."""
        bound = self.algorithm.max_staleness
        if not self.algorithm.asynchronous or bound < 0 or self._roots is not None:
            return set()
        return {
            rank for rank in self.owing() or () if pace.closed - book.pace(self.member(rank)).closed > bound
        }

    def waits_no_more(self, book: Book, pace: Pace) -> None:
        """The round that is decided waits for no member."""
        self._open.pop((book.slot.key, book.slot.index, pace.member, pace.closed), None)

    def go_alone(self, *, late: bool) -> bool:
        """Have a root take each member's contributions by themselves from now on, also those that wait for others'.

        False if it is too `late` for that, also because some have been added up.
        """
        if self.algorithm.asynchronous:
            return True
        if late or any(round_.gathering.ranks for _, _, round_ in self._open.values()):
            return False
        self.algorithm.asynchronous = True
        for book in self.books.values():
            together = book.paces.pop(0, Pace(0))
            for number, round_ in together.rounds.items():
                del self._open[book.slot.key, book.slot.index, 0, number]
                for given in round_.gathering.parked():
                    rank = given.ranks[0]
                    own = self.round(book, book.pace(self.member(rank)), number, round_.gathering.priority)
                    own.askers[rank] = round_.askers[rank]
                    own.gathering.offer(given)
        return True

    def lengths(self) -> dict[tuple[int, int], int]:
        """How many elements each slice has, by key and index."""
        return {where: book.length for where, book in self.books.items()}

    def unstall(self) -> None:
        """Ask members for missing slices that may be stuck behind others of theirs, so that no order of pushes blocks.

        That is so where a contribution of theirs waits for others: it fills their window. Only slices that become
        complete by it are asked for; another would wait as well, and take memory while a slow member keeps all waiting.

        To be called every STALL seconds. It costs nothing while contributions come, nor when nothing has changed since
        it has found nothing to ask for, however many slices are open.
        """
        now, changed, self._changed = time.monotonic(), self._changed, False
        self._stalled = self._stalled or changed
        if not self._stalled or (changed and now - self._looked < LONGEST_LOOK):
            return
        self._looked = now
        self._stalled = self._ask_stuck(now) or changed

    def changed(self) -> None:
        """Members have come or left, or a connection is a new one: other slices may be missing now."""
        self._changed = True

    def _ask_stuck(self, now: float) -> bool:
        """Ask for some slices that `unstall` is about; False where there are none, nor any that may become so."""
        stuck: set[int] = set().union(*(item[2].gathering.without_credit() for item in self._open.values()))
        asked, young = 0, False
        for (key, index, _, number), (book, pace, round_) in self._open.items() if stuck else ():
            if asked >= MAX_ASKED:
                break
            if now - round_.started < STALL:
                young = True
                continue
            missing = self._missing(book, pace, round_)
            if not missing <= stuck:
                continue
            for rank in missing - round_.wanted:
                asked += 1
                round_.wanted.add(rank)
                for link in self._links_of(rank):
                    link.ask_for(key, index, number)
        return asked > 0 or young

    def forget_asked(self, rank: int) -> None:
        """What this member was asked for may have been lost with its connection; it may be asked again."""
        self._changed = True
        for _, _, round_ in self._open.values():
            round_.wanted.discard(rank)

    def oldest(self) -> tuple[int, float, frozenset[int]] | None:
        """Of the rounds that wait for members, the one that was opened first: its number, when (time.monotonic
        seconds), and those members' ranks; none of them for a round that only waits to be decided.
        """
        first = None
        for (_, _, _, number), (book, pace, round_) in self._open.items():
            missing = self._missing(book, pace, round_) or self.too_far_behind(book, pace)
            if missing:
                return number, round_.started, frozenset(missing)
            first = first or (number, round_.started, frozenset[int]())
        return first

    def _missing(self, book: Book, pace: Pace, round_: Round) -> set[int]:
        return round_.gathering.missing(self.members(pace))
