"""A root's part of a round: update the value from the sum of the contributions."""

from collections.abc import Callable

from geomx_cli.ps.aggregation.accumulator import Accumulator
from geomx_cli.ps.aggregation.algorithm import Aggregate, RowAlgorithm
from geomx_cli.ps.aggregation.compression import Compression
from geomx_cli.ps.aggregation.optimizer_history import OptimizerHistory
from geomx_cli.ps.aggregation.slice_state import Cohort, SliceState
from geomx_cli.ps.aggregation.slice_table import SliceTable
from geomx_cli.ps.net.payload import DTYPES, Content, cast
from geomx_cli.ps.net.rows import Rows

__all__ = ["Updater"]

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
        if slot.value is not None:
            entry.offered = None

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
