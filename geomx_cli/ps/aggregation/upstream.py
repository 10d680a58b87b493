"""The sending side of an exchange: contributions go up to the servers that own the slices, results come back.

A contribution is kept until its result arrives, so that it can be retransmitted. After a lost connection the server is
queried first: if it has the contribution, or even its result, the contribution is not sent again. The same query
follows a result that was damaged on the way. Servers use this towards the roots, workers towards their servers.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from geomx_cli.ps.aggregation.codec import received
from geomx_cli.ps.aggregation.compression import Compression
from geomx_cli.ps.net.lanes import Lane
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import Content, Rows, row_numbers
from geomx_cli.ps.net.wire import BadMessage, DamagedPayload, Form, Header, Kind, Reply

__all__ = ["OnResult", "Transmit", "UpstreamClient"]

MAX_REPEATS = 3
"""Repeats of one request because it or its result was damaged on the way."""

OnResult = Callable[[Header, Content], None]
Transmit = Callable[[Header], None]
OnPassed = Callable[[Header, memoryview | None], None]


@dataclass(slots=True)
class _Pending:
    """A request without a delivered result. `asked`: the server was asked whether it has the contribution, and
    has not answered. `repeats`: because of damage. `result`: received, but held until the
    results of earlier rounds arrive. `acked`: the last round of which all whose contributions it contains have the
    result, None for this process alone. on_passed: of another process's request, gets the result as it came. on_repeat:
    see UpstreamClient.send.
    """

    link: Link
    header: Header
    payload: memoryview | None
    on_result: OnResult
    asked: bool = False
    repeats: int = 0
    result: tuple[Header, Content] | None = None
    acked: int | None = None
    on_passed: OnPassed | None = None
    on_repeat: Callable[[], None] | None = None


class UpstreamClient:
    """Links to the servers above, by rank, and the requests pending there or at other receivers of contributions.
    `peers`: links to the local servers of other parties, by the party's index, or to other workers of the plane, by
    rank, if the delivery uses them.
    `compression` is this end of encoded exchanges. Used by the loop's thread only.
    """

    def __init__(self, compression: Compression | None = None) -> None:
        self.links: list[Link] = []
        self.peers: dict[int, Link] = {}
        self.compression = compression or Compression()
        self._serial = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._rounds: dict[tuple[int, int], dict[int, _Pending]] = {}  # by slice; rounds ascending

    def send(
        self, link: Link, header: Header, payload: memoryview | None, on_result: OnResult,
        transmit: Transmit | None = None, acked: int | None = None, on_repeat: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Send an EXCHANGE, PUSH or PULL. The payload must not change until `on_result` is called with the
        RESULT and its content, which is valid as long as it is held. transmit: sends it in another way than whole, with
        the header completed here; repeats are whole, and `on_repeat` is called before each. acked: see _Pending.
        """
        header.request = next(self._serial)
        pending = self._pending[header.request] = _Pending(
            link, header, payload, on_result, acked=acked, on_repeat=on_repeat
        )
        if header.kind == Kind.EXCHANGE:
            where = (header.key, header.slice)
            rounds = self._rounds.setdefault(where, {})
            header.codec = self.compression.spec
            last = next(reversed(rounds.values()), None)
            has = self.compression.has_reference(where)
            header.follows = has if last is None else last.header.reply != Reply.NONE
            rounds[header.round] = pending
        self._send(pending, transmit)

    def pass_on(self, link: Link, header: Header, payload: memoryview, on_passed: OnPassed) -> None:
        """Send the contribution of another process as it is, but for its number here; `on_passed` gets the RESULT and
        its payload as they come.
        """
        header.request = next(self._serial)
        pending = self._pending[header.request] = _Pending(link, header, payload, _none, on_passed=on_passed)
        self._send(pending)

    def on_result(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """Handle a RESULT. A duplicate is dropped; a result of another slice or round raises BadMessage. So does one
        that was damaged on the way, after it was requested again.
        """
        pending = self._pending.get(header.request)
        if pending.link is not link if pending is not None else not link.dialled:
            raise BadMessage("a result from a process that was not asked for it")
        if pending is not None:
            _check(pending.header, header)
            if pending.on_passed is not None:
                del self._pending[header.request]
                link.withdraw(pending.header)
                link.consumed(len(payload or b""))
                pending.on_passed(header, payload)
                return
        try:
            found = received(header, payload if payload is not None else memoryview(b""))
        except DamagedPayload:
            if pending is not None and pending.result is None and self._may_repeat(pending):
                self._retry(pending)
            raise
        if pending is not None and isinstance(found, Rows) and pending.header.kind == Kind.PULL:
            _check_numbers(pending, found)
        link.consumed(0 if payload is None else len(payload))
        if pending is None or pending.result is not None:
            return
        pending.result = header, found
        # Changes are relative to the previous result, so results are delivered in the order of rounds.
        if pending.header.kind == Kind.EXCHANGE and self.compression.changes:
            rounds = self._rounds[header.key, header.slice]
            while rounds and (first := next(iter(rounds.values()))).result is not None:
                self._finish(first)
        else:
            self._finish(pending)

    def _finish(self, pending: _Pending) -> None:
        """Remove a pending request and deliver its result."""
        assert pending.result is not None
        (header, found), asked = pending.result, pending.header
        where = (asked.key, asked.slice)
        if header.form == Form.CHANGE and not self.compression.has_reference(where):
            pending.result = None
            raise BadMessage("a result that is a change to one of which only rows are here")
        del self._pending[asked.request]
        if asked.kind == Kind.EXCHANGE:
            pending.link.withdraw(asked)  # another process may have brought the contribution meanwhile
            del self._rounds[where][asked.round]
        # An initial value may arrive after the first round's result, if that has the higher priority.
        initial = asked.kind == Kind.PULL and not asked.round and not header.value
        if asked.kind == Kind.EXCHANGE or (initial and not self.compression.has_reference(where)):
            found = self.compression.take(where, found, asked.dtype, header.form)
        pending.on_result(header, found)

    def repeat(self, link: Link, lane: Lane) -> None:
        """Request again every result that is pending at this peer and may have been lost on this lane.

        A contribution with a payload and its result both use the tensors lane, unless the sender wants no value. So if
        only the control lane was replaced, as happens on slow and congested paths, only queries about contributions
        are repeated.
        """
        for pending in list(self._pending.values()):
            if pending.link is not link or link.queues(pending.header):
                continue
            contributes = pending.header.kind == Kind.EXCHANGE and pending.payload is not None
            if not contributes or pending.asked or lane == "tensors" or pending.header.reply != Reply.FULL:
                self._retry(pending)

    def again(self, link: Link, request: int, *, damaged: bool = False) -> None:
        """The peer lacks this contribution, or it was damaged: send it with its payload."""
        pending = self._pending.get(request)
        if pending is None or pending.link is not link:
            return
        if pending.asked or (damaged and self._may_repeat(pending)):
            pending.asked = False
            self._send(pending)

    def awaits(self, link: Link, request: int) -> bool:
        """Whether the result of this request is pending at this peer."""
        return request in self._pending and self._pending[request].link is link

    def redirect(self, request: int, link: Link) -> None:
        """Request the result elsewhere: ask this peer whether it has the contribution, perhaps with others."""
        pending = self._pending.get(request)
        if pending is not None and pending.result is None:
            pending.link = link
            self._retry(pending)

    def replace(self, request: int, header: Header, payload: memoryview) -> None:
        """Send this contribution instead of a larger one that contains it, and that the server has refused. It does not
        wait for credit: the server may have asked for it already, and had memory for the other.
        """
        pending = self._pending.get(request)
        if pending is not None and pending.result is None:
            was = pending.header
            pending.link.withdraw(was)
            header.request, header.codec, header.follows = was.request, was.codec, was.follows
            pending.header, pending.payload, pending.acked, pending.asked = header, payload, None, False
            self._send(pending)
            pending.link.want(header.key, header.slice, header.round)

    def _retry(self, pending: _Pending) -> None:
        """Request a result again; a contribution is not sent with its payload unless the peer then asks for it."""
        pending.asked = pending.header.kind == Kind.EXCHANGE and pending.payload is not None
        self._send(pending)

    @staticmethod
    def _may_repeat(pending: _Pending) -> bool:
        """Whether there was not too much damage; counts this one."""
        pending.repeats += 1
        return pending.repeats <= MAX_REPEATS

    def _send(self, pending: _Pending, transmit: Transmit | None = None) -> None:
        header = pending.header
        if header.kind == Kind.EXCHANGE and pending.on_passed is None:
            header.acked = next(iter(self._rounds[header.key, header.slice])) - 1
            if pending.acked is not None:
                header.acked = min(header.acked, pending.acked)
        if transmit is not None:
            transmit(header)
            return
        if pending.on_repeat is not None and not pending.asked:
            pending.on_repeat()
        pending.link.send(header, None if pending.asked else pending.payload)

    @property
    def waiting(self) -> int:
        """The number of outstanding results."""
        return len(self._pending)


def _none(header: Header, found: Content) -> None:
    """Nobody here waits for this result."""


def _check(asked: Header, result: Header) -> None:
    """Raise BadMessage if a result does not match its request."""
    round_ = asked.round if asked.kind == Kind.EXCHANGE else 0
    length = 0 if asked.kind == Kind.PUSH else asked.length
    wanted = (asked.key, asked.slice, round_, length)
    found = (result.key, result.slice, result.round, result.length)
    same = (result.dtype, result.row, result.size) == (asked.dtype, asked.row, asked.size)
    if found != wanted or (length and (not same or result.wide)):
        raise BadMessage(f"a result of (key, slice, round, length) {found} where {wanted} was asked for")
    of_rows = asked.form == Form.ROWS if asked.kind == Kind.PULL else asked.reply != Reply.FULL
    if result.form == Form.ROWS and not of_rows:
        raise BadMessage("a result of rows where all elements were asked for")
    if result.form in (Form.ENCODED, Form.CHANGE) and result.codec != asked.codec:
        raise BadMessage(f"a result encoded as {result.codec!r} where {asked.codec!r} was asked for")
    if result.form == Form.CHANGE and not asked.follows:
        raise BadMessage("a result that is a change to one that is not here")


def _check_numbers(asked: _Pending, found: Rows) -> None:
    """Raise BadMessage if the rows differ from those requested."""
    wanted = row_numbers(asked.header, asked.payload)
    if wanted is None or not np.array_equal(found.numbers, wanted):
        raise BadMessage(f"{len(found)} rows where others were asked for")
