"""A local server's part of a round: decide on the party's sum, exchange it with the root, take the root's result."""

from collections.abc import Callable

from geomx_cli.ps.aggregation.accumulator import Accumulator, merge_hyper
from geomx_cli.ps.aggregation.algorithm import Aggregate, PushUp
from geomx_cli.ps.aggregation.compression import Compression
from geomx_cli.ps.aggregation.delivery_interface import Delivery
from geomx_cli.ps.aggregation.slice_state import Cohort, SliceState
from geomx_cli.ps.aggregation.slice_table import SliceTable
from geomx_cli.ps.net.payload import Content, cast
from geomx_cli.ps.net.rows import Rows
from geomx_cli.ps.net.wire import Header, Kind, Reply

__all__ = ["Forwarder"]


class Forwarder:
    """Gives closed rounds their results at a local server.

    compression: this end of encoded exchanges with the roots. own_rank: returns the rank under which sums are sent;
    None sends them under the ranks that they contain. on_result: called when the value has the root's result of a
    round. Used by the loop's thread only.
    """

    def __init__(
        self,
        table: SliceTable,
        delivery: Delivery,
        compression: Compression,
        own_rank: Callable[[], int] | None,
        on_result: Callable[[SliceState, Cohort, Accumulator], None],
    ) -> None:
        self._table = table
        self._delivery = delivery
        self._compression = compression
        self._own_rank = own_rank
        self._on_result = on_result

    def decide(self, entry: SliceState, cohort: Cohort, accumulator: Accumulator, total: Content) -> bool:
        """Have the algorithm decide on the sum of a closed round. Returns whether the value is the round's result now;
        otherwise the sum was sent to the root. Sums of rows always are.
        """
        if isinstance(total, Rows):
            self._exchange(entry, cohort, accumulator, total, accumulator.weight)
            return False
        aggregate = Aggregate(total, accumulator.weight, cohort.member)
        decision = entry.algorithm.aggregate_local(entry.slot, aggregate)
        if isinstance(decision, PushUp):
            self._exchange(entry, cohort, accumulator, decision.array, decision.weight)
            return False
        entry.slot.value, cohort.is_sum = cast(decision.array, entry.dtype), False
        merge_hyper(entry.hyper, accumulator.hyper)
        return True

    def _exchange(
        self, entry: SliceState, cohort: Cohort, accumulator: Accumulator, total: Content, weight: float
    ) -> None:
        self._table.waits_no_more(entry, cohort)
        entry.forwarded += 1
        hyper = merge_hyper(entry.hyper, accumulator.hyper)  # includes the changes of rounds that were not forwarded
        entry.hyper = {}
        payload, about = self._compression.sum(entry.in_round(entry.forwarded), total) if weight else (None, {})
        header = Header(
            kind=Kind.EXCHANGE, key=entry.slot.key, slice=entry.slot.index, root=entry.root, offset=entry.offset,
            length=entry.length, dtype=entry.dtype, row=entry.row, size=entry.size, shard=entry.shard,
            round=entry.forwarded,
            contributors=tuple(sorted(accumulator.ranks)) if self._own_rank is None else (self._own_rank(),),
            weight=weight, reply=self._reply(entry, cohort),
            priority=accumulator.priority, hyper=hyper, **about,
        )  # fmt: skip

        def on_result(result: Header, found: Content) -> None:
            self._table.asynchronous = result.asynchronous
            accumulator.ranks = set(result.contributors)
            accumulator.weight = result.weight
            entry.slot.version, cohort.is_sum = result.value, result.is_sum
            self._take(entry, cohort, found)
            self._on_result(entry, cohort, accumulator)

        self._delivery.up(entry.root, header, payload, on_result)

    def _reply(self, entry: SliceState, cohort: Cohort) -> Reply:
        """The part of the round's result needed to keep the value complete and to answer the round's members."""
        replies = {waiter.reply for waiter in cohort.rounds[cohort.closed].waiting()}
        may_be_asynchronous = self._table.asynchronous or not self._table.last_round
        if not self._table.takes_rows or (Reply.FULL in replies and may_be_asynchronous):
            return Reply.FULL
        if self._table.asynchronous:
            return Reply.NONE
        return Reply.FULL if entry.slot.value is None else Reply.CHANGED

    def _take(self, entry: SliceState, cohort: Cohort, found: Content) -> None:
        """Apply the root's result of a round: the value, or the rows changed in it."""
        if not isinstance(found, Rows):
            entry.slot.value = cast(entry.algorithm.on_global(entry.slot, found), entry.dtype)
            return
        cohort.changed = cohort.cleared(found) if cohort.is_sum else found
        if self._table.asynchronous:
            entry.slot.value = None  # only the root has the rows that other parties changed
        elif entry.slot.value is not None:
            entry.write(found)
