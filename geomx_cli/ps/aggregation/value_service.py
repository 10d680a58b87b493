"""The values of slices outside rounds: initial values (PUSH) and pulls."""

from collections import Counter
from collections.abc import Callable

from geomx_cli.ps.aggregation.result_sender import ResultSender
from geomx_cli.ps.aggregation.slice_state import SliceState, Waiter
from geomx_cli.ps.aggregation.slice_table import SliceTable
from geomx_cli.ps.aggregation.upstream import OnResult, UpstreamClient
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import Content, row_numbers, view
from geomx_cli.ps.net.rows import Rows
from geomx_cli.ps.net.wire import BadMessage, Header, Kind

__all__ = ["MAX_PULLS", "ValueService"]

MAX_PULLS = 4096
"""Pulls of one slice by one member that may wait for its value."""
MAX_UNREAD, MAX_COPIES = 256 * 2**20, 16
"""What one member may pull without reading it: bytes, or copies of all values of this server if that is more."""


class ValueService:
    """Takes initial values and answers pulls. At a local server the roots have the initial values; it fetches those
    that it needs.

    upstream: None at a root. on_value: called when a slice may have got its initial value. Used by the loop's thread
    only.
    """

    def __init__(
        self,
        table: SliceTable,
        upstream: UpstreamClient | None,
        sender: ResultSender,
        on_value: Callable[[SliceState], None],
    ) -> None:
        self._table = table
        self._upstream = upstream
        self._sender = sender
        self._on_value = on_value
        self._due: Counter[Link] = Counter()  # bytes of values that members wait for

    def on_push(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """Handle an initial value: the first one wins. A local server forwards it to the root."""
        entry, array = self._table.entry(header), view(header, payload)
        if self._upstream is not None:
            self._send_up(entry, header, payload, lambda _, __: self._sender.acknowledge(link, header))
        else:
            if entry.slot.value is None:
                entry.slot.value = array.copy()
                entry.hyper.update(header.hyper)
                self.answer_pulls(entry)
                self._on_value(entry)
            self._sender.acknowledge(link, header)
        link.consumed(array.nbytes)

    def on_pull(self, link: Link, header: Header, rank: int, payload: memoryview | None = None) -> None:
        """Answer with the current value or the requested rows of it. Without a value, queue the pull, and fetch the
        value from the root at a local server.

        In an asynchronous job a member that has started to push wants the newest value, so its pull goes to the root.
        """
        entry, numbers = self._table.entry(header), row_numbers(header, payload)
        newest = self._table.asynchronous and header.round > 0
        waiter = Waiter(link, rank, header.request, header.priority, codec=header.codec, newest=newest, numbers=numbers)
        own = entry.pulls.get(link, {})
        if len(own) >= MAX_PULLS and header.request not in own:
            raise BadMessage(f"more than {MAX_PULLS} pulls of a slice without a value")
        size = entry.bytes(None if numbers is None else len(numbers))
        most = max(MAX_UNREAD, MAX_COPIES * self._table.bytes)
        if header.request not in own and link.unread + self._due[link] + size > most:
            raise BadMessage(f"a pull beyond {most} bytes of pulled values that {link.name} has not read")
        link.consumed(0 if payload is None else len(payload))
        if header.request in own:
            return
        if self._upstream is not None and header.round:

            def pass_on(above: Header, found: Content) -> None:
                self._due[link] -= size
                self._sender.pass_on(entry, waiter, above.value, found)

            self._due[link] += size
            self._send_up(entry, header, payload, pass_on)  # the root's value; this server's own is unchanged
        elif entry.slot.value is not None:
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
        """At a local server: request the value from the root, once. The root answers as soon as it has one."""
        if self._upstream is None or entry.fetching:
            return

        def fetched(result: Header, found: Content) -> None:
            entry.fetching, self._table.asynchronous = False, result.asynchronous
            if entry.slot.value is None and not isinstance(found, Rows):
                entry.slot.value, entry.slot.version = found, result.value
            self.answer_pulls(entry)
            self._on_value(entry)

        entry.fetching = True
        self._send_up(entry, Header(kind=Kind.PULL, priority=priority), None, fetched)

    def _send_up(self, entry: SliceState, asked: Header, payload: memoryview | None, on_result: OnResult) -> None:
        """Send a PUSH or PULL as `asked` to the root of the slice."""
        assert self._upstream is not None
        header = Header(
            kind=asked.kind, key=entry.slot.key, slice=entry.slot.index, root=entry.root, offset=entry.offset,
            length=entry.length, dtype=entry.dtype, row=entry.row, size=entry.size, round=asked.round,
            priority=asked.priority, form=asked.form, rows=asked.rows,
            codec=self._upstream.compression.spec if asked.round else "",
        )  # fmt: skip
        self._upstream.send(self._upstream.links[entry.root], header, payload, on_result)
