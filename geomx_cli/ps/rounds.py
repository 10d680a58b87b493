"""The rounds of all slices at one server: gather, decide, answer.

One slice's rounds complete strictly in order, each after the result of the one before. In a synchronous job all members
go through them together; a root of an asynchronous one takes each member's by itself.
"""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from geomx_cli.ps.algorithm import Forward, RowPart, Total
from geomx_cli.ps.book import Asker, Book, Pace, Result
from geomx_cli.ps.gather import Contribution, Gathering, merge_hyper
from geomx_cli.ps.ledger import Ledger
from geomx_cli.ps.link import Link
from geomx_cli.ps.optimizer_history import Hyper, OptimizerHistory
from geomx_cli.ps.optimizers import Optimizer
from geomx_cli.ps.payload import (
    DTYPES,
    Array,
    Content,
    as_payload,
    cast,
    content,
    form_of,
    numbers_payload,
    row_numbers,
    sum_payload,
    view,
)
from geomx_cli.ps.rows import Rows
from geomx_cli.ps.state import export_state, import_state
from geomx_cli.ps.uplink import Delivery, Uplink
from geomx_cli.ps.wire import MAX_HYPER, MAX_ROUNDS_AHEAD, BadMessage, Header, Kind, Reply

__all__ = ["Rounds"]


