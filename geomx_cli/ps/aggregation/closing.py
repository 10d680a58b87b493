"""The results of closed rounds, and the answers to the members of a round.

A root updates the value (Updater). At a local server the algorithm decides, and the server exchanges the sum with the
root (Forwarder). Both send the result to all members that wait for it (ResultSender).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from geomx_cli.ps.aggregation.algorithm import Aggregate, Delivery, PushUp, RowAlgorithm
from geomx_cli.ps.aggregation.compression import Compression, Decoded
from geomx_cli.ps.aggregation.optimizer_history import OptimizerHistory
from geomx_cli.ps.aggregation.rounds import Accumulator, Cohort, Result, RoundState, View, Waiter, merge_hyper
from geomx_cli.ps.aggregation.slices import SliceState, SliceTable
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.cluster.members import CENTRAL
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import DTYPES, Content, Rows, as_payload, cast, form_of
from geomx_cli.ps.net.wire import BadMessage, Form, Header, Kind, Reply

__all__ = ["Forwarder", "ResultSender", "Updater", "plane_of"]

MAX_WARNED = 1024
"""Warnings of ignored hyper-parameters."""
_Encode = Callable[[Compression, Array], Decoded]


class Updater:
    """Gives closed rounds their results at a root, by its algorithm and optimizer. Used by the loop's thread only.

    compression: this end of encoded exchanges with the parties.
    warn: receives a warning, once for each sender and name, about hyper-parameters that are ignored.
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
        before = entry.version
        new = self._new_value(entry, cohort, accumulator, total)
        if isinstance(new, Rows):
            entry.write(new)
            if cohort.changed is None:
                cohort.changed = Rows(new.numbers, cast(new.values, entry.dtype))
            entry.version += 1
        elif new is not None and new is not entry.value:
            entry.value = cast(new, entry.dtype)
            entry.version += 1
        if entry.version != before:  # if all abstained, other cohorts' rounds may have made the value newer
            cohort.version = entry.version

    def _new_value(
        self, entry: SliceState, cohort: Cohort, accumulator: Accumulator, total: Content
    ) -> Content | None:
        """The new value, or its changed rows, or None if the value does not change."""
        algorithm = entry.algorithm

        def ignored(name: str, why: str) -> None:
            assert cohort.round is not None
            waiter = cohort.round.waiter_of(accumulator.set_by.get(name, -1))
            who = "a member" if waiter is None else waiter.link.name
            if len(self._warned) < MAX_WARNED and (who, name) not in self._warned:
                self._warned.add((who, name))
                self._warn(f"a contribution of {who} {why}; this is ignored")

        optimizer = None
        if self._table.trains(entry):
            optimizer = self._history.choose(entry, cohort.closed, accumulator.hyper, ignored)
        cohort.is_sum = optimizer is None and not algorithm.starts_from_value
        if not cohort.is_sum:
            self._compression.contributed(entry.in_round(cohort.closed), total)
        if not isinstance(total, Rows):
            aggregate = Aggregate(total, accumulator.weight, cohort.member)
            return algorithm.aggregate_global(entry, aggregate, optimizer)
        assert isinstance(algorithm, RowAlgorithm)
        new = algorithm.rows_at_root(entry, total, accumulator.weight, cohort.member, optimizer)
        if new is None and self._compression.changes:
            return None  # sent as any other result: members keep the value as the codec has encoded it
        if cohort.is_sum and isinstance(new, Rows):
            new = cohort.cleared(new)
        # In an asynchronous job other parties have changed other rows meanwhile, so these are not the whole change.
        if new is None or (isinstance(new, Rows) and self._table.asynchronous):
            cohort.changed = Rows.none(entry.row, DTYPES[entry.dtype])
        return new


