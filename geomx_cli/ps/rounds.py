"""The rounds of all slices at one server: gather, decide, answer.

One slice's rounds complete strictly in order, each after the result of the one before. In a synchronous job all members
go through them together; a root of an asynchronous one takes each member's by itself.
"""

import time
from collections.abc import Callable, Collection
from functools import partial

import numpy as np

from geomx_cli.ps.algorithm import Answer, ServerPart, Slot, Total
from geomx_cli.ps.book import Asker, Book, Pace, Round
from geomx_cli.ps.gather import Contribution, Gathering
from geomx_cli.ps.link import Link
from geomx_cli.ps.optimizers import Optimizer
from geomx_cli.ps.state import export_state, import_state
from geomx_cli.ps.uplink import Delivery, Uplink
from geomx_cli.ps.wire import DTYPES, Array, BadMessage, Header, Kind, view

__all__ = ["Rounds", "as_payload"]

MAX_SLICES = 1_000_000
MAX_ROUNDS_AHEAD = 64
STALL = 0.02
MAX_ASKED = 4


class Rounds:
    """`uplink` is None at a root. `owing` gives the ranks that owe contributions; None while no round may close.

    `links_of` finds the links of a rank, for asking a stalled member for one slice; `alone` tells with which rank this
    one goes through rounds where not all go together. Used by the loop's thread only.
    """

    def __init__(
        self,
        *,
        algorithm: ServerPart,
        delivery: Delivery,
        uplink: Uplink | None,
        own_rank: Callable[[], int],
        owing: Callable[[], Collection[int] | None],
        links_of: Callable[[int], list[Link]],
        alone: Callable[[int], int] = lambda rank: rank,
    ) -> None:
        self.optimizer: Optimizer | None = None
        self._initial: dict[str, float] = {}
        self.last_round = 0
        self.algorithm = algorithm
        self.versions: dict[int, int] = {}
        self._delivery = delivery
        self._uplink = uplink
        self._own_rank = own_rank
        self._owing = owing
        self._links_of = links_of
        self._alone = alone
        self._books: dict[tuple[int, int], Book] = {}
        self._open: dict[tuple[int, int, int, int], tuple[Book, Pace, Round]] = {}

    # What comes from below.

    def on_push(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """An initial value. The first one counts; at a local server it goes on to the root."""
        book, array = self._book(header), view(header, payload)
        asker = Asker(link, header.request, header.priority)
        if self._uplink is not None:
            up = Header(
                kind=Kind.PUSH, key=book.slot.key, slice=book.slot.index, root=book.root, offset=book.offset,
                length=book.length, dtype=book.dtype, priority=header.priority,
            )  # fmt: skip
            self._uplink.send(book.root, up, payload, lambda _, __: self._acknowledge(book, asker))
        else:
            if book.slot.value is None:
                book.slot.value = array.copy()
                self._answer_pulls(book)
                self._advance(book)
            self._acknowledge(book, asker)
        link.consumed(array.nbytes)

    def on_pull(self, link: Link, header: Header) -> None:
        """Answer with the current value; wait for it, or fetch it from the root, if there is none."""
        book = self._book(header)
        asker = Asker(link, header.request, header.priority)
        if book.slot.value is not None:
            self._answer(book, asker, None)
            return
        book.pulls.append(asker)
        if self._uplink is not None and not book.fetching:
            self._fetch(book, header.priority)

    def on_exchange(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """A contribution; whoever makes it has been checked to be among its contributors."""
        book, array = self._book(header), view(header, payload)
        pace = book.pace(self._member(header.contributors[0]))
        asker = Asker(link, header.request, header.priority)
        if header.round <= pace.finished:
            self._answer(book, asker, pace)
            link.consumed(array.nbytes)
            return
        if not 0 < header.round <= pace.finished + MAX_ROUNDS_AHEAD:
            raise BadMessage(f"round {header.round} while round {pace.finished + 1} is open")
        if header.weight <= 0:
            raise BadMessage(f"a contribution of weight {header.weight:g}")
        round_ = self._round(book, pace, header.round, header.priority)
        round_.askers[header.contributors[0]] = asker
        done = partial(link.consumed, array.nbytes)
        given = Contribution(header.contributors, array, header.weight, header.hyper, done)
        if header.round <= pace.closed or not round_.gathering.offer(given):
            link.consumed(array.nbytes)
        self._advance(book)

    def use(self, optimizer: Optimizer) -> None:
        """Update values with this optimizer from now on; what was tuned of another one is forgotten."""
        self.optimizer = optimizer
        self._initial = {}
        for book in self._books.values():
            book.hyper = {}

    def go_alone(self) -> bool:
        """Have a root take each member's contributions by themselves from now on, also those that wait for others'.

        False if it is too late for that: some have been added up.
        """
        if self.algorithm.asynchronous:
            return True
        if self.last_round or any(round_.gathering.ranks for _, _, round_ in self._open.values()):
            return False
        self.algorithm.asynchronous = True
        for book in self._books.values():
            together = book.paces.pop(0, Pace(0))
            for number, round_ in together.rounds.items():
                del self._open[book.slot.key, book.slot.index, 0, number]
                for given in round_.gathering.parked():
                    rank = given.ranks[0]
                    own = self._round(book, book.pace(self._member(rank)), number, round_.gathering.priority)
                    own.askers[rank] = round_.askers[rank]
                    own.gathering.offer(given)
            self._advance(book)
        return True

    def lengths(self) -> dict[tuple[int, int], int]:
        """How many elements each slice has, by key and index."""
        return {where: book.length for where, book in self._books.items()}

    def members_changed(self) -> None:
        """Somebody has come or left: close what is now complete."""
        for book in self._books.values():
            self._advance(book)

    def unstall(self) -> None:
        """Ask members for missing slices that may be stuck behind others of theirs, so that no order of pushes blocks.

        That is so where a contribution of theirs waits for others: it fills their window. Only slices that become
        complete by it are asked for; another would wait as well, and take memory while a slow member keeps all waiting.
        """
        stuck: set[int] = set().union(*(item[2].gathering.without_credit() for item in self._open.values()))
        now, asked = time.monotonic(), 0
        for (key, index, _, number), (book, pace, round_) in self._open.items() if stuck else ():
            if asked >= MAX_ASKED or now - round_.started < STALL:
                continue
            missing = self._missing(book, pace, round_)
            if not missing <= stuck:
                continue
            for rank in missing - round_.wanted:
                asked += 1
                round_.wanted.add(rank)
                for link in self._links_of(rank):
                    link.ask_for(key, index, number)

    def oldest(self) -> tuple[int, float, frozenset[int]] | None:
        """Of the rounds that wait for members, the one that was opened first: its number, when (time.monotonic
        seconds), and those members' ranks; none of them for a round that only waits to be decided.
        """
        first = None
        for (_, _, _, number), (book, pace, round_) in self._open.items():
            missing = self._missing(book, pace, round_) or self._too_far_behind(book, pace)
            if missing:
                return number, round_.started, frozenset(missing)
            first = first or (number, round_.started, frozenset[int]())
        return first

    # State.

    def export_state(self) -> dict[str, Array]:
        """See state.py."""
        return export_state(self._books, self.optimizer)

    def import_state(self, state: dict[str, Array]) -> None:
        """See state.py."""
        import_state(state, self._books, self.optimizer)

    # Inside.

    def _book(self, header: Header) -> Book:
        book = self._books.get((header.key, header.slice))
        if self._uplink is not None and header.root >= len(self._uplink.links):
            raise BadMessage(f"a slice of root {header.root}, and there are {len(self._uplink.links)}")
        if book is None:
            if len(self._books) >= MAX_SLICES:
                raise BadMessage("too many slices")
            slot = Slot(header.key, header.slice)
            book = Book(slot, header.root, header.length, header.dtype, header.offset)
            self._books[header.key, header.slice] = book
        if (header.length, header.dtype, header.root) != (book.length, book.dtype, book.root):
            raise BadMessage(f"{header.length} elements of {DTYPES[header.dtype]} for a slice of {book.length}")
        return book

    def _member(self, rank: int) -> int:
        """0 where all go through rounds together."""
        return self._alone(rank) if self.algorithm.asynchronous and self._uplink is None else 0

    def _round(self, book: Book, pace: Pace, number: int, priority: int) -> Round:
        round_ = pace.rounds.get(number)
        if round_ is None:
            round_ = pace.rounds[number] = Round()
            round_.gathering.priority = priority
            self._open[book.slot.key, book.slot.index, pace.member, number] = (book, pace, round_)
        return round_

    def _members(self, pace: Pace) -> list[int]:
        """The ranks that owe contributions to rounds of this pace."""
        return [rank for rank in self._owing() or () if self._member(rank) == pace.member]

    def _missing(self, book: Book, pace: Pace, round_: Round) -> set[int]:
        return round_.gathering.missing(self._members(pace))

    def _too_far_behind(self, book: Book, pace: Pace) -> set[int]:
        """The ranks that are more than the bound behind this pace, whose next result waits for them."""
        bound = self.algorithm.max_staleness
        if not self.algorithm.asynchronous or bound < 0 or self._uplink is not None:
            return set()
        return {
            rank for rank in self._owing() or () if pace.closed - book.pace(self._member(rank)).closed > bound
        }

    def _advance(self, book: Book) -> None:
        """Close the rounds of this slice that are complete, in order, and answer those that have waited for others."""
        while self._owing() is not None and any(self._go_on(book, item) for item in list(book.paces.values())):
            pass

    def _go_on(self, book: Book, pace: Pace) -> bool:
        if pace.held is None:
            return self._close_next(book, pace)
        if self._too_far_behind(book, pace):
            return False
        gathering, pace.held = pace.held, None
        self._finish(book, pace, gathering)
        return True

    def _close_next(self, book: Book, pace: Pace) -> bool:
        round_ = pace.rounds.get(pace.closed + 1)
        if round_ is None or pace.closed > pace.finished or self._lacks_value(book):
            return False
        gathering = round_.gathering
        if not gathering.merge(self._members(pace)) or gathering.total is None:
            return False
        pace.closed += 1
        self._close(book, pace, gathering, gathering.total)
        return True

    def _lacks_value(self, book: Book) -> bool:
        """Whether the initial value is needed and not there; at a local server that is when it is fetched."""
        if book.slot.value is not None:
            return False
        if self._uplink is None:
            return self.optimizer is not None or self.algorithm.starts_from_value
        if self.algorithm.starts_from_value and not book.fetching:
            self._fetch(book, 0)
        return self.algorithm.starts_from_value

    def _close(self, book: Book, pace: Pace, gathering: Gathering, array: Array) -> None:
        total = Total(array, gathering.weight, pace.member)
        if self._uplink is None:
            self._tune(book, gathering.hyper)
            book.slot.value = _cast(self.algorithm.at_root(book.slot, total, self.optimizer), book.dtype)
            book.slot.version += 1
            pace.held, gathering.total = gathering, None
            return
        decision = self.algorithm.at_party(book.slot, total)
        if isinstance(decision, Answer):
            book.slot.value = _cast(decision.array, book.dtype)
            self._finish(book, pace, gathering)
            return
        self._waits_no_more(book, pace)
        book.forwarded += 1
        header = Header(
            kind=Kind.EXCHANGE, key=book.slot.key, slice=book.slot.index, root=book.root, offset=book.offset,
            length=book.length, dtype=book.dtype, round=book.forwarded, contributors=(self._own_rank(),),
            weight=decision.weight, base=book.slot.version, priority=gathering.priority, hyper=gathering.hyper,
        )  # fmt: skip

        def on_result(result: Header, array: Array) -> None:
            gathering.ranks = set(result.contributors)
            gathering.weight = result.weight
            gathering.total = None
            book.slot.version = result.value
            book.slot.value = _cast(self.algorithm.from_root(book.slot, array), book.dtype)
            self._finish(book, pace, gathering)
            self._advance(book)

        self._uplink.send(book.root, header, as_payload(decision.array, book.dtype), on_result)

    def _waits_no_more(self, book: Book, pace: Pace) -> None:
        """The round that is decided waits for no member."""
        self._open.pop((book.slot.key, book.slot.index, pace.member, pace.closed), None)

    def _tune(self, book: Book, news: dict[str, float]) -> None:
        """Set the optimizer to what holds for this slice: not all slices are in the same round when a rate changes."""
        book.hyper.update(news)
        if self.optimizer is None:
            return
        for name in news.keys() - self._initial.keys():
            self._initial[name] = float(self.optimizer.params.get(name, news[name]))
        if self._initial:
            self.optimizer.set(**{**self._initial, **book.hyper})

    def _finish(self, book: Book, pace: Pace, gathering: Gathering) -> None:
        """The value is the result of a round, or newer: answer all who wait for it."""
        pace.finished = pace.closed
        self._waits_no_more(book, pace)
        self.last_round = max(self.last_round, pace.finished)
        self.versions[pace.member] = max(self.versions.get(pace.member, 0), pace.finished)
        pace.result = Header(contributors=tuple(sorted(gathering.ranks))[:4096], weight=gathering.weight)
        for asker in pace.rounds.pop(pace.finished).askers.values():
            self._answer(book, asker, pace)
        self._answer_pulls(book)

    def _fetch(self, book: Book, priority: int) -> None:
        """Get the value from the root, which has it or will have it."""
        assert self._uplink is not None
        book.fetching = True
        header = Header(
            kind=Kind.PULL, key=book.slot.key, slice=book.slot.index, root=book.root, offset=book.offset,
            length=book.length, dtype=book.dtype, priority=priority,
        )  # fmt: skip
        self._uplink.send(book.root, header, None, lambda result, array: self._fetched(book, result, array))

    def _fetched(self, book: Book, result: Header, array: Array) -> None:
        book.fetching = False
        if book.slot.value is None:
            book.slot.value, book.slot.version = array, result.value
        self._answer_pulls(book)
        self._advance(book)

    def _answer_pulls(self, book: Book) -> None:
        for asker in book.pulls:
            self._answer(book, asker, None)
        book.pulls.clear()

    def _answer(self, book: Book, asker: Asker, pace: Pace | None) -> None:
        """Send the value: the result of the last round of `pace`, or to somebody who only asks for it."""
        assert book.slot.value is not None
        last = pace or Pace(0)
        header = Header(
            kind=Kind.RESULT, request=asker.request, key=book.slot.key, slice=book.slot.index, offset=book.offset,
            length=book.length, dtype=book.dtype, round=last.finished, value=book.slot.version,
            contributors=last.result.contributors, weight=last.result.weight, priority=asker.priority,
        )  # fmt: skip
        self._delivery.down(asker.link, header, as_payload(book.slot.value, book.dtype))

    def _acknowledge(self, book: Book, asker: Asker) -> None:
        header = Header(kind=Kind.RESULT, request=asker.request, key=book.slot.key, slice=book.slot.index)
        self._delivery.down(asker.link, header, None)


def as_payload(array: Array, dtype: int) -> memoryview:
    """The bytes of `array` in the slice's dtype, without a copy where it has that dtype already."""
    return memoryview(_cast(array, dtype).data).cast("B")


def _cast(array: Array, dtype: int) -> Array:
    """`array` in the slice's dtype; what is too large for fp16 becomes infinite, and the training code's to handle."""
    with np.errstate(over="ignore"):
        return array.astype(DTYPES[dtype], copy=False)
