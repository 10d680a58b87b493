"""The values of slices outside rounds: initial values (PUSH) and pulls.

Servers do not know which worker sets a slice: a front end uses one worker for each key, and not always the master. The
first PUSH counts. If a later PUSH has another value, the server warns.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from geomx_cli.ps.aggregation.closing import ResultSender
from geomx_cli.ps.aggregation.compression import Compression
from geomx_cli.ps.aggregation.rounds import SERIAL, Waiter
from geomx_cli.ps.aggregation.slices import SliceState, SliceTable
from geomx_cli.ps.aggregation.upstream import OnResult, UpstreamClient
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import Content, Rows, row_numbers, view
from geomx_cli.ps.net.wire import BadMessage, Header, Kind

__all__ = ["MAX_PULLS", "ValueService"]

MAX_PULLS = 4096
"""Limit on one member's pulls of one slice that wait for its value."""
MAX_UNREAD, MAX_COPIES = 256 * 2**20, 16
"""What one member may pull without reading it: this many bytes, or this many copies of all values of this server if
that is more. A local server may pull so much for each of its workers, because it forwards their pulls.
"""
MAX_PUSHED, MAX_PUSHES = 256 * 2**20, 2
"""What one member may push before a root acknowledges it: bytes, or copies of all values of this server."""


@dataclass(slots=True)
class _Outstanding:
    """The answers for which a member waits: bytes of pulled values, and requests and bytes of PUSHes that no root has
    acknowledged.
    """

    pulled: int = 0
    pushes: set[int] = field(default_factory=set)
    pushed: int = 0