class Forwarder:
    """Gives closed rounds their results at a local server.

    compression: this end of encoded exchanges with the roots.
    own_rank: returns the rank under which sums are sent, or None to send them under the ranks that they contain.
    on_result: called when the value has the root's result of a round.
    Used by the loop's thread only.
    """

    def __init__(
        self,
        table: SliceTable,
        delivery: Delivery,
        compression: Compression,
        own_rank: Callable[[], int] | None,
        on_result: Callable[[SliceState, Cohort], None],
    ) -> None:
        self._table = table
        self._delivery = delivery
        self._compression = compression
        self._own_rank = own_rank
        self._on_result = on_result

    def decide(self, entry: SliceState, cohort: Cohort, accumulator: Accumulator, total: Content) -> bool:
        """Let the algorithm decide on the sum of a closed round. Returns whether the value is now the round's result.
        If it is not, the sum was sent to the root. Sums of rows are always sent to the root.
        """
        if isinstance(total, Rows):
            return self._exchange(entry, cohort, accumulator, total, accumulator.weight)
        aggregate = Aggregate(total, accumulator.weight, cohort.member)
        decision = entry.algorithm.aggregate_local(entry, aggregate)
        if isinstance(decision, PushUp):
            return self._exchange(entry, cohort, accumulator, decision.array, decision.weight)
        entry.value, cohort.is_sum = cast(decision.array, entry.dtype), False
        merge_hyper(entry.hyper, accumulator.hyper)
        return True

    def _exchange(
        self, entry: SliceState, cohort: Cohort, accumulator: Accumulator, total: Content, weight: float
    ) -> bool:
        """Send the sum to the root. Returns True if the round was over at the root without this party."""
        self._table.waits_no_more(entry, cohort)
        entry.forwarded += 1
        hyper = merge_hyper(entry.hyper, accumulator.hyper)  # includes the changes of rounds that were not forwarded
        if entry.forwarded <= entry.missed_to:
            accumulator.ranks, accumulator.weight = set(), 0.0
            return True
        entry.hyper = {}
        payload, about = self._compression.sum(entry.in_round(entry.forwarded), total) if weight else (None, {})
        header = Header(
            kind=Kind.EXCHANGE, key=entry.key, slice=entry.index, root=entry.root, offset=entry.offset,
            length=entry.length, dtype=entry.dtype, row=entry.row, size=entry.size, shard=entry.shard,
            round=entry.forwarded,
            contributors=tuple(sorted(accumulator.ranks)) if self._own_rank is None else (self._own_rank(),),
            weight=weight, reply=self._reply(entry, cohort), codec=self._compression.spec,
            follows=self._compression.has_reference(entry),
            priority=accumulator.priority, hyper=hyper, **about,
        )  # fmt: skip

        def on_result(result: Header, found: Content) -> None:
            self._table.asynchronous = result.asynchronous
            accumulator.ranks = set(result.contributors)
            accumulator.weight = result.weight
            entry.missed_to = result.missed_to
            if result.missed_to:
                entry.hyper = merge_hyper(hyper, entry.hyper)
                self._compression.forget_received(entry)
                self._on_result(entry, cohort)
                return
            entry.version, cohort.is_sum = result.value, result.is_sum
            self._apply(entry, cohort, self._compression.value_of(entry, found, entry.dtype, result.form))
            self._on_result(entry, cohort)

        self._delivery.up(entry.root, header, payload, on_result)
        return False

    def _reply(self, entry: SliceState, cohort: Cohort) -> Reply:
        """The part of the round's result that keeps the value complete and answers the round's members."""
        assert cohort.round is not None
        replies = {waiter.reply for waiter in cohort.round.waiting()}
        may_be_asynchronous = self._table.asynchronous or not self._table.last_round
        if not self._table.takes_rows or entry.missed_to or (Reply.FULL in replies and may_be_asynchronous):
            return Reply.FULL
        if self._table.asynchronous:
            return Reply.NONE
        return Reply.FULL if entry.value is None else Reply.CHANGED

    def _apply(self, entry: SliceState, cohort: Cohort, found: Content) -> None:
        """Apply the root's result of a round: the whole value, or the rows that the round changed."""
        if not isinstance(found, Rows):
            entry.value = cast(entry.algorithm.on_global(entry, found), entry.dtype)
            return
        cohort.changed = cohort.cleared(found) if cohort.is_sum else found
        if self._table.asynchronous:
            entry.value = None  # only the root has the rows that other parties changed
        elif entry.value is not None:
            entry.write(found)


