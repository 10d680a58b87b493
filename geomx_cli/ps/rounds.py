"""The rounds of all slices at one server: gather, decide, answer.

One slice's rounds complete strictly in order, each after the result of the one before. In a synchronous job all members
go through them together; a root of an asynchronous one takes each member's by itself.
"""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from geomx_cli.ps.algorithm import Answer, Total
from geomx_cli.ps.book import Asker, Book, Pace
from geomx_cli.ps.gather import Contribution, Gathering
from geomx_cli.ps.ledger import Ledger
from geomx_cli.ps.link import Link
from geomx_cli.ps.optimizer_history import Hyper, OptimizerHistory
from geomx_cli.ps.optimizers import Optimizer
from geomx_cli.ps.state import export_state, import_state
from geomx_cli.ps.uplink import Delivery, Uplink
from geomx_cli.ps.wire import DTYPES, MAX_ROUNDS_AHEAD, Array, BadMessage, Header, Kind, view

__all__ = ["Rounds", "as_payload"]


class Rounds:
    """`uplink` is None at a root, `ledger` has all slices. Used by the loop's thread only."""

    def __init__(
        self,
        *,
        delivery: Delivery,
        uplink: Uplink | None,
        own_rank: Callable[[], int],
        ledger: Ledger,
    ) -> None:
        self.history = OptimizerHistory()
        self.last_round = 0
        self.versions: dict[int, int] = {}
        self._delivery = delivery
        self._uplink = uplink
        self._own_rank = own_rank
        self.ledger = ledger

    @property
    def optimizer(self) -> Optimizer | None:
        """The one that was set last."""
        return self.history.newest

    def closed(self) -> dict[int, int]:
        """The last round of each key that is decided in any of its slices."""
        found: dict[int, int] = {}
        for (key, _), book in self.ledger.books.items():
            found[key] = max(found.get(key, 0), *(pace.closed for pace in book.paces.values()), 0)
        return {key: round_ for key, round_ in found.items() if round_}

    # What comes from below.

    def on_push(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """An initial value. The first one counts; at a local server it goes on to the root."""
        book, array = self.ledger.book(header), view(header, payload)
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
                book.hyper.update(header.hyper)
                self._answer_pulls(book)
                self._advance(book)
            self._acknowledge(book, asker)
        link.consumed(array.nbytes)

    def on_pull(self, link: Link, header: Header) -> None:
        """Answer with the current value; wait for it, or fetch it from the root, if there is none."""
        book = self.ledger.book(header)
        asker = Asker(link, header.request, header.priority)
        if book.slot.value is not None:
            self._answer(book, asker, None)
            return
        book.pulls.append(asker)
        if self._uplink is not None and not book.fetching:
            self._fetch(book, header.priority)

    def on_exchange(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """A contribution; whoever makes it has been checked to be among its contributors."""
        book, array = self.ledger.book(header), view(header, payload)
        pace = book.pace(self.ledger.member(header.contributors[0]))
        asker = Asker(link, header.request, header.priority)
        if header.round <= pace.finished:
            self._answer(book, asker, pace)
            link.consumed(array.nbytes)
            return
        if not 0 < header.round <= pace.finished + MAX_ROUNDS_AHEAD:
            raise BadMessage(f"round {header.round} while round {pace.finished + 1} is open")
        if header.weight <= 0:
            raise BadMessage(f"a contribution of weight {header.weight:g}")
        round_ = self.ledger.round(book, pace, header.round, header.priority)
        round_.askers[header.contributors[0]] = asker
        done = partial(link.consumed, array.nbytes)
        given = Contribution(header.contributors, array, header.weight, header.hyper, done)
        if header.round <= pace.closed or not round_.gathering.offer(given):
            link.consumed(array.nbytes)
        self._advance(book)

    def use(self, optimizer: Optimizer, by_key: Mapping[int, Hyper] | None = None) -> None:
        """Update values with this optimizer from now on; what was tuned of another one is forgotten.

        by_key: hyper-parameters of single keys.
        """
        self.history.use(optimizer, by_key or {})
        for book in self.ledger.books.values():
            book.hyper = {}

    def go_alone(self) -> bool:
        """See Ledger.go_alone."""
        if not self.ledger.go_alone(late=self.last_round > 0):
            return False
        self.members_changed()
        return True

    def members_changed(self) -> None:
        """Somebody has come or left: close what is now complete."""
        for book in self.ledger.books.values():
            self._advance(book)

    # State.

    def export_state(self) -> dict[str, Array]:
        """See state.py."""
        return export_state(self.ledger.books, self.optimizer)

    def import_state(self, state: dict[str, Array]) -> None:
        """See state.py."""
        import_state(state, self.ledger.books, self.optimizer)

    # Inside.

    def _advance(self, book: Book) -> None:
        """Close the rounds of this slice that are complete, in order, and answer those that have waited for others."""
        while self.ledger.owing() is not None and any(self._go_on(book, item) for item in list(book.paces.values())):
            pass

    def _go_on(self, book: Book, pace: Pace) -> bool:
        if pace.held is None:
            return self._close_next(book, pace)
        if self.ledger.too_far_behind(book, pace):
            return False
        gathering, pace.held = pace.held, None
        self._finish(book, pace, gathering)
        return True

    def _close_next(self, book: Book, pace: Pace) -> bool:
        round_ = pace.rounds.get(pace.closed + 1)
        if round_ is None or pace.closed > pace.finished or self._lacks_value(book):
            return False
        gathering = round_.gathering
        if not gathering.merge(self.ledger.members(pace)) or gathering.total is None:
            return False
        pace.closed += 1
        self._close(book, pace, gathering, gathering.total)
        return True

    def _lacks_value(self, book: Book) -> bool:
        """Whether the initial value is needed and not there; at a local server that is when it is fetched."""
        if book.slot.value is not None:
            return False
        if self._uplink is None:
            return self.optimizer is not None or self.ledger.algorithm.starts_from_value
        if self.ledger.algorithm.starts_from_value and not book.fetching:
            self._fetch(book, 0)
        return self.ledger.algorithm.starts_from_value

    def _close(self, book: Book, pace: Pace, gathering: Gathering, array: Array) -> None:
        total = Total(array, gathering.weight, pace.member)
        if self._uplink is None:
            optimizer = self.history.choose(book.slot.id, book.hyper, pace.closed, gathering.hyper)
            book.slot.value = _cast(self.ledger.algorithm.at_root(book.slot, total, optimizer), book.dtype)
            book.slot.version += 1
            pace.version = book.slot.version
            pace.held, gathering.total = gathering, None
            return
        decision = self.ledger.algorithm.at_party(book.slot, total)
        if isinstance(decision, Answer):
            book.slot.value = _cast(decision.array, book.dtype)
            self._finish(book, pace, gathering)
            return
        self.ledger.waits_no_more(book, pace)
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
            book.slot.value = _cast(self.ledger.algorithm.from_root(book.slot, array), book.dtype)
            self._finish(book, pace, gathering)
            self._advance(book)

        self._uplink.send(book.root, header, as_payload(decision.array, book.dtype), on_result)

    def _finish(self, book: Book, pace: Pace, gathering: Gathering) -> None:
        """The value is the result of a round, or newer: answer all who wait for it."""
        pace.finished = pace.closed
        self.ledger.waits_no_more(book, pace)
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
        if self._uplink is None and last.version not in (0, book.slot.version):  # it is newer than that round's
            last.version = book.slot.version
            optimizer = self.history.present(book.hyper)
            if optimizer is not None:
                optimizer.given(book.slot.id, last.member, book.slot.value)
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
