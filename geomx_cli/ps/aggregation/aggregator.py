"""The rounds of all slices at one server: collect contributions, close rounds in order, answer.

A member has one round of a slice in flight: it contributes to the next round when it has the result. In a synchronous
job all members complete a round together. The root of an asynchronous job completes each member's rounds separately.
The result of a closed round is computed in closing.py: by the Updater at a root, by the Forwarder at a local server.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from geomx_cli.ps.aggregation.algorithm import Delivery
from geomx_cli.ps.aggregation.closing import Forwarder, ResultSender, Updater, plane_of
from geomx_cli.ps.aggregation.codec import received
from geomx_cli.ps.aggregation.compression import Compression
from geomx_cli.ps.aggregation.optimizer_history import Hyper, OptimizerHistory
from geomx_cli.ps.aggregation.rounds import Accumulator, Cohort, Contribution, Overlap, RoundState, Waiter
from geomx_cli.ps.aggregation.slices import SliceState, SliceTable
from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.aggregation.value_service import ValueService
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import DTYPES, Content, Rows
from geomx_cli.ps.net.wire import MAX_HYPER, MAX_WORKER_WEIGHT, BadMessage, DamagedPayload, Form, Header
from geomx_cli.ps.optim.optimizers import Optimizer

__all__ = ["Aggregator"]

MAX_DAMAGED = 4096
"""Limit on one member's damaged contributions that a server requests again after a lost connection."""