class ResultSender:
    """Makes results from the values of slices, encodes each once for all receivers in a plane, and sends them.

    compressions: this end of encoded exchanges with the members, by plane. A global server with workers of its own has
        two. The first is for the parties, the second for these workers. They get a result in the form in which a
        party's local server would send it.
    history: for optimizers that compensate for delay. Such an optimizer learns from it which values each member of a
        root is about to receive, and will compute its next gradient from.
    Used by the loop's thread only.
    """

    def __init__(
        self, table: SliceTable, delivery: Delivery, compressions: Sequence[Compression], history: OptimizerHistory
    ) -> None:
        self._table = table
        self._delivery = delivery
        self._compressions = compressions
        self._history = history

    def result(self, entry: SliceState, cohort: Cohort, round_: RoundState) -> Result:
        """The result of the cohort's finished round, with all that its members request. The value includes the round,
        and may be newer.
        """
        if entry.missed_to:
            for compression in self._compressions:
                compression.forget(entry, cohort.member)  # a change would leave most of the value as it was
            entry.has_missed = True
            return Result((), entry.version, missed_to=entry.missed_to)
        accumulator, waiters = round_.accumulator, round_.waiting()
        changed, cohort.changed = cohort.changed, None
        enough = (Reply.NONE,) if changed is None else (Reply.NONE, Reply.CHANGED)
        unwanted = all(waiter.reply in enough for waiter in waiters)
        if changed is None and not self._table.asynchronous and any(each.spec for each in self._compressions):
            unwanted = False  # a pull then returns the encoded value, as other servers do
        array = None if unwanted else entry.share()
        if array is not None and cohort.version != entry.version:  # the value includes other cohorts' rounds
            self._given(entry, cohort.member)
            cohort.version = entry.version
        views: tuple[View, ...] = ()
        if changed is not None:
            for compression in self._compressions:
                compression.forget(entry, cohort.member)
        if array is not None:
            ranks = [waiter.rank for waiter in waiters]
            encode = _unencoded if changed is not None else self._encoder(entry, cohort)
            views = self._views(array, encode, central=max(ranks) >= CENTRAL)
            decoded = self._seen(views[plane_of(min(ranks))], array)
            if decoded is not None:
                self._given(entry, cohort.member, decoded=decoded)
        return Result(
            views, entry.version, tuple(sorted(accumulator.ranks))[:4096], accumulator.weight, changed, cohort.is_sum
        )  # fmt: skip

    def answer(self, entry: SliceState, waiter: Waiter, round_: int, result: Result) -> None:
        """Send a member its part of a result. Raises BadMessage if that part was not kept."""
        rows = result.rows(waiter.reply, entry.row)
        if rows is not None:
            self._send(entry, waiter, round_, result, as_payload(rows, entry.dtype), form_of(rows))
            return
        if not result.views:
            # Other members wanted no value. In a synchronous job it is still the value after this round.
            if self._table.asynchronous or entry.value is None:
                raise BadMessage(f"a repeat of round {round_} that asks for more than before")
            result = replace(result, views=self._views(entry.share(), _unencoded))
        view = result.views[plane_of(waiter.rank)]
        if view.encoded is not None and waiter.codec == view.codec:
            payload, about = view.encoded
            if about["form"] == Form.ENCODED or waiter.follows:
                self._send(entry, waiter, round_, result, payload, {"codec": view.codec, **about})
                return
        self._send(entry, waiter, round_, result, as_payload(view.array, entry.dtype), {})

    def answer_pull(self, entry: SliceState, waiter: Waiter) -> None:
        """Send the present value, or its requested rows, or the notice that the member has the value already. In a
        synchronous job the value is the last round's result, as the codec has encoded it.
        """
        member, version = self._table.member(waiter.rank), entry.version
        seen = () if self._table.asynchronous else entry.cohort(member).seen
        if waiter.numbers is not None:
            self._given(entry, member, waiter.numbers)
            value = seen[plane_of(waiter.rank)].array if seen else entry.value
            assert value is not None
            self.pass_on(entry, waiter, version, Rows.of(value, entry.row, waiter.numbers))
            return
        if seen:
            self.answer(entry, waiter, 0, Result(seen, version))
            return
        array = entry.share()
        views = self._newest(entry, array) if waiter.newest else self._views(array, _unencoded)
        self._given(entry, member, decoded=self._seen(views[plane_of(waiter.rank)], array))
        self.answer(entry, waiter, 0, Result(views, version))

    def pass_on(self, entry: SliceState, waiter: Waiter, version: int, found: Content) -> None:
        """Answer a pull with this content, which is newer than the results of rounds."""
        if isinstance(found, Rows):
            self._send(entry, waiter, 0, Result((), version), as_payload(found, entry.dtype), form_of(found))
        else:
            self.answer(entry, waiter, 0, Result(self._newest(entry, found), version))

    def answer_missed(self, entry: SliceState, waiter: Waiter, round_: int, missed_to: int) -> None:
        """Tell a member that this round was over without it, as are the rounds up to `missed_to`."""
        self.answer(entry, waiter, round_, Result((), entry.version, missed_to=missed_to))

    def acknowledge(self, link: Link, push: Header) -> None:
        """Answer the push or offer of an initial value."""
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
        """The value as members decode it, for optimizers that compensate for delay. None if the codec changes nothing.
        """
        return None if not self._table.asynchronous or view.array is value else view.array

    def _given(
        self, entry: SliceState, member: int, numbers: Array | None = None, decoded: Array | None = None
    ) -> None:
        """Tell the optimizer that a member is about to receive the root's newest value, or these rows of it. If a codec
        changes the value, the member receives the decoded value.
        """
        optimizer = self._history.present(entry.hyper) if self._table.asynchronous else None
        if optimizer is not None:
            assert entry.value is not None
            rows = None if numbers is None else (entry.row, numbers)
            optimizer.given(entry.optimizer_state, member, entry.value, rows, decoded)

    def _send(
        self, entry: SliceState, waiter: Waiter, round_: int, result: Result, payload: memoryview | None,
        about: dict[str, Any],
    ) -> None:  # fmt: skip
        header = Header(
            kind=Kind.RESULT, request=waiter.request, key=entry.key, slice=entry.index, offset=entry.offset,
            length=entry.length, dtype=entry.dtype, row=entry.row, size=entry.size, round=round_, value=result.version,
            contributors=result.contributors, weight=result.weight, asynchronous=self._table.asynchronous,
            priority=waiter.priority, is_sum=result.is_sum, missed_to=result.missed_to, **about,
        )  # fmt: skip
        self._delivery.down(waiter.link, header, payload)


def _unencoded(_: Compression, array: Array) -> tuple[Array, None]:
    return array, None


def plane_of(rank: int) -> int:
    """The index of a member's compression and view: the last for central workers, otherwise the first."""
    return -1 if rank >= CENTRAL else 0
