"""The rounds of all slices at one server: collect contributions, decide, answer.

The rounds of a slice complete strictly in order, each after the result of the previous one. In a synchronous job all
members complete a round together; the root of an asynchronous job completes each member's rounds separately.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from geomx_cli.ps.aggregation.accumulator import Accumulator, Contribution, merge_hyper
from geomx_cli.ps.aggregation.algorithm import Aggregate, PushUp, RowAlgorithm
from geomx_cli.ps.aggregation.codec import received
from geomx_cli.ps.aggregation.compression import Compression
from geomx_cli.ps.aggregation.delivery import Delivery
from geomx_cli.ps.aggregation.optimizer_history import Hyper, OptimizerHistory
from geomx_cli.ps.aggregation.slice_state import Cohort, Result, SliceState, Waiter
from geomx_cli.ps.aggregation.slice_table import SliceTable
from geomx_cli.ps.aggregation.state import export_state, import_state
from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import (
    DTYPES,
    Array,
    Content,
    as_payload,
    cast,
    form_of,
    numbers_payload,
    row_numbers,
    view,
)
from geomx_cli.ps.net.rows import Rows
from geomx_cli.ps.net.wire import MAX_HYPER, MAX_ROUNDS_AHEAD, BadMessage, Form, Header, Kind, Reply
from geomx_cli.ps.optim.optimizers import Optimizer

__all__ = ["MAX_PULLS", "Aggregator"]

MAX_PULLS = 4096
"""Pulls of one slice by one member that may wait for its value."""


class Aggregator:
    """Runs the rounds of all slices in `table`. Used by the loop's thread only.

    upstream: None at a root. own_rank: returns the rank under which sums are sent upstream; None sends them under the
    ranks that they contain. compression: the codec between roots and the level below. warn: receives warnings for the
    user. `asynchronous`: whether the roots handle each party's contributions separately; a local server learns this
    from their results.
    """

    def __init__(
        self,
        *,
        delivery: Delivery,
        upstream: UpstreamClient | None,
        own_rank: Callable[[], int] | None,
        table: SliceTable,
        compression: Compression | None = None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.history = OptimizerHistory()
        self.asynchronous = table.algorithm.asynchronous
        self.last_round = 0
        self.versions: dict[int, int] = {}
        self._delivery = delivery
        self._upstream = upstream
        self._own_rank = own_rank
        self._warn = warn
        self._warned: set[str] = set()
        self.table = table
        self.compression = compression or Compression()
        self._takes_rows = isinstance(table.algorithm, RowAlgorithm) and table.algorithm.takes_rows

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that was set last."""
        return self.history.newest

    def closed(self) -> dict[int, int]:
        """The highest round of each key that is decided in any of its slices."""
        found: dict[int, int] = {}
        for (key, _), entry in self.table.entries.items():
            found[key] = max(found.get(key, 0), *(cohort.closed for cohort in entry.cohorts.values()), 0)
        return {key: round_ for key, round_ in found.items() if round_}

    # Messages from members.

    def on_push(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """Handle an initial value: the first one wins. A local server forwards it to the root."""
        entry, array = self.table.entry(header), view(header, payload)
        waiter = Waiter(link, -1, header.request, header.priority)
        if self._upstream is not None:
            up = Header(
                kind=Kind.PUSH, key=entry.slot.key, slice=entry.slot.index, root=entry.root, offset=entry.offset,
                length=entry.length, dtype=entry.dtype, row=entry.row, size=entry.size, priority=header.priority,
            )  # fmt: skip
            above = self._upstream.links[entry.root]
            self._upstream.send(above, up, payload, lambda _, __: self._acknowledge(entry, waiter))
        else:
            if entry.slot.value is None:
                entry.slot.value = array.copy()
                entry.hyper.update(header.hyper)
                self._answer_pulls(entry)
                self._advance(entry)
            self._acknowledge(entry, waiter)
        link.consumed(array.nbytes)

    def on_pull(self, link: Link, header: Header, rank: int, payload: memoryview | None = None) -> None:
        """Answer with the current value or the requested rows of it. Without a value, queue the pull, and fetch the
        value from the root at a local server.

        In an asynchronous job a member that has started to push wants the newest value, so its pull goes to the root.
        """
        entry, numbers = self.table.entry(header), row_numbers(header, payload)
        newest = self.asynchronous and header.round > 0
        waiter = Waiter(link, rank, header.request, header.priority, codec=header.codec, newest=newest, numbers=numbers)
        own = entry.pulls.get(link, {})
        if len(own) >= MAX_PULLS and header.request not in own:
            raise BadMessage(f"more than {MAX_PULLS} pulls of a slice without a value")
        link.consumed(0 if payload is None else len(payload))
        if header.request in own:
            return
        if self._upstream is not None and header.round:
            self._pull_above(entry, header, partial(self._answer_newest, entry, waiter), numbers)
        elif entry.slot.value is not None:
            self._answer_pull(entry, waiter)
        else:
            entry.pulls.setdefault(link, {})[header.request] = waiter
            if self._upstream is not None and not entry.fetching:
                self._fetch(entry, header.priority)

    def on_exchange(self, link: Link, header: Header, payload: memoryview | None, rank: int) -> None:
        """Handle a contribution from the member of this rank, which the caller has checked may send for its
        contributors.

        A duplicate gets the same answer as before. Weight 0 means abstaining: there is no payload, and the sender only
        takes the round's result. Any other contribution without a payload is a query, after a lost connection, whether
        that contribution was received; if not, the sender is asked to send it again.
        """
        entry, ranks = self.table.entry(header), header.contributors
        asks = header.weight > 0 and payload is None
        given = received(header, payload) if header.weight and not asks else None
        size = 0 if payload is None else len(payload)
        if given is None and size:
            raise BadMessage("a contribution of weight 0 with a payload")
        cohort = entry.cohort(self.table.member(rank))
        if any(self.table.member(other) != cohort.member for other in ranks):
            raise BadMessage(f"contributions of ranks {ranks}, which go through rounds by themselves, in one")
        if not 0 < header.round <= cohort.finished + MAX_ROUNDS_AHEAD:
            raise BadMessage(f"round {header.round} while round {cohort.finished + 1} is open")
        # This bounds the stored results to the number of rounds that may be in flight.
        if not header.round - 1 - MAX_ROUNDS_AHEAD <= header.acked < header.round:
            raise BadMessage(f"a contribution to round {header.round} from one that has {header.acked} results")
        cohort.acknowledge(rank, header.acked)
        waiter = Waiter(
            link, rank, header.request, header.priority, reply=header.reply, codec=header.codec, follows=header.follows
        )
        if header.round <= cohort.finished:
            result = cohort.results.get(header.round)
            if result is not None:  # else a late duplicate: the sender has acknowledged the result meanwhile
                self._answer(entry, waiter, header.round, result)
            link.consumed(size)
            return
        if asks:
            known = cohort.rounds.get(header.round)
            if known is None or not known.accumulator.has(ranks):
                link.ask_again(header.request)
            else:
                known.waiters[ranks[0]] = waiter
            return
        round_ = self.table.round(entry, cohort, header.round, header.priority, ranks)
        if len(round_.accumulator.hyper_names() | header.hyper.keys()) > MAX_HYPER:
            raise BadMessage(f"more than {MAX_HYPER} hyper-parameters in one round")
        done = partial(link.consumed, size)
        contribution = Contribution(ranks, given, header.weight, header.hyper, done)
        if header.round <= cohort.closed or not round_.accumulator.offer(contribution):
            link.consumed(size)
        round_.waiters[ranks[0]] = waiter
        self._advance(entry)

    def use(self, optimizer: Optimizer, by_key: Mapping[int, Hyper] | None = None) -> None:
        """Update values with this optimizer from now on, and discard the hyper-parameters set for a previous one.

        by_key: hyper-parameters of single keys.
        """
        self.history.use(optimizer, by_key or {})
        for entry in self.table.entries.values():
            entry.hyper = {}

    def go_alone(self) -> bool:
        """See SliceTable.go_alone."""
        if not self.table.go_alone(late=self.last_round > 0):
            return False
        self.asynchronous = True
        self.members_changed()
        return True

    def left(self, rank: int) -> None:
        """Handle the departure of this rank: it owes no contribution and has received all its results."""
        for entry in self.table.entries.values():
            cohort = entry.cohort(self.table.member(rank))
            cohort.acknowledge(rank, cohort.finished)
        self.members_changed()

    def members_changed(self) -> None:
        """Membership has changed: close the rounds that are complete now."""
        self.table.changed()
        for entry in self.table.entries.values():
            self._advance(entry)

    # State.

    def export_state(self) -> dict[str, Array]:
        """See state.py."""
        return export_state(self.table.entries, self.optimizer) | self.compression.export_state()

    def import_state(self, state: dict[str, Array]) -> None:
        """See state.py."""
        import_state(state, self.table.entries, self.optimizer)
        self.compression.import_state(state)

    # Internals.

    def _advance(self, entry: SliceState) -> None:
        """Close this slice's complete rounds in order, and answer those that were held back by the bound on staleness.
        """
        while self.table.owing() is not None and any(self._go_on(entry, item) for item in list(entry.cohorts.values())):
            pass

    def _go_on(self, entry: SliceState, cohort: Cohort) -> bool:
        if cohort.held is None:
            return self._close_next(entry, cohort)
        if self.table.too_far_behind(entry, cohort):
            # The round is in the value already; only its answer waits, for the cohorts that are too far behind.
            return False
        accumulator, cohort.held = cohort.held, None
        self._finish(entry, cohort, accumulator)
        return True

    def _close_next(self, entry: SliceState, cohort: Cohort) -> bool:
        round_ = cohort.rounds.get(cohort.closed + 1)
        if round_ is None or cohort.closed > cohort.finished or self._lacks_value(entry):
            return False
        accumulator = round_.accumulator
        if not accumulator.merge(self.table.members(cohort)) or not accumulator.ranks:
            return False
        cohort.closed += 1
        total, accumulator.total = accumulator.total, None
        if total is None:  # all members abstained
            total = Rows.none(entry.row, np.promote_types(DTYPES[entry.dtype], np.float32))
        if isinstance(total, Rows) and not (self._takes_rows and (self._upstream or entry.slot.value is not None)):
            total = total.dense(entry.length)
        self._close(entry, cohort, accumulator, total)
        return True

    def _lacks_value(self, entry: SliceState) -> bool:
        """Whether the initial value is required and missing; a local server then fetches it."""
        if entry.slot.value is not None:
            return False
        if self._upstream is None:
            return self.optimizer is not None or self.table.algorithm.starts_from_value
        if self.table.algorithm.starts_from_value and not entry.fetching:
            self._fetch(entry, 0)
        return self.table.algorithm.starts_from_value

    def _close(self, entry: SliceState, cohort: Cohort, accumulator: Accumulator, total: Content) -> None:
        self._report_conflicts(entry, accumulator)
        if self._upstream is None:
            before = entry.slot.version
            if not before and entry.slot.value is not None:
                self.compression.starts_from(entry.in_round(cohort.closed), cohort.member, entry.slot.value)
            self._update(entry, cohort, accumulator, total)
            if entry.slot.version != before:  # if all abstained, other cohorts' rounds may have made the value newer
                cohort.version = entry.slot.version
            # A root answers in _go_on: the answer may have to wait for cohorts that are too far behind.
            cohort.held = accumulator
        elif isinstance(total, Rows):
            self._forward(entry, cohort, accumulator, total, accumulator.weight)
        else:
            aggregate = Aggregate(total, accumulator.weight, cohort.member)
            decision = self.table.algorithm.aggregate_local(entry.slot, aggregate)
            if isinstance(decision, PushUp):
                self._forward(entry, cohort, accumulator, decision.array, decision.weight)
            else:
                entry.slot.value = cast(decision.array, entry.dtype)
                merge_hyper(entry.hyper, accumulator.hyper)
                self._finish(entry, cohort, accumulator)

    def _gives_sums(self, entry: SliceState) -> bool:
        """Whether each result is the sum of its own round, and not a value that rounds update."""
        return self.history.present(entry.hyper) is None and not self.table.algorithm.starts_from_value

    def _update(self, entry: SliceState, cohort: Cohort, accumulator: Accumulator, total: Content) -> None:
        """At a root: compute the new value, or its changed rows."""
        slot, algorithm, new = entry.slot, self.table.algorithm, None
        optimizer = self.history.choose(slot.id, entry.hyper, cohort.closed, accumulator.hyper)
        if isinstance(total, Rows):
            assert isinstance(algorithm, RowAlgorithm)
            new = algorithm.rows_at_root(slot, total, accumulator.weight, cohort.member, optimizer)
            # In an asynchronous job other parties have changed other rows meanwhile, so these are not the whole change.
            if new is None or (isinstance(new, Rows) and algorithm.asynchronous):
                cohort.changed = Rows.none(entry.row, DTYPES[entry.dtype])
        else:
            new = algorithm.aggregate_global(slot, Aggregate(total, accumulator.weight, cohort.member), optimizer)
            if not self._gives_sums(entry):
                self.compression.contributed(entry.in_round(cohort.closed), total)
        if isinstance(new, Rows):
            entry.write(new)
            if cohort.changed is None:
                cohort.changed = Rows(new.numbers, cast(new.values, entry.dtype))
            slot.version += 1
        elif new is not None and new is not slot.value:
            slot.value = cast(new, entry.dtype)
            slot.version += 1

    def _forward(
        self, entry: SliceState, cohort: Cohort, accumulator: Accumulator, total: Content, weight: float
    ) -> None:
        """At a local server: exchange the party's sum with the root."""
        assert self._upstream is not None
        self.table.waits_no_more(entry, cohort)
        entry.forwarded += 1
        hyper = merge_hyper(entry.hyper, accumulator.hyper)  # includes the changes of rounds that were not forwarded
        entry.hyper = {}
        payload, about = self.compression.sum(entry.in_round(entry.forwarded), total) if weight else (None, {})
        header = Header(
            kind=Kind.EXCHANGE, key=entry.slot.key, slice=entry.slot.index, root=entry.root, offset=entry.offset,
            length=entry.length, dtype=entry.dtype, row=entry.row, size=entry.size, round=entry.forwarded,
            contributors=tuple(sorted(accumulator.ranks)) if self._own_rank is None else (self._own_rank(),),
            weight=weight, reply=self._reply(entry, cohort),
            priority=accumulator.priority, hyper=hyper, **about,
        )  # fmt: skip

        def on_result(result: Header, found: Content) -> None:
            self.asynchronous = result.asynchronous
            accumulator.ranks = set(result.contributors)
            accumulator.weight = result.weight
            entry.slot.version = result.value
            self._take(entry, cohort, found)
            self._finish(entry, cohort, accumulator)
            self._advance(entry)

        self._delivery.up(entry.root, header, payload, on_result)

    def _reply(self, entry: SliceState, cohort: Cohort) -> Reply:
        """The part of the round's result needed to keep the value complete and to answer the round's members."""
        replies = {waiter.reply for waiter in cohort.rounds[cohort.closed].waiters.values()}
        if not self._takes_rows or (Reply.FULL in replies and (self.asynchronous or not self.last_round)):
            return Reply.FULL
        if self.asynchronous:
            return Reply.NONE
        return Reply.FULL if entry.slot.value is None else Reply.CHANGED

    def _take(self, entry: SliceState, cohort: Cohort, found: Content) -> None:
        """Apply the root's result of a round: the value, or the rows changed in it."""
        if not isinstance(found, Rows):
            entry.slot.value = cast(self.table.algorithm.on_global(entry.slot, found), entry.dtype)
            return
        cohort.changed = found
        if self.asynchronous:
            entry.slot.value = None  # only the root has the rows that other parties changed
        elif entry.slot.value is not None:
            entry.write(found)

    def _report_conflicts(self, entry: SliceState, accumulator: Accumulator) -> None:
        """Warn, once per name, if workers set a hyper-parameter to different values in one round."""
        for name in accumulator.conflicts.keys() - self._warned:
            self._warned.add(name)
            self._warn(
                f"workers set {name} to {accumulator.hyper[name]:g} and to {accumulator.conflicts[name]:g} in one round"
                f" of key {entry.slot.key}: that of the lower rank holds; let all workers set the same"
            )

    def _finish(self, entry: SliceState, cohort: Cohort, accumulator: Accumulator) -> None:
        """Answer all members that wait for the closed round; the value is its result or newer."""
        cohort.finished = cohort.closed
        self.table.waits_no_more(entry, cohort)
        self.table.changed()
        self.last_round = max(self.last_round, cohort.finished)
        self.versions[cohort.member] = max(self.versions.get(cohort.member, 0), cohort.finished)
        waiters = cohort.rounds.pop(cohort.finished).waiters
        ranks = tuple(sorted(accumulator.ranks))[:4096]
        changed, cohort.changed = cohort.changed, None
        enough = (Reply.NONE,) if changed is None else (Reply.NONE, Reply.CHANGED)
        array = None if all(waiter.reply in enough for waiter in waiters.values()) else entry.give()
        if array is not None and cohort.version != entry.slot.version:  # the value includes other cohorts' rounds
            self._given(entry, cohort.member)
            cohort.version = entry.slot.version
        encoded = None
        if self._upstream is None and changed is not None:
            self.compression.forget(entry.slot.id, cohort.member)
        elif self._upstream is None and array is not None:
            array, encoded = self.compression.result(
                entry.in_round(cohort.finished), cohort.member, array, is_sum=self._gives_sums(entry)
            )
            if encoded is not None:
                self._given(entry, cohort.member, decoded=array)
        result = Result(
            array, entry.slot.version, ranks, accumulator.weight, {waiter.rank for waiter in waiters.values()}, changed,
            encoded, self.compression.spec,
        )  # fmt: skip
        cohort.results[cohort.finished] = result
        for waiter in waiters.values():
            self._answer(entry, waiter, cohort.finished, result)
        if entry.slot.value is not None:
            self._answer_pulls(entry)

    def _given(
        self, entry: SliceState, member: int, numbers: Array | None = None, decoded: Array | None = None
    ) -> None:
        """Tell the optimizer that a member is about to receive the root's newest value, or these rows of it, or what a
        codec leaves of it, and will compute its next gradient from it. Optimizers that compensate for delay need that.
        """
        optimizer = self.history.present(entry.hyper)
        if self._upstream is None and self.table.algorithm.asynchronous and optimizer is not None:
            assert entry.slot.value is not None
            rows = None if numbers is None else (entry.row, numbers)
            optimizer.given(entry.slot.id, member, entry.slot.value, rows, decoded)

    def _fetch(self, entry: SliceState, priority: int) -> None:
        """Request the value from the root, which answers as soon as it has one."""
        entry.fetching = True
        self._pull_above(entry, Header(priority=priority), partial(self._fetched, entry))

    def _pull_above(
        self, entry: SliceState, asked: Header, on_result: Callable[[Header, Content], None],
        numbers: Array | None = None,
    ) -> None:  # fmt: skip
        assert self._upstream is not None
        header = Header(
            kind=Kind.PULL, key=entry.slot.key, slice=entry.slot.index, root=entry.root, offset=entry.offset,
            length=entry.length, dtype=entry.dtype, row=entry.row, size=entry.size, round=asked.round,
            priority=asked.priority, form=asked.form, rows=asked.rows,
            codec=self.compression.spec if asked.round else "",
        )  # fmt: skip
        payload = None if numbers is None else numbers_payload(numbers)
        self._upstream.send(self._upstream.links[entry.root], header, payload, on_result)

    def _fetched(self, entry: SliceState, result: Header, found: Content) -> None:
        entry.fetching, self.asynchronous = False, result.asynchronous
        if entry.slot.value is None and not isinstance(found, Rows):
            entry.slot.value, entry.slot.version = found, result.value
        self._answer_pulls(entry)
        self._advance(entry)

    def _answer_pulls(self, entry: SliceState) -> None:
        pulls, entry.pulls = entry.pulls, {}
        for own in pulls.values():
            for waiter in own.values():
                self._answer_pull(entry, waiter)

    def _answer_pull(self, entry: SliceState, waiter: Waiter) -> None:
        member = self.table.member(waiter.rank)
        if waiter.numbers is not None:
            self._given(entry, member, waiter.numbers)
            assert entry.slot.value is not None
            found = Rows.of(entry.slot.value, entry.row, waiter.numbers)
            self._send_content(entry, waiter, 0, Result(None, entry.slot.version), found)
            return
        array, encoded = entry.give(), None
        if waiter.newest:
            array, encoded = self.compression.newest(entry.in_round(0), array)
        self._given(entry, member, decoded=None if encoded is None else array)
        result = Result(array, entry.slot.version, encoded=encoded, codec=self.compression.spec)
        self._answer(entry, waiter, 0, result)

    def _answer_newest(self, entry: SliceState, waiter: Waiter, above: Header, found: Content) -> None:
        """Pass on the root's value; this server's own value is unchanged."""
        self._send_content(entry, waiter, 0, Result(None, above.value), found)

    def _answer(self, entry: SliceState, waiter: Waiter, round_: int, result: Result) -> None:
        found = result.content(waiter.reply, entry.row)
        if found is None:
            raise BadMessage(f"a repeat of round {round_} that asks for more than before")
        if found is result.array and result.encoded is not None and waiter.codec == result.codec:
            payload, about = result.encoded
            if about["form"] == Form.ENCODED or waiter.follows:
                self._send_down(entry, waiter, round_, result, payload, {"codec": result.codec, **about})
                return
        self._send_content(entry, waiter, round_, result, found)

    def _send_content(self, entry: SliceState, waiter: Waiter, round_: int, result: Result, found: Content) -> None:
        self._send_down(entry, waiter, round_, result, as_payload(found, entry.dtype), form_of(found))

    def _send_down(
        self, entry: SliceState, waiter: Waiter, round_: int, result: Result, payload: memoryview, about: dict[str, Any]
    ) -> None:
        header = Header(
            kind=Kind.RESULT, request=waiter.request, key=entry.slot.key, slice=entry.slot.index, offset=entry.offset,
            length=entry.length, dtype=entry.dtype, row=entry.row, size=entry.size, round=round_,
            value=result.version, contributors=result.contributors, weight=result.weight,
            asynchronous=self.asynchronous, priority=waiter.priority, **about,
        )  # fmt: skip
        self._delivery.down(waiter.link, header, payload)

    def _acknowledge(self, entry: SliceState, waiter: Waiter) -> None:
        header = Header(kind=Kind.RESULT, request=waiter.request, key=entry.slot.key, slice=entry.slot.index)
        self._delivery.down(waiter.link, header, None)

