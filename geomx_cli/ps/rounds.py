"""The rounds of all slices at one server: gather, decide, answer. One slice's rounds complete strictly in order."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from geomx_cli.ps.algorithm import Answer, ServerPart, Slot
from geomx_cli.ps.gather import Contribution, Gathering
from geomx_cli.ps.link import Link
from geomx_cli.ps.optimizers import Optimizer
from geomx_cli.ps.uplink import Delivery, Uplink
from geomx_cli.ps.wire import DTYPES, Array, BadMessage, Header, Kind, view

__all__ = ["Rounds", "as_payload"]

MAX_SLICES = 1_000_000
MAX_ROUNDS_AHEAD = 64
STALL = 0.02
MAX_ASKED = 4


@dataclass(slots=True)
class _Asker:
    """Who waits for a result, and the number of its request."""

    link: Link
    request: int
    priority: int


@dataclass(slots=True)
class _Round:
    gathering: Gathering = field(default_factory=Gathering)
    askers: dict[int, _Asker] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    wanted: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Book:
    """All that a server keeps of one slice."""

    slot: Slot
    root: int
    length: int
    dtype: int
    offset: int
    rounds: dict[int, _Round] = field(default_factory=dict)
    closed: int = 0
    pulls: list[_Asker] = field(default_factory=list)
    result: Header = field(default_factory=Header)
    hyper: dict[str, float] = field(default_factory=dict)


class Rounds:
    """`uplink` is None at a root. `owing` gives the ranks that owe contributions; None while no round may close.

    `links_of` finds the links of a rank, for asking a stalled member for one slice. Used by the loop's thread only.
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
    ) -> None:
        self.optimizer: Optimizer | None = None
        self._initial: dict[str, float] = {}
        self.last_round = 0
        self._algorithm = algorithm
        self._delivery = delivery
        self._uplink = uplink
        self._own_rank = own_rank
        self._owing = owing
        self._links_of = links_of
        self._books: dict[tuple[int, int], _Book] = {}
        self._open: dict[tuple[int, int, int], _Round] = {}

    # What comes from below.

    def on_push(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """An initial value. The first one counts; at a local server it goes on to the root."""
        book, array = self._book(header), view(header, payload)
        asker = _Asker(link, header.request, header.priority)
        if self._uplink is not None:
            up = self._upward(book, header, Kind.PUSH)
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
        asker = _Asker(link, header.request, header.priority)
        if book.slot.value is not None:
            self._answer(book, asker)
            return
        book.pulls.append(asker)
        if self._uplink is not None and len(book.pulls) == 1:
            up = self._upward(book, header, Kind.PULL)
            self._uplink.send(book.root, up, None, lambda result, array: self._fetched(book, result, array))

    def on_exchange(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """A contribution; whoever makes it has been checked to be among its contributors."""
        book, array = self._book(header), view(header, payload)
        asker = _Asker(link, header.request, header.priority)
        if header.round <= book.slot.version:
            self._answer(book, asker)
            link.consumed(array.nbytes)
            return
        if not 0 < header.round <= book.slot.version + MAX_ROUNDS_AHEAD:
            raise BadMessage(f"round {header.round} while round {book.slot.version + 1} is open")
        round_ = self._round(book, header)
        round_.askers[id(link)] = asker
        done = partial(link.consumed, array.nbytes)
        given = Contribution(header.contributors, array, header.weight, header.hyper, done)
        if header.round <= book.closed or not round_.gathering.offer(given):
            link.consumed(array.nbytes)
        self._advance(book)

    def use(self, optimizer: Optimizer) -> None:
        """Update values with this optimizer from now on; what was tuned of another one is forgotten."""
        self.optimizer = optimizer
        self._initial = {}
        for book in self._books.values():
            book.hyper = {}

    def members_changed(self) -> None:
        """Somebody has come or left: close what is now complete."""
        for book in self._books.values():
            self._advance(book)

    def unstall(self) -> None:
        """Ask members for missing slices that may be stuck behind others of theirs, so that no order of pushes blocks.

        That is so where a contribution of theirs waits for others: it fills their window. Only slices that become
        complete by it are asked for; another would wait as well, and take memory while a slow member keeps all waiting.
        """
        stuck: set[int] = set().union(*(item.gathering.without_credit() for item in self._open.values()))
        owing, now, asked = self._owing() or (), time.monotonic(), 0
        for (key, index, number), round_ in self._open.items() if stuck else ():
            if asked >= MAX_ASKED or now - round_.started < STALL:
                continue
            missing = round_.gathering.missing(owing)
            if not missing <= stuck:
                continue
            for rank in missing - round_.wanted:
                asked += 1
                round_.wanted.add(rank)
                for link in self._links_of(rank):
                    link.ask_for(key, index, number)

    def oldest(self) -> tuple[int, float, frozenset[int]] | None:
        """Of the rounds that are open, the one that was opened first: its number, when (time.monotonic seconds), and
        the ranks whose contributions are missing.
        """
        owing = self._owing() or ()
        for (_, _, number), round_ in self._open.items():
            return number, round_.started, frozenset(round_.gathering.missing(owing))
        return None

    # State.

    def export_state(self) -> dict[str, Array]:
        """Values and versions of all slices, the optimizer's and the algorithm's state, as named arrays."""
        state: dict[str, Array] = {}
        for (key, index), book in self._books.items():
            if book.slot.value is not None:
                where = [book.slot.version, book.root, book.length, book.dtype, book.offset]
                state[f"value/{key}/{index}"] = book.slot.value
                state[f"book/{key}/{index}"] = np.array(where, np.int64)
        for prefix, part in (("optimizer", self.optimizer), ("algorithm", self._algorithm)):
            if part is not None:
                state |= {f"{prefix}/{name}": array for name, array in part.export_state().items()}
        return state

    def import_state(self, state: dict[str, Array]) -> None:
        """Take up exported state, before the first round. The optimizer has been set already."""
        for name, array in state.items():
            kind, _, rest = name.partition("/")
            if kind == "book":
                key, index = (int(part) for part in rest.split("/"))
                version, root, length, dtype, offset = (int(number) for number in array)
                slot = Slot(key, index, state[f"value/{rest}"].copy(), version)
                self._books[key, index] = _Book(slot, root, length, dtype, offset, closed=version)
        for prefix, part in (("optimizer/", self.optimizer), ("algorithm/", self._algorithm)):
            if part is not None:
                own = {name.removeprefix(prefix): item for name, item in state.items() if name.startswith(prefix)}
                part.import_state(own)

    # Inside.

    def _book(self, header: Header) -> _Book:
        book = self._books.get((header.key, header.slice))
        if self._uplink is not None and header.root >= len(self._uplink.links):
            raise BadMessage(f"a slice of root {header.root}, and there are {len(self._uplink.links)}")
        if book is None:
            if len(self._books) >= MAX_SLICES:
                raise BadMessage("too many slices")
            slot = Slot(header.key, header.slice)
            book = _Book(slot, header.root, header.length, header.dtype, header.offset)
            self._books[header.key, header.slice] = book
        if (header.length, header.dtype, header.root) != (book.length, book.dtype, book.root):
            raise BadMessage(f"{header.length} elements of {DTYPES[header.dtype]} for a slice of {book.length}")
        return book

    def _round(self, book: _Book, header: Header) -> _Round:
        round_ = book.rounds.get(header.round)
        if round_ is None:
            round_ = book.rounds[header.round] = _Round()
            round_.gathering.priority = header.priority
            self._open[book.slot.key, book.slot.index, header.round] = round_
        return round_

    def _advance(self, book: _Book) -> None:
        """Close the rounds of this slice that are complete, in order."""
        owing = self._owing()
        if owing is None:
            return
        while (round_ := book.rounds.get(book.closed + 1)) is not None:
            gathering = round_.gathering
            if self._uplink is None and book.slot.value is None and self.optimizer is not None:
                return
            if not gathering.merge(owing) or gathering.total is None:
                return
            book.closed += 1
            self._open.pop((book.slot.key, book.slot.index, book.closed), None)
            self._close(book, book.closed, gathering, gathering.total)

    def _close(self, book: _Book, number: int, gathering: Gathering, total: Array) -> None:
        if self._uplink is None:
            self._tune(book, gathering.hyper)
            value = self._algorithm.at_root(book.slot, total, gathering.weight, self.optimizer)
            self._finish(book, number, value, gathering)
            return
        decision = self._algorithm.at_party(book.slot, total, gathering.weight)
        if isinstance(decision, Answer):
            self._finish(book, number, decision.array, gathering)
            return
        header = Header(
            kind=Kind.EXCHANGE, key=book.slot.key, slice=book.slot.index, root=book.root, offset=book.offset,
            length=book.length, dtype=book.dtype, round=number, contributors=(self._own_rank(),),
            weight=gathering.weight, base=book.slot.version, priority=gathering.priority, hyper=gathering.hyper,
        )  # fmt: skip
        payload = as_payload(decision.array, book.dtype)

        def on_result(result: Header, array: Array) -> None:
            gathering.ranks = set(result.contributors)
            gathering.weight = result.weight
            gathering.total = None
            self._finish(book, number, self._algorithm.from_root(book.slot, array), gathering)

        self._uplink.send(book.root, header, payload, on_result)

    def _tune(self, book: _Book, news: dict[str, float]) -> None:
        """Set the optimizer to what holds for this slice: not all slices are in the same round when a rate changes."""
        book.hyper.update(news)
        if self.optimizer is None:
            return
        for name in news.keys() - self._initial.keys():
            self._initial[name] = float(self.optimizer.params.get(name, news[name]))
        if self._initial:
            self.optimizer.set(**{**self._initial, **book.hyper})

    def _finish(self, book: _Book, number: int, value: Array, gathering: Gathering) -> None:
        """Store a round's result and answer all who wait for it."""
        book.slot.value = _cast(value, book.dtype)
        book.slot.version = number
        self.last_round = max(self.last_round, number)
        book.result = Header(contributors=tuple(sorted(gathering.ranks))[:4096], weight=gathering.weight)
        for asker in book.rounds.pop(number).askers.values():
            self._answer(book, asker)
        self._answer_pulls(book)

    def _fetched(self, book: _Book, result: Header, array: Array) -> None:
        if book.slot.value is None:
            book.slot.value = array
        self._answer_pulls(book)

    def _answer_pulls(self, book: _Book) -> None:
        for asker in book.pulls:
            self._answer(book, asker)
        book.pulls.clear()

    def _answer(self, book: _Book, asker: _Asker) -> None:
        assert book.slot.value is not None
        header = Header(
            kind=Kind.RESULT, request=asker.request, key=book.slot.key, slice=book.slot.index, offset=book.offset,
            length=book.length, dtype=book.dtype, round=book.slot.version, value=book.slot.version,
            contributors=book.result.contributors, weight=book.result.weight, priority=asker.priority,
        )  # fmt: skip
        self._delivery.down(asker.link, header, as_payload(book.slot.value, book.dtype))

    def _acknowledge(self, book: _Book, asker: _Asker) -> None:
        header = Header(kind=Kind.RESULT, request=asker.request, key=book.slot.key, slice=book.slot.index)
        self._delivery.down(asker.link, header, None)

    def _upward(self, book: _Book, header: Header, kind: Kind) -> Header:
        return Header(
            kind=kind, key=book.slot.key, slice=book.slot.index, root=book.root, offset=book.offset,
            length=book.length, dtype=book.dtype, priority=header.priority,
        )  # fmt: skip


def as_payload(array: Array, dtype: int) -> memoryview:
    """The bytes of `array` in the slice's dtype, without a copy where it has that dtype already."""
    return memoryview(_cast(array, dtype).data).cast("B")


def _cast(array: Array, dtype: int) -> Array:
    """`array` in the slice's dtype; what is too large for fp16 becomes infinite, and the training code's to handle."""
    with np.errstate(over="ignore"):
        return array.astype(DTYPES[dtype], copy=False)