class Aggregator:
    """Runs the rounds of all slices in `table`. Used by the loop's thread only.

    upstream: sends to the roots; None at a root.
    own_rank: see Forwarder.
    above: this end of encoded exchanges with the roots.
    below: this end of encoded exchanges with the members, see ResultSender. With () the aggregator accepts
        contributions in any codec, and sends results unencoded.
    warn: receives warnings for the user.
    commit: saves a slice. The aggregator calls it before a change of the slice leaves this process.
    on_arrival: at a root, see PartyLoss.
    has_missed: at a root: whether rounds may have closed without this member.
    share_factor: at a root, see ServerMembers.
    values: handles initial values and pulls.
    """

    def __init__(
        self,
        *,
        delivery: Delivery,
        upstream: UpstreamClient | None,
        own_rank: Callable[[], int] | None,
        table: SliceTable,
        above: Compression | None = None,
        below: Sequence[Compression] = (),
        warn: Callable[[str], None] = lambda _: None,
        commit: Callable[[SliceState], None] = lambda _: None,
        on_arrival: Callable[[int, SliceState, int, int], None] = lambda *_: None,
        has_missed: Callable[[int], bool] = lambda _: False,
        share_factor: Callable[[Collection[int]], float] = lambda _: 1.0,
    ) -> None:
        self.table = table
        self._on_arrival, self._has_missed, self._share_factor = on_arrival, has_missed, share_factor
        self._agreed, self._below = below, below or (Compression(),)
        self.history = OptimizerHistory()
        self._sender = ResultSender(table, delivery, self._below, self.history)
        above = above or Compression()
        self.values = ValueService(table, upstream, above, self._sender, self._advance, warn, commit)
        self._updater = Updater(table, self._below[0], self.history, warn)
        self._forwarder: Forwarder | None = None
        if upstream is not None:
            self._forwarder = Forwarder(table, delivery, above, own_rank, self._on_root_result)
        self._warn = warn
        self.commit = commit
        self._warned: set[str] = set()
        self._damaged: dict[Link, set[int]] = {}  # requests whose damaged contributions have not come again

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that was set last."""
        return self.history.newest

    def on_exchange(
        self, link: Link, header: Header, payload: memoryview | None, rank: int, credit: int | None = None
    ) -> None:
        """Handle a contribution from the member of this rank. The caller has checked that the member may send for the
        contributors that the header names.

        credit: bytes of the contribution's messages, if they differ from the payload's bytes.

        A duplicate gets the same answer as before. A member with weight 0 abstains: it sends no payload, and only
        receives the round's result. Any other contribution without a payload is a query after a lost connection: has
        the server received the contribution? If it has not, it asks the sender to send it again. If a payload was
        damaged on the way, the server requests it again, and raises BadMessage as for any other invalid payload. If
        some ranks of a merged contribution have arrived by another way, its sender has to send its own ("split").
        """
        entry, ranks, size = self.table.entry(header), header.contributors, credit
        if size is None:
            size = 0 if payload is None else len(payload)
        cohort = self._cohort(entry, header)
        asks = header.weight > 0 and payload is None
        if self._forwarder is not None and header.weight > MAX_WORKER_WEIGHT:
            raise BadMessage(f"weight {header.weight:g}, of a worker at most {MAX_WORKER_WEIGHT:g}")
        given = self._content(link, header, payload, rank) if header.weight and not asks else None
        if given is None and size:
            raise BadMessage("a contribution of weight 0 with a payload")
        waiter = Waiter(
            link, rank, header.request, header.priority, ranks, header.reply, header.codec, header.follows
        )
        self._on_arrival(rank, entry, header.round, cohort.finished)
        if header.round <= cohort.finished:
            if header.round == cohort.finished and cohort.result is not None:
                self._sender.answer(entry, waiter, header.round, cohort.result)
            elif entry.has_missed or self._has_missed(rank):  # else a late duplicate
                self._sender.answer_missed(entry, waiter, header.round, cohort.finished)
            link.consumed(size)
            return
        round_ = self.table.round(entry, cohort, header.priority, () if asks else ranks)
        self._check_waiters(entry, cohort, round_, waiter)
        if asks:
            round_.wait(waiter)  # even before the contribution is here: another process may bring it
            if cohort.deferred:  # restored: the round is closed, and waits for the first request
                self._advance(entry)
            elif not round_.accumulator.has(ranks):
                link.ask_again(header.request)
            return
        if len(round_.accumulator.hyper_names() | header.hyper.keys()) > MAX_HYPER:
            raise BadMessage(f"more than {MAX_HYPER} hyper-parameters in one round")
        contribution = Contribution(ranks, given, header.weight, header.hyper, partial(link.consumed, size), rank)
        try:
            added = header.round > cohort.closed and round_.accumulator.park(contribution)
        except Overlap:
            link.control("split", {"request": header.request})
            added, waiter.split = False, True
        if not added:
            link.consumed(size)
        round_.wait(waiter)
        self._advance(entry)

    def use(self, optimizer: Optimizer, by_key: Mapping[int, Hyper] | None = None) -> None:
        """Update values with this optimizer from now on, and discard the hyper-parameters that were set for an earlier
        one.

        by_key: hyper-parameters of single keys.
        """
        self.history.use(optimizer, by_key or {})
        for entry in self.table.entries.values():
            entry.hyper = {}
            entry.optimizer_state.clear()

    def switch_to_async(self) -> bool:
        """See SliceTable.switch_to_async."""
        if not self.table.switch_to_async():
            return False
        self.members_changed()
        return True

    def on_reconnect(self, link: Link) -> None:
        """A member's control lane has a new connection. Requests to send damaged contributions again, or to send the
        member's own contribution instead of a merged one, may be lost.
        """
        for request in self._damaged.get(link, ()):
            link.ask_again(request, damaged=True)
        for _, _, round_ in self.table.open_rounds():
            for waiter in round_.waiting():
                if waiter.link is link and waiter.split:
                    link.control("split", {"request": waiter.request})

    def forget_requests(self, link: Link) -> None:
        """The process at this link was restarted, so it asks for everything again."""
        self._damaged.pop(link, None)
        self.values.forget_requests(link)
        self.table.forget_requests(link)

    def members_changed(self) -> None:
        """Membership has changed: close the rounds that are complete now."""
        self.table.changed()
        for entry in self.table.entries.values():
            self._advance(entry)

    # Internals.

    def _content(self, link: Link, header: Header, payload: memoryview | None, rank: int) -> Content:
        expected = self._agreed[plane_of(rank)].spec if self._agreed else header.codec
        if header.form == Form.ENCODED and header.codec != expected:
            raise BadMessage(f"a contribution encoded as {header.codec!r} where {expected or 'none'!r} is in use")
        damaged = self._damaged.setdefault(link, set())
        try:
            found = received(header, payload)
        except DamagedPayload:
            if len(damaged) < MAX_DAMAGED:
                damaged.add(header.request)
            link.ask_again(header.request, damaged=True)
            raise
        damaged.discard(header.request)
        return found

    def _check_waiters(self, entry: SliceState, cohort: Cohort, round_: RoundState, waiter: Waiter) -> None:
        """Raise BadMessage if this member waits for the round with too many requests. Each contribution that it may
        bring has one request, and one more after a repeat by another way.
        """
        known = round_.waiters.get(waiter.rank, {})
        if len(known) < 2 or waiter.request in known:
            return
        if len(known) >= 2 * len(self.table.members(entry, cohort)):
            raise BadMessage(f"more than {len(known)} requests of one member for the result of one round")

    def _cohort(self, entry: SliceState, header: Header) -> Cohort:
        """The cohort to whose rounds this contribution belongs. Raises BadMessage if it belongs to no round."""
        ranks = header.contributors
        if not all(self.table.contributes(entry, rank) for rank in ranks):
            raise BadMessage(f"contributions of ranks {ranks} to a slice of shard {entry.shard}")
        cohort = entry.cohort(self.table.member(ranks[0]))
        if any(self.table.member(rank) != cohort.member for rank in ranks):
            raise BadMessage(f"contributions of ranks {ranks}, which go through rounds by themselves, in one")
        if not 0 < header.round <= cohort.finished + 1:
            raise BadMessage(f"round {header.round} while round {cohort.finished + 1} is open")
        return cohort

    def _advance(self, entry: SliceState) -> None:
        """Close this slice's complete rounds in order. Also answer rounds that the bound on staleness held back.
        """
        while self.table.required_contributors() is not None:
            if not any(self._advance_cohort(entry, cohort) for cohort in list(entry.cohorts.values())):
                return

    def _advance_cohort(self, entry: SliceState, cohort: Cohort) -> bool:
        """Close the cohort's next round, or answer the round that is held back. Returns False if it has to wait."""
        if not cohort.deferred:
            return self._close_next(entry, cohort)
        if cohort.round is None or not cohort.round.waiters:  # restored: no member has repeated its request yet
            return False
        if self.table.too_far_behind(entry, cohort):
            # The value includes the round already. Only the answer waits, for the cohorts that are too far behind.
            return False
        cohort.deferred = False
        self._finish(entry, cohort)
        return True

    def _close_next(self, entry: SliceState, cohort: Cohort) -> bool:
        if cohort.round is None or cohort.closed > cohort.finished or self._lacks_value(entry):
            return False
        accumulator = cohort.round.accumulator
        if not accumulator.merge(self.table.members(entry, cohort)) or not accumulator.ranks:
            return False
        cohort.closed += 1
        if accumulator.conflicts:
            self._report_conflicts(entry, accumulator)
        total, accumulator.total = accumulator.total, None
        if total is None:  # all members abstained
            total = Rows.none(entry.row, np.promote_types(DTYPES[entry.dtype], np.float32))
        by_rows = self.table.takes_rows and (not self.table.is_root or entry.value is not None)
        if isinstance(total, Rows) and not by_rows:
            total = total.dense(entry.length)
        if not entry.version and entry.value is not None:
            for compression in self._below:
                compression.starts_from(entry.in_round(cohort.closed), cohort.member, entry.value)
        if self._forwarder is None:
            factor = self._share_factor(accumulator.ranks)
            if factor != 1 and accumulator.weight and DTYPES[entry.dtype].kind == "f":
                total, accumulator.weight = _scaled(total, factor), accumulator.weight * factor
            self._updater.update(entry, cohort, accumulator, total)
            # A root answers in _advance_cohort: the answer may have to wait for cohorts that are too far behind.
            cohort.deferred = True
            if self.table.too_far_behind(entry, cohort):
                self.commit(entry)  # the value may leave the server by a pull, before the round's answer
        elif self._forwarder.decide(entry, cohort, accumulator, total):
            self._finish(entry, cohort)
        return True

    def _lacks_value(self, entry: SliceState) -> bool:
        """Whether the initial value is required and missing; a local server then fetches it."""
        optimizer = self.optimizer if self.table.trains(entry) else None
        if entry.value is not None or not (entry.algorithm.starts_from_value or optimizer is not None):
            return False
        self.values.fetch(entry)
        return True

    def _on_root_result(self, entry: SliceState, cohort: Cohort) -> None:
        """The value has the root's result of the closed round."""
        self._finish(entry, cohort)
        self._advance(entry)

    def _report_conflicts(self, entry: SliceState, accumulator: Accumulator) -> None:
        """Warn, once per name, if workers set a hyper-parameter to different values in one round."""
        for name in accumulator.conflicts.keys() - self._warned:
            self._warned.add(name)
            self._warn(
                f"workers set {name} to {accumulator.hyper[name]:g} and to {accumulator.conflicts[name]:g} in one round"
                f" of key {entry.key}: that of the lower rank holds; let all workers set the same"
            )

    def _finish(self, entry: SliceState, cohort: Cohort) -> None:
        """Answer all members that wait for the closed round; the value is its result or newer."""
        round_ = self.table.finish(entry, cohort)
        cohort.result = self._sender.result(entry, cohort, round_)
        # Commit before any answer: if this server is killed before the commit, no member has a result of this round.
        self.commit(entry)
        for waiter in round_.waiting():
            self._sender.answer(entry, waiter, cohort.finished, cohort.result)
        if entry.pulls and entry.value is not None:
            self.values.answer_pulls(entry)


def _scaled(total: Content, factor: float) -> Content:
    if isinstance(total, Rows):
        return replace(total, values=total.values * total.values.dtype.type(factor))
    scaled: Content = total * total.dtype.type(factor)
    return scaled