class Rounds:
    """`uplink` is None at a root, `ledger` has all slices; `warn` gets what the user should know of. `asynchronous`:
    whether the roots take each party's contributions by themselves; a local server knows by their results.

    Used by the loop's thread only.
    """

    def __init__(
        self,
        *,
        delivery: Delivery,
        uplink: Uplink | None,
        own_rank: Callable[[], int],
        ledger: Ledger,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.history = OptimizerHistory()
        self.asynchronous = ledger.algorithm.asynchronous
        self.last_round = 0
        self.versions: dict[int, int] = {}
        self._delivery = delivery
        self._uplink = uplink
        self._own_rank = own_rank
        self._warn = warn
        self._warned: set[str] = set()
        self.ledger = ledger
        self._takes_rows = isinstance(ledger.algorithm, RowPart) and ledger.algorithm.takes_rows

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
                length=book.length, dtype=book.dtype, row=book.row, priority=header.priority,
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

    def on_pull(self, link: Link, header: Header, rank: int, payload: memoryview | None = None) -> None:
        """Answer with the current value, or some rows of it; wait for it, or fetch it from the root, if there is none.

        Who pulls after it has begun to push asks, in an asynchronous job, for the newest value: that of the root.
        """
        book, numbers = self.ledger.book(header), row_numbers(header, payload)
        asker = Asker(link, header.request, header.priority, rank, numbers=numbers)
        link.consumed(0 if payload is None else len(payload))
        if any(known.link is link and known.request == header.request for known in book.pulls):
            return
        if self._uplink is not None and header.round:
            self._pull_above(book, header, partial(self._answer_newest, book, asker), numbers)
        elif book.slot.value is not None:
            self._answer_pull(book, asker)
        else:
            book.pulls.append(asker)
            if self._uplink is not None and not book.fetching:
                self._fetch(book, header.priority)

    def on_exchange(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """A contribution; whoever makes it has been checked to be among its contributors. One that is there already
        is answered as before. One of weight 0 has no payload: its sender only takes the round's result. Any other one
        without a payload asks whether that contribution is here, and is told if not.
        """
        book, rank = self.ledger.book(header), header.contributors[0]
        asks = header.weight > 0 and payload is None
        given = content(header, payload) if header.weight and not asks else None
        size = 0 if payload is None else len(payload)
        if given is None and size:
            raise BadMessage("a contribution of weight 0 with a payload")
        pace = book.pace(self.ledger.member(rank))
        if not 0 < header.round <= pace.finished + MAX_ROUNDS_AHEAD:
            raise BadMessage(f"round {header.round} while round {pace.finished + 1} is open")
        # So a server never keeps the results of more rounds than may be under way.
        if not header.round - 1 - MAX_ROUNDS_AHEAD <= header.acked < header.round:
            raise BadMessage(f"a contribution to round {header.round} from one that has {header.acked} results")
        pace.acknowledge(rank, header.acked)
        asker = Asker(link, header.request, header.priority, reply=header.reply)
        if header.round <= pace.finished:
            result = pace.results.get(header.round)
            if result is not None:  # else this repeat came late: the sender has acknowledged the result since
                self._answer(book, asker, header.round, result)
            link.consumed(size)
            return
        if asks:
            known = pace.rounds.get(header.round)
            if known is None or rank not in known.askers:
                link.ask_again(header.request)
            return
        round_ = self.ledger.round(book, pace, header.round, header.priority, rank)
        if len(round_.gathering.hyper_names() | header.hyper.keys()) > MAX_HYPER:
            raise BadMessage(f"more than {MAX_HYPER} hyper-parameters in one round")
        round_.askers[rank] = asker
        done = partial(link.consumed, size)
        contribution = Contribution(header.contributors, given, header.weight, header.hyper, done)
        if header.round <= pace.closed or not round_.gathering.offer(contribution):
            link.consumed(size)
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
        self.asynchronous = True
        self.members_changed()
        return True

    def left(self, rank: int) -> None:
        """This rank owes nothing more, and has all results that it was owed."""
        for book in self.ledger.books.values():
            pace = book.pace(self.ledger.member(rank))
            pace.acknowledge(rank, pace.finished)
        self.members_changed()

    def members_changed(self) -> None:
        """Somebody has come or left: close what is now complete."""
        self.ledger.changed()
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
        if not gathering.merge(self.ledger.members(pace)) or not gathering.ranks:
            return False
        pace.closed += 1
        total, gathering.total = gathering.total, None
        if total is None:  # all abstain
            total = Rows.none(book.row, np.promote_types(DTYPES[book.dtype], np.float32))
        if isinstance(total, Rows) and not (self._takes_rows and (self._uplink or book.slot.value is not None)):
            total = total.dense(book.length)
        self._close(book, pace, gathering, total)
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

    def _close(self, book: Book, pace: Pace, gathering: Gathering, total: Content) -> None:
        self._report_conflicts(book, gathering)
        if self._uplink is None:
            before = book.slot.version
            self._update(book, pace, gathering, total)
            if book.slot.version != before:  # where all abstain, others' rounds may have made it newer than this pace's
                pace.version = book.slot.version
            pace.held = gathering
        elif isinstance(total, Rows):
            self._forward(book, pace, gathering, total, gathering.weight)
        else:
            decision = self.ledger.algorithm.at_party(book.slot, Total(total, gathering.weight, pace.member))
            if isinstance(decision, Forward):
                self._forward(book, pace, gathering, decision.array, decision.weight)
            else:
                book.slot.value = cast(decision.array, book.dtype)
                merge_hyper(book.hyper, gathering.hyper)
                self._finish(book, pace, gathering)

    def _update(self, book: Book, pace: Pace, gathering: Gathering, total: Content) -> None:
        """A root makes the new value, or the rows of it that change."""
        slot, algorithm, new = book.slot, self.ledger.algorithm, None
        optimizer = self.history.choose(slot.id, book.hyper, pace.closed, gathering.hyper)
        if isinstance(total, Rows):
            assert isinstance(algorithm, RowPart)
            new = algorithm.rows_at_root(slot, total, gathering.weight, pace.member, optimizer)
            # Where parties go through rounds by themselves, others have changed other rows meanwhile.
            if new is None or (isinstance(new, Rows) and algorithm.asynchronous):
                pace.changed = Rows.none(book.row, DTYPES[book.dtype])
        else:
            new = algorithm.at_root(slot, Total(total, gathering.weight, pace.member), optimizer)
        if isinstance(new, Rows):
            book.write(new)
            if pace.changed is None:
                pace.changed = Rows(new.numbers, cast(new.values, book.dtype))
            slot.version += 1
        elif new is not None and new is not slot.value:
            slot.value = cast(new, book.dtype)
            slot.version += 1

    def _forward(self, book: Book, pace: Pace, gathering: Gathering, total: Content, weight: float) -> None:
        """A local server exchanges its party's sum with the root."""
        assert self._uplink is not None
        self.ledger.waits_no_more(book, pace)
        book.forwarded += 1
        hyper = merge_hyper(book.hyper, gathering.hyper)  # with what rounds that did not go up have changed
        book.hyper = {}
        payload, wide = sum_payload(total, book.dtype) if weight else (None, False)
        header = Header(
            kind=Kind.EXCHANGE, key=book.slot.key, slice=book.slot.index, root=book.root, offset=book.offset,
            length=book.length, dtype=book.dtype, row=book.row, round=book.forwarded,
            contributors=(self._own_rank(),), weight=weight, wide=wide, reply=self._reply(book, pace),
            base=book.slot.version, priority=gathering.priority, hyper=hyper,
            **(form_of(total) if weight else {}),
        )  # fmt: skip

        def on_result(result: Header, found: Content) -> None:
            self.asynchronous = result.asynchronous
            gathering.ranks = set(result.contributors)
            gathering.weight = result.weight
            book.slot.version = result.value
            self._take(book, pace, found)
            self._finish(book, pace, gathering)
            self._advance(book)

        self._uplink.send(book.root, header, payload, on_result)

    def _reply(self, book: Book, pace: Pace) -> Reply:
        """What is needed of a round's result to keep the value complete, and to answer the round's members."""
        replies = {asker.reply for asker in pace.rounds[pace.closed].askers.values()}
        if not self._takes_rows or (Reply.FULL in replies and (self.asynchronous or not self.last_round)):
            return Reply.FULL
        if self.asynchronous:
            return Reply.NONE
        return Reply.FULL if book.slot.value is None else Reply.CHANGED

    def _take(self, book: Book, pace: Pace, found: Content) -> None:
        """The root's result of a round: the value, or what has changed in it."""
        if not isinstance(found, Rows):
            book.slot.value = cast(self.ledger.algorithm.from_root(book.slot, found), book.dtype)
            return
        pace.changed = found
        if self.asynchronous:
            book.slot.value = None  # only the root has the rows that others have changed
        elif book.slot.value is not None:
            book.write(found)

    def _report_conflicts(self, book: Book, gathering: Gathering) -> None:
        """Workers that set a hyper-parameter to different values in one round: say so, once for each name."""
        for name in gathering.conflicts.keys() - self._warned:
            self._warned.add(name)
            self._warn(
                f"workers set {name} to {gathering.hyper[name]:g} and to {gathering.conflicts[name]:g} in one round of"
                f" key {book.slot.key}: that of the lower rank holds; let all workers set the same"
            )

    def _finish(self, book: Book, pace: Pace, gathering: Gathering) -> None:
        """The value is the result of a round, or newer: answer all who wait for it."""
        pace.finished = pace.closed
        self.ledger.waits_no_more(book, pace)
        self.ledger.changed()
        self.last_round = max(self.last_round, pace.finished)
        self.versions[pace.member] = max(self.versions.get(pace.member, 0), pace.finished)
        askers = pace.rounds.pop(pace.finished).askers
        ranks = tuple(sorted(gathering.ranks))[:4096]
        changed, pace.changed = pace.changed, None
        enough = (Reply.NONE,) if changed is None else (Reply.NONE, Reply.CHANGED)
        array = None if all(asker.reply in enough for asker in askers.values()) else book.give()
        if array is not None and pace.version != book.slot.version:  # others' rounds are in the value as well
            self._given(book, pace.member)
            pace.version = book.slot.version
        result = Result(array, book.slot.version, ranks, gathering.weight, set(askers), changed)
        pace.results[pace.finished] = result
        for asker in askers.values():
            self._answer(book, asker, pace.finished, result)
        if book.slot.value is not None:
            self._answer_pulls(book)

    def _given(self, book: Book, member: int, numbers: Array | None = None) -> None:
        """A member is about to get the root's newest value, from which its next gradient will be computed, or these
        rows of it.
        """
        optimizer = self.history.present(book.hyper)
        if self._uplink is None and self.ledger.algorithm.asynchronous and optimizer is not None:
            assert book.slot.value is not None
            rows = None if numbers is None else (book.row, numbers)
            optimizer.given(book.slot.id, member, book.slot.value, rows)

    def _fetch(self, book: Book, priority: int) -> None:
        """Get the value from the root, which has it or will have it."""
        book.fetching = True
        self._pull_above(book, Header(priority=priority), partial(self._fetched, book))

    def _pull_above(
        self, book: Book, asked: Header, on_result: Callable[[Header, Content], None], numbers: Array | None = None
    ) -> None:
        assert self._uplink is not None
        header = Header(
            kind=Kind.PULL, key=book.slot.key, slice=book.slot.index, root=book.root, offset=book.offset,
            length=book.length, dtype=book.dtype, row=book.row, round=asked.round, priority=asked.priority,
            form=asked.form, rows=asked.rows,
        )  # fmt: skip
        self._uplink.send(book.root, header, None if numbers is None else numbers_payload(numbers), on_result)

    def _fetched(self, book: Book, result: Header, found: Content) -> None:
        book.fetching, self.asynchronous = False, result.asynchronous
        if book.slot.value is None and not isinstance(found, Rows):
            book.slot.value, book.slot.version = found, result.value
        self._answer_pulls(book)
        self._advance(book)

    def _answer_pulls(self, book: Book) -> None:
        for asker in book.pulls:
            self._answer_pull(book, asker)
        book.pulls.clear()

    def _answer_pull(self, book: Book, asker: Asker) -> None:
        self._given(book, self.ledger.member(asker.rank), asker.numbers)
        if asker.numbers is None:
            found: Content = book.give()
        else:
            assert book.slot.value is not None
            found = Rows.of(book.slot.value, book.row, asker.numbers)
        self._send_down(book, asker, 0, Result(None, book.slot.version), found)

    def _answer_newest(self, book: Book, asker: Asker, above: Header, found: Content) -> None:
        """The root's value for one who asks; what this server has stays as its rounds left it."""
        self._send_down(book, asker, 0, Result(None, above.value), found)

    def _answer(self, book: Book, asker: Asker, round_: int, result: Result) -> None:
        found = result.content(asker.reply, book.row)
        if found is None:
            raise BadMessage(f"a repeat of round {round_} that asks for more than before")
        self._send_down(book, asker, round_, result, found)

    def _send_down(self, book: Book, asker: Asker, round_: int, result: Result, found: Content) -> None:
        header = Header(
            kind=Kind.RESULT, request=asker.request, key=book.slot.key, slice=book.slot.index, offset=book.offset,
            length=book.length, dtype=book.dtype, row=book.row, round=round_, value=result.version,
            contributors=result.contributors, weight=result.weight, asynchronous=self.asynchronous,
            priority=asker.priority, **form_of(found),
        )  # fmt: skip
        self._delivery.down(asker.link, header, as_payload(found, book.dtype))

    def _acknowledge(self, book: Book, asker: Asker) -> None:
        header = Header(kind=Kind.RESULT, request=asker.request, key=book.slot.key, slice=book.slot.index)
        self._delivery.down(asker.link, header, None)

