"""All slices at one server, and the rounds that are open: who goes through them together, and who is missing."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable

from geomx_cli.ps.algorithm import ServerPart, Slot
from geomx_cli.ps.book import Book, Pace, Round
from geomx_cli.ps.payload import DTYPES
from geomx_cli.ps.wire import BadMessage, Header

__all__ = ["Ledger"]

MAX_SLICES = 1_000_000


class Ledger:
    """`roots` gives the number of roots above; None at a root. `owing` gives the ranks that owe contributions, None
    while no round may close.

    `declared` tells whether a message is about a slice that there is, as far as this server knows.
    `alone` tells with which rank this one goes through rounds where not all go together. `moves` grows with all that
    may change what is missing, `came` counts the contributions of each rank. Used by the loop's thread only.
    """

    def __init__(
        self,
        *,
        algorithm: ServerPart,
        roots: Callable[[], int] | None,
        owing: Callable[[], Collection[int] | None],
        alone: Callable[[int], int] = lambda rank: rank,
        declared: Callable[[Header], bool] = lambda _: True,
    ) -> None:
        self.algorithm = algorithm
        self.owing = owing
        self.books: dict[tuple[int, int], Book] = {}
        self._roots = roots
        self._alone = alone
        self._declared = declared
        self._open: dict[tuple[int, int, int, int], tuple[Book, Pace, Round]] = {}
        self.moves = 0
        self.came: Counter[int] = Counter()

    def book(self, header: Header) -> Book:
        """The slice that a message is about. Raises BadMessage where that is impossible or another one."""
        book, roots = self.books.get((header.key, header.slice)), None if self._roots is None else self._roots()
        if roots is not None and header.root >= roots:
            raise BadMessage(f"a slice of root {header.root}, and there are {roots}")
        if book is None:
            if len(self.books) >= MAX_SLICES:
                raise BadMessage("too many slices")
            if not self._declared(header):
                raise BadMessage(f"slice {header.slice} of key {header.key} was not declared as it is here")
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

    def round(self, book: Book, pace: Pace, number: int, priority: int, rank: int) -> Round:
        """This round of a slice, which is open from now on, for a contribution that has come from `rank`."""
        self.moves += 1
        self.came[rank] += 1
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
                    own = self.round(book, book.pace(self.member(rank)), number, round_.gathering.priority, rank)
                    own.askers[rank] = round_.askers[rank]
                    own.gathering.offer(given)
        return True

    def lengths(self) -> dict[tuple[int, int], int]:
        """How many elements each slice has, by key and index."""
        return {where: book.length for where, book in self.books.items()}

    def changed(self) -> None:
        """Members have come or left, or a round is over: other contributions may be missing now."""
        self.moves += 1

    def open_rounds(self) -> Iterable[tuple[Book, Pace, Round]]:
        """All that are open, in the order in which they were opened."""
        return self._open.values()

    def oldest(self) -> tuple[int, float, frozenset[int]] | None:
        """Of the rounds that wait for members, the one that was opened first: its number, when (time.monotonic
        seconds), and those members' ranks; none of them for a round that only waits to be decided.
        """
        first = None
        for (_, _, _, number), (book, pace, round_) in self._open.items():
            missing = self.missing(pace, round_) or self.too_far_behind(book, pace)
            if missing:
                return number, round_.started, frozenset(missing)
            first = first or (number, round_.started, frozenset[int]())
        return first

    def missing(self, pace: Pace, round_: Round) -> set[int]:
        """The ranks whose contributions to this round have not come."""
        return round_.gathering.missing(self.members(pace))