class ValueService:
    """Takes initial values and answers pulls. The roots have the initial values. A local server fetches from them the
    values that it needs.

    upstream: sends to the roots; None at a root.
    compression: this end of encoded exchanges with the roots.
    on_value: called when a slice may have got its initial value.
    warn: receives warnings for the user.
    commit: see Aggregator.
    Used by the loop's thread only.
    """

    def __init__(
        self,
        table: SliceTable,
        upstream: UpstreamClient | None,
        compression: Compression,
        sender: ResultSender,
        on_value: Callable[[SliceState], None],
        warn: Callable[[str], None],
        commit: Callable[[SliceState], None],
    ) -> None:
        self._table = table
        self._upstream = upstream
        self._compression = compression
        self._sender = sender
        self._on_value = on_value
        self._outstanding: defaultdict[Link, _Outstanding] = defaultdict(_Outstanding)
        self._warn = warn
        self._commit = commit
        self._rivals: set[tuple[str, str]] = set()  # pairs of processes about which it has warned

    def on_push(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """Handle an initial value: the first one wins. A local server forwards it to the root."""
        entry = self._table.entry(header)
        array = view(header, payload)
        if self._upstream is not None:
            self._push_up(entry, link, header, payload, array)
        else:
            if entry.value is None:
                self._set(entry, array.copy(), link, header)
            else:
                self._compare(entry, link, entry.digest_of(array))
            self._sender.acknowledge(link, header)
        link.consumed(array.nbytes)

    def _push_up(
        self, entry: SliceState, link: Link, header: Header, payload: memoryview | None, array: Array
    ) -> None:
        outstanding = self._outstanding[link]
        if header.request in outstanding.pushes:
            return  # a repeat: the first PUSH's acknowledgement is still to come
        most = max(MAX_PUSHED, MAX_PUSHES * self._table.bytes)
        if outstanding.pushed + array.nbytes > most:
            raise BadMessage(f"a push beyond {most} bytes of pushed values that no global server has acknowledged")

        def acknowledged(_: Header, __: Content) -> None:
            outstanding.pushes.discard(header.request)
            outstanding.pushed -= array.nbytes
            self._sender.acknowledge(link, header)

        if entry.initial_from:
            self._compare(entry, link, entry.digest_of(array))
        else:
            entry.initial_from, entry.initial_digest = link.name, entry.digest_of(array)
        outstanding.pushes.add(header.request)
        outstanding.pushed += array.nbytes
        self._send_up(entry, header, payload, acknowledged)

    def _compare(self, entry: SliceState, link: Link, expected: bytes) -> None:
        """Warn about a PUSH unless its digest belongs to the first value or to the present value. Once the value has
        rounds, a root may no longer know the first value. Then it treats another value from the same process as a
        repeat.
        """
        repeats = bool(entry.version) and entry.initial_from == link.name
        if not repeats and not entry.was_given(expected):
            self._warn_of_rivals(entry, link)

    def _warn_of_rivals(self, entry: SliceState, link: Link) -> None:
        pair = (entry.initial_from, link.name)
        if pair in self._rivals:
            return
        self._rivals.add(pair)
        same = pair[0] == pair[1]
        by = f"twice by {link.name}, with different values" if same else f"by {pair[0]} and by {pair[1]}"
        self._warn(
            f"key number {entry.key}, of {entry.size} elements, was given an initial value {by}; the first one"
            " counts: initialise each key in one worker, or with the same value in all"
        )

    def _set(self, entry: SliceState, value: Array, link: Link, push: Header) -> None:
        entry.initial_from = link.name
        entry.value = value
        entry.hyper.update({name: number for name, number in push.hyper.items() if name != SERIAL})
        self._commit(entry)
        self.answer_pulls(entry)
        self._on_value(entry)

    def forget_requests(self, link: Link) -> None:
        """See Aggregator.forget_requests."""
        self._outstanding.pop(link, None)

    def on_pull(self, link: Link, header: Header, rank: int, payload: memoryview | None = None) -> None:
        """Answer with the current value, or with its requested rows. If there is no value, queue the pull. A local
        server then fetches the value from the root.

        In an asynchronous job a member that has started to push wants the newest value, so its pull goes to the root.
        """
        entry, numbers = self._table.entry(header), row_numbers(header, payload)
        newest = self._table.asynchronous and header.round > 0
        waiter = Waiter(
            link, rank, header.request, header.priority, codec=header.codec, newest=newest, numbers=numbers
        )  # fmt: skip
        own = entry.pulls.get(link, {})
        if len(own) >= MAX_PULLS and header.request not in own:
            raise BadMessage(f"more than {MAX_PULLS} pulls of a slice without a value")
        size = entry.size_in_bytes(None if numbers is None else len(numbers))
        most = max(MAX_UNREAD, MAX_COPIES * self._table.bytes) * max(1, int(link.hello.get("workers", 1)))
        outstanding = self._outstanding[link]
        if header.request not in own and link.unread + outstanding.pulled + size > most:
            raise BadMessage(f"a pull beyond {most} bytes of pulled values that {link.name} has not read")
        link.consumed(0 if payload is None else len(payload))
        if header.request in own:
            return
        if self._upstream is not None and header.round:

            def pass_on(above: Header, found: Content) -> None:
                outstanding.pulled -= size
                self._sender.pass_on(entry, waiter, above.value, found)

            outstanding.pulled += size
            self._send_up(entry, header, payload, pass_on)  # the root's value; this server's own is unchanged
        elif entry.value is not None:
            self._sender.answer_pull(entry, waiter)
        else:
            entry.pulls.setdefault(link, {})[header.request] = waiter
            self.fetch(entry, header.priority)

    def answer_pulls(self, entry: SliceState) -> None:
        """Answer the pulls that waited for the value."""
        pulls, entry.pulls = entry.pulls, {}
        for own in pulls.values():
            for waiter in own.values():
                self._sender.answer_pull(entry, waiter)

    def fetch(self, entry: SliceState, priority: int = 0) -> None:
        """At a local server: request the value from the root, once. The root answers as soon as it has the value."""
        if self._upstream is None or entry.fetching:
            return

        def fetched(result: Header, found: Content) -> None:
            entry.fetching, self._table.asynchronous = False, result.asynchronous
            found = self._compression.pulled(entry, result, found)
            if entry.value is None and not isinstance(found, Rows):
                entry.value, entry.version = found, result.value
            self.answer_pulls(entry)
            self._on_value(entry)

        entry.fetching = True
        self._send_up(entry, Header(kind=Kind.PULL, priority=priority), None, fetched)

    def _send_up(self, entry: SliceState, asked: Header, payload: memoryview | None, on_result: OnResult) -> None:
        """Send a PUSH or PULL as `asked` to the root of the slice."""
        assert self._upstream is not None
        header = Header(
            kind=asked.kind, key=entry.key, slice=entry.index, root=entry.root, offset=entry.offset,
            length=entry.length, dtype=entry.dtype, row=entry.row, size=entry.size, shard=entry.shard,
            round=asked.round, priority=asked.priority, form=asked.form, rows=asked.rows,
            codec=self._compression.spec if asked.round else "",
        )  # fmt: skip
        self._upstream.send(self._upstream.links[entry.root], header, payload, on_result)
