"""Sends results of rounds and pulled values to the members of a server."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from geomx_cli.ps.aggregation.compression import Compression, Decoded
from geomx_cli.ps.aggregation.delivery_interface import Delivery
from geomx_cli.ps.aggregation.optimizer_history import OptimizerHistory
from geomx_cli.ps.aggregation.slice_state import Accumulator, Cohort, Result, SliceState, View, Waiter
from geomx_cli.ps.aggregation.slice_table import SliceTable
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.cluster.members import CENTRAL
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import Content, Rows, as_payload, form_of
from geomx_cli.ps.net.wire import BadMessage, Form, Header, Kind, Reply

__all__ = ["ResultSender", "plane_of"]

_Encode = Callable[[Compression, Array], Decoded]


class ResultSender:
    """Makes results from the values of slices, encoded once for all receivers in a plane, and sends them.

    compressions: this end of encoded exchanges with the members, by plane. A global server with workers of its own has
    two: the parties', then these workers', who get what a party's local server makes of a result.

    history: for optimizers that compensate for delay, which learn here what each member of a root is about to receive
    and will compute its next gradient from. Used by the loop's thread only.
    """

    def __init__(
        self, table: SliceTable, delivery: Delivery, compressions: Sequence[Compression], history: OptimizerHistory
    ) -> None:
        self._table = table
        self._delivery = delivery
        self._compressions = compressions
        self._history = history

    def result(
        self, entry: SliceState, cohort: Cohort, accumulator: Accumulator, waiters: Collection[Waiter]
    ) -> Result:
        """The result of the cohort's finished round, with what these members ask for. The value has the round, and may
        be newer.
        """
        changed, cohort.changed = cohort.changed, None
        enough = (Reply.NONE,) if changed is None else (Reply.NONE, Reply.CHANGED)
        unwanted = all(waiter.reply in enough for waiter in waiters)
        if changed is None and not self._table.asynchronous and any(each.spec for each in self._compressions):
            unwanted = False  # who pulls it gets what the codec leaves of it, as the members of other servers do
        array = None if unwanted else entry.give()
        if array is not None and cohort.version != entry.slot.version:  # the value includes other cohorts' rounds
            self._given(entry, cohort.member)
            cohort.version = entry.slot.version
        views: tuple[View, ...] = ()
        cohort.seen = ()
        if changed is not None:
            for compression in self._compressions:
                compression.forget(entry.slot.id, cohort.member)
        if array is not None:
            ranks = [waiter.rank for waiter in waiters]
            encode = _unencoded if changed is not None else self._encoder(entry, cohort)
            views = self._views(array, encode, central=max(ranks) >= CENTRAL)
            if not self._table.asynchronous and any(view.encoded is not None for view in views):
                cohort.seen = views
            decoded = self._seen(views[plane_of(min(ranks))], array)
            if decoded is not None:
                self._given(entry, cohort.member, decoded=decoded)
        return Result(
            views, entry.slot.version, tuple(sorted(accumulator.ranks))[:4096], accumulator.weight,
            {rank for waiter in waiters for rank in waiter.ranks}, changed, cohort.is_sum,
        )  # fmt: skip

    def answer(self, entry: SliceState, waiter: Waiter, round_: int, result: Result) -> None:
        """Send a member its part of a result. Raises BadMessage if that was not kept."""
        rows = result.rows(waiter.reply, entry.row)
        if rows is not None:
            self._send(entry, waiter, round_, result, as_payload(rows, entry.dtype), form_of(rows))
            return
        if not result.views:
            raise BadMessage(f"a repeat of round {round_} that asks for more than before")
        view = result.views[plane_of(waiter.rank)]
        if view.encoded is not None and waiter.codec == view.codec:
            payload, about = view.encoded
            if about["form"] == Form.ENCODED or waiter.follows:
                self._send(entry, waiter, round_, result, payload, {"codec": view.codec, **about})
                return
        self._send(entry, waiter, round_, result, as_payload(view.array, entry.dtype), {})

    def answer_pull(self, entry: SliceState, waiter: Waiter) -> None:
        """Send the present value, or the rows of it that were asked for. In a synchronous job the value is the last
        round's result, as the codec left it.
        """
        member, version = self._table.member(waiter.rank), entry.slot.version
        seen = () if self._table.asynchronous else entry.cohort(member).seen
        if waiter.numbers is not None:
            self._given(entry, member, waiter.numbers)
            value = seen[plane_of(waiter.rank)].array if seen else entry.slot.value
            assert value is not None
            self.pass_on(entry, waiter, version, Rows.of(value, entry.row, waiter.numbers))
            return
        if seen:
            self.answer(entry, waiter, 0, Result(seen, version))
            return
        array = entry.give()
        views = self._newest(entry, array) if waiter.newest else self._views(array, _unencoded)
        self._given(entry, member, decoded=self._seen(views[plane_of(waiter.rank)], array))
        self.answer(entry, waiter, 0, Result(views, version))

    def pass_on(self, entry: SliceState, waiter: Waiter, version: int, found: Content) -> None:
        """Answer a pull with this content, which is newer than the results of rounds."""
        if isinstance(found, Rows):
            self._send(entry, waiter, 0, Result((), version), as_payload(found, entry.dtype), form_of(found))
        else:
            self.answer(entry, waiter, 0, Result(self._newest(entry, found), version))

    def acknowledge(self, link: Link, push: Header) -> None:
        """Answer the push of an initial value."""
        header = Header(kind=Kind.RESULT, request=push.request, key=push.key, slice=push.slice)
        self._delivery.down(link, header, None)

    @staticmethod
    def _encoder(entry: SliceState, cohort: Cohort) -> _Encode:
        where, member, is_sum = entry.in_round(cohort.finished), cohort.member, cohort.is_sum
        return lambda compression, array: compression.result(where, member, array, is_sum=is_sum)

    def _newest(self, entry: SliceState, array: Array) -> tuple[View, ...]:
        where = entry.in_round(0)
        return self._views(array, lambda compression, given: compression.newest(where, given))

    def _views(self, array: Array, encode: _Encode, *, central: bool = True) -> tuple[View, ...]:
        """The value as each plane's members see it; without central workers only the first plane's."""
        views: list[View] = []
        for compression in self._compressions if central else self._compressions[:1]:
            found, encoded = encode(compression, views[-1].array if views else array)
            views.append(View(found, encoded, compression.spec))
        return tuple(views)

    def _seen(self, view: View, value: Array) -> Array | None:
        """What a codec leaves of the value, for optimizers that compensate for delay; None if that is all of it."""
        return None if not self._table.asynchronous or view.array is value else view.array

    def _given(
        self, entry: SliceState, member: int, numbers: Array | None = None, decoded: Array | None = None
    ) -> None:
        """Tell the optimizer that a member is about to receive the root's newest value, or these rows of it, or what a
        codec leaves of it.
        """
        optimizer = self._history.present(entry.hyper) if self._table.asynchronous else None
        if optimizer is not None:
            assert entry.slot.value is not None
            rows = None if numbers is None else (entry.row, numbers)
            optimizer.given(entry.slot.id, member, entry.slot.value, rows, decoded)

    def _send(
        self, entry: SliceState, waiter: Waiter, round_: int, result: Result, payload: memoryview | None,
        about: dict[str, Any],
    ) -> None:  # fmt: skip
        header = Header(
            kind=Kind.RESULT, request=waiter.request, key=entry.slot.key, slice=entry.slot.index, offset=entry.offset,
            length=entry.length, dtype=entry.dtype, row=entry.row, size=entry.size, round=round_, value=result.version,
            contributors=result.contributors, weight=result.weight, asynchronous=self._table.asynchronous,
            priority=waiter.priority, is_sum=result.is_sum, **about,
        )  # fmt: skip
        self._delivery.down(waiter.link, header, payload)


def _unencoded(_: Compression, array: Array) -> tuple[Array, None]:
    return array, None


def plane_of(rank: int) -> int:
    """The index of a member's compression and view: the last for central workers, else the first."""
    return -1 if rank >= CENTRAL else 0
