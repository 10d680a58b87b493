"""A local server's part of a round: decide on the party's sum, exchange it with the root, take the root's result."""

from collections.abc import Callable

from geomx_cli.ps.aggregation.algorithm import Aggregate, PushUp, RowAlgorithm
from geomx_cli.ps.aggregation.compression import Compression
from geomx_cli.ps.aggregation.delivery_interface import Delivery
from geomx_cli.ps.aggregation.optimizer_history import OptimizerHistory
from geomx_cli.ps.aggregation.slice_state import Accumulator, Cohort, SliceState, merge_hyper
from geomx_cli.ps.aggregation.slice_table import SliceTable
from geomx_cli.ps.net.payload import DTYPES, Content, Rows, cast
from geomx_cli.ps.net.wire import Header, Kind, Reply

__all__ = ["Forwarder", "Updater"]

# A root's part of a round: update the value from the sum of the contributions.

MAX_WARNED = 1024
"""Warnings of ignored hyper-parameters."""


class Updater:
    """Gives closed rounds their results at a root, by its algorithm and optimizer. Used by the loop's thread only.

    compression: this end of encoded exchanges with the parties. warn: gets a warning, once per sender and name, of
    hyper-parameters that are ignored.
    """

    def __init__(
        self, table: SliceTable, compression: Compression, history: OptimizerHistory, warn: Callable[[str], None]
    ) -> None:
        self._table = table
        self._compression = compression
        self._history = history
        self._warn = warn
        self._warned: set[tuple[str, str]] = set()

    def update(self, entry: SliceState, cohort: Cohort, accumulator: Accumulator, total: Content) -> None:
        """Update the value, or some rows of it, from the sum of a closed round."""
        slot, before = entry.slot, entry.slot.version
        new = self._new_value(entry, cohort, accumulator, total)
        if isinstance(new, Rows):
            entry.write(new)
            if cohort.changed is None:
                cohort.changed = Rows(new.numbers, cast(new.values, entry.dtype))
            slot.version += 1
        elif new is not None and new is not slot.value:
            slot.value = cast(new, entry.dtype)
            slot.version += 1
        if slot.version != before:  # if all abstained, other cohorts' rounds may have made the value newer
            cohort.version = slot.version

    def _new_value(
        self, entry: SliceState, cohort: Cohort, accumulator: Accumulator, total: Content
    ) -> Content | None:
        """The new value, or its changed rows, or None if the value stays."""
        slot, algorithm = entry.slot, entry.algorithm

        def ignored(name: str, why: str) -> None:
            waiter = cohort.rounds[cohort.closed].waiter_of(accumulator.set_by.get(name, -1))
            who = "a member" if waiter is None else waiter.link.name
            if len(self._warned) < MAX_WARNED and (who, name) not in self._warned:
                self._warned.add((who, name))
                self._warn(f"a contribution of {who} {why}; this is ignored")

        optimizer = None
        if self._table.trains(entry):
            optimizer = self._history.choose(slot.id, entry.hyper, cohort.closed, accumulator.hyper, ignored)
        cohort.is_sum = optimizer is None and not algorithm.starts_from_value
        if not cohort.is_sum:
            self._compression.contributed(entry.in_round(cohort.closed), total)
        if not isinstance(total, Rows):
            aggregate = Aggregate(total, accumulator.weight, cohort.member)
            return algorithm.aggregate_global(slot, aggregate, optimizer)
        assert isinstance(algorithm, RowAlgorithm)
        new = algorithm.rows_at_root(slot, total, accumulator.weight, cohort.member, optimizer)
        if new is None and self._compression.changes:
            return None  # sent as any other result: members keep what the codec has left of the value, all the same
        if cohort.is_sum and isinstance(new, Rows):
            new = cohort.cleared(new)
        # In an asynchronous job other parties have changed other rows meanwhile, so these are not the whole change.
        if new is None or (isinstance(new, Rows) and self._table.asynchronous):
            cohort.changed = Rows.none(entry.row, DTYPES[entry.dtype])
        return new


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
