"""The sending side of an exchange: it sends contributions to the servers that own the slices, and receives results.

A contribution is kept until its result arrives, so that it can be retransmitted. After a lost connection the sender
first queries the server. If the server has the contribution, or even its result, the contribution is not sent again.
The sender makes the same query if a result was damaged on the way. Servers use this module towards the roots, and
workers towards their servers.

A repeat has the number of its request, and servers recognise contributions by round and rank. So a contribution counts
once, and its result is delivered once, however often and by which way the contribution is sent.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from geomx_cli.ps.aggregation.codec import received
from geomx_cli.ps.net.lanes import Lane
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import Content, Rows, row_numbers
from geomx_cli.ps.net.wire import BadMessage, DamagedPayload, Form, Header, Kind, Reply, number_base

__all__ = ["OnResult", "Transmit", "UpstreamClient"]

MAX_REPEATS = 3
"""Limit on the repeats of one request because the request or its result was damaged on the way."""

OnResult = Callable[[Header, Content], None]
Transmit = Callable[[Header], None]
OnPassed = Callable[[Header, memoryview | None], None]


@dataclass(slots=True)
class _Pending:
    """A request without a result.

    asked: whether the server was asked if it has the contribution, and has not answered.
    repeats: how often damage made a repeat necessary.
    on_passed: for another process's request: receives the result as it arrived.
    on_repeat: see UpstreamClient.send.
    """

    link: Link
    header: Header
    payload: memoryview | None
    on_result: OnResult
    asked: bool = False
    repeats: int = 0
    on_passed: OnPassed | None = None
    on_repeat: Callable[[], None] | None = None


class UpstreamClient:
    """The requests pending at the servers above, or at other receivers of contributions. Used by the loop's thread
    only.

    incarnation: this process's incarnation.
    links: the links to the servers above, by rank.
    peers: the links to other receivers, if the delivery uses them: to the local servers of other parties, by the
        party's index, or to other workers of the plane, by rank.
    """

    def __init__(self, incarnation: int = 0) -> None:
        self.links: list[Link] = []
        self.peers: dict[int, Link] = {}
        self._serial = itertools.count(number_base(incarnation) + 1)
        self._pending: dict[int, _Pending] = {}

    def send(
        self, link: Link, header: Header, payload: memoryview | None, on_result: OnResult,
        transmit: Transmit | None = None, on_repeat: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Send an EXCHANGE, PUSH or PULL. `on_result` receives the RESULT and its content, which is valid as long as it
        is held. The payload must not change until then.

        transmit: sends the payload in several messages, with the header that has the request number. A repeat is sent
            in one message.
        on_repeat: called with the payload before each repeat.
        """
        header.request = next(self._serial)
        pending = _Pending(link, header, payload, on_result, on_repeat=on_repeat)
        self._pending[header.request] = pending
        self._send(pending, transmit)

    def pass_on(self, link: Link, header: Header, payload: memoryview, on_passed: OnPassed) -> None:
        """Send the contribution of another process. Only its request number changes. `on_passed` receives the RESULT
        and its payload as they arrive.
        """
        header.request = next(self._serial)
        pending = self._pending[header.request] = _Pending(link, header, payload, _none, on_passed=on_passed)
        self._send(pending)

    def on_result(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """Handle a RESULT. A duplicate is dropped. A result of another slice or round raises BadMessage. A result that
        was damaged on the way is requested again, and raises BadMessage too.
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
            if pending is not None and self._may_repeat(pending):
                self._retry(pending)
            raise
        if pending is not None and isinstance(found, Rows) and pending.header.kind == Kind.PULL:
            _check_numbers(pending, found)
        link.consumed(0 if payload is None else len(payload))
        if pending is None:
            return
        del self._pending[header.request]
        if pending.header.kind == Kind.EXCHANGE:
            link.withdraw(pending.header)  # another process may have brought the contribution meanwhile
        pending.on_result(header, found)

    def repeat(self, link: Link, lane: Lane) -> None:
        """Request again every result that is pending at this peer and may have been lost on this lane.

        A contribution with a payload, and its result, use the tensors lane, unless the sender wants no value. So if
        only the control lane was replaced, as happens on slow and congested paths, only queries about contributions
        are repeated.
        """
        # What still waits in the link's queue was not lost. The client queries the server about everything else first.
        # On slow paths, where connections break, most contributions have arrived, and sending megabytes again would
        # congest these paths further.
        for pending in list(self._pending.values()):
            if pending.link is not link or link.queues(pending.header):
                continue
            contributes = pending.header.kind == Kind.EXCHANGE and pending.payload is not None
            if not contributes or pending.asked or lane == "tensors" or pending.header.reply != Reply.FULL:
                self._retry(pending)

    def again(self, link: Link, request: int, *, damaged: bool = False) -> None:
        """The peer lacks this contribution, or received it damaged: send it with its payload."""
        # `asked` is cleared with the first answer, so a peer that repeats its answer does not get the payload twice.
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
        """Request the result elsewhere. Ask this peer whether it has the contribution, perhaps merged with others."""
        pending = self._pending.get(request)
        if pending is not None:
            pending.link = link
            self._retry(pending)

    def replace(self, request: int, header: Header, payload: memoryview) -> None:
        """Send this contribution instead of a larger one that contains it and that the server has refused. It does not
        wait for credit: the server may have requested it already, and had memory for the larger one.
        """
        pending = self._pending.get(request)
        if pending is not None:
            was = pending.header
            pending.link.withdraw(was)
            header.request = was.request
            pending.header, pending.payload, pending.asked = header, payload, False
            self._send(pending)
            pending.link.want(header.key, header.slice, header.round)

    def _retry(self, pending: _Pending) -> None:
        """Request a result again. The payload of a contribution is sent only if the peer then requests it."""
        pending.asked = pending.header.kind == Kind.EXCHANGE and pending.payload is not None
        self._send(pending)

    @staticmethod
    def _may_repeat(pending: _Pending) -> bool:
        """Count one more damage. Returns whether the request may be repeated."""
        pending.repeats += 1
        return pending.repeats <= MAX_REPEATS

    def _send(self, pending: _Pending, transmit: Transmit | None = None) -> None:
        if transmit is not None:
            transmit(pending.header)
            return
        if pending.on_repeat is not None and not pending.asked:
            pending.on_repeat()
        pending.link.send(pending.header, None if pending.asked else pending.payload)

    @property
    def waiting(self) -> int:
        """The number of outstanding results."""
        return len(self._pending)


def _none(header: Header, found: Content) -> None:
    """No code in this process waits for this result."""


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
    if result.missed_to and (asked.kind != Kind.EXCHANGE or result.form != Form.ROWS or result.rows):
        raise BadMessage("a value of a round that was over without this process")
    if result.form == Form.ROWS and not of_rows and not result.missed_to:
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
