"""Sends results of rounds and pulled values to the members of a server."""

from collections.abc import Collection
from typing import Any

from geomx_cli.ps.aggregation.accumulator import Accumulator
from geomx_cli.ps.aggregation.compression import Compression
from geomx_cli.ps.aggregation.delivery_interface import Delivery
from geomx_cli.ps.aggregation.optimizer_history import OptimizerHistory
from geomx_cli.ps.aggregation.slice_state import Cohort, Result, SliceState, Waiter
from geomx_cli.ps.aggregation.slice_table import SliceTable
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import Array, Content, as_payload, form_of
from geomx_cli.ps.net.rows import Rows
from geomx_cli.ps.net.wire import BadMessage, Form, Header, Kind, Reply

__all__ = ["ResultSender"]


class ResultSender:
    """Makes results from the values of slices, encoded once for all receivers, and sends them.

    history: for optimizers that compensate for delay, which learn here what each member of a root is about to receive
    and will compute its next gradient from. Used by the loop's thread only.
    """

    def __init__(
        self, table: SliceTable, delivery: Delivery, compression: Compression, history: OptimizerHistory
    ) -> None:
        self._table = table
        self._delivery = delivery
        self._compression = compression
        self._history = history

    def result(
        self, entry: SliceState, cohort: Cohort, accumulator: Accumulator, waiters: Collection[Waiter]
    ) -> Result:
        """The result of the cohort's finished round, with what these members ask for. The value has the round, and may
        be newer.
        """
        changed, cohort.changed = cohort.changed, None
        enough = (Reply.NONE,) if changed is None else (Reply.NONE, Reply.CHANGED)
        array = None if all(waiter.reply in enough for waiter in waiters) else entry.give()
        if array is not None and cohort.version != entry.slot.version:  # the value includes other cohorts' rounds
            self._given(entry, cohort.member)
            cohort.version = entry.slot.version
        encoded = None
        if self._table.is_root and changed is not None:
            self._compression.forget(entry.slot.id, cohort.member)
        elif self._table.is_root and array is not None:
            is_sum = self._history.gives_sums(entry.hyper, starts_from_value=self._table.algorithm.starts_from_value)
            where = entry.in_round(cohort.finished)
            array, encoded = self._compression.result(where, cohort.member, array, is_sum=is_sum)
            if encoded is not None:
                self._given(entry, cohort.member, decoded=array)
        return Result(
            array, entry.slot.version, tuple(sorted(accumulator.ranks))[:4096], accumulator.weight,
            {waiter.rank for waiter in waiters}, changed, encoded, self._compression.spec,
        )  # fmt: skip

    def answer(self, entry: SliceState, waiter: Waiter, round_: int, result: Result) -> None:
        """Send a member its part of a result. Raises BadMessage if that was not kept."""
        found = result.content(waiter.reply, entry.row)
        if found is None:
            raise BadMessage(f"a repeat of round {round_} that asks for more than before")
        if found is result.array and result.encoded is not None and waiter.codec == result.codec:
            payload, about = result.encoded
            if about["form"] == Form.ENCODED or waiter.follows:
                self._send(entry, waiter, round_, result, payload, {"codec": result.codec, **about})
                return
        self._send(entry, waiter, round_, result, as_payload(found, entry.dtype), form_of(found))

    def answer_pull(self, entry: SliceState, waiter: Waiter) -> None:
        """Send the present value, or the rows of it that were asked for, or that the member has the value already."""
        member = self._table.member(waiter.rank)
        if waiter.numbers is not None:
            self._given(entry, member, waiter.numbers)
            assert entry.slot.value is not None
            self.pass_on(entry, waiter, entry.slot.version, Rows.of(entry.slot.value, entry.row, waiter.numbers))
            return
        if self._table.is_root and entry.has_initial(waiter.digest):
            self._given(entry, member)
            self._send(entry, waiter, 0, Result(None, entry.slot.version), None, {"form": Form.SAME})
            return
        array, encoded = entry.give(), None
        if waiter.newest:
            array, encoded = self._compression.newest(entry.in_round(0), array)
        self._given(entry, member, decoded=None if encoded is None else array)
        result = Result(array, entry.slot.version, encoded=encoded, codec=self._compression.spec)
        self.answer(entry, waiter, 0, result)

    def pass_on(self, entry: SliceState, waiter: Waiter, version: int, found: Content) -> None:
        """Answer a pull with this content."""
        self._send(entry, waiter, 0, Result(None, version), as_payload(found, entry.dtype), form_of(found))

    def acknowledge(self, link: Link, push: Header) -> None:
        """Answer the push or offer of an initial value."""
        header = Header(kind=Kind.RESULT, request=push.request, key=push.key, slice=push.slice)
        self._delivery.down(link, header, None)

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
            priority=waiter.priority, **about,
        )  # fmt: skip
        self._delivery.down(waiter.link, header, payload)
