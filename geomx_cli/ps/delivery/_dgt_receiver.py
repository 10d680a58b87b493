"""Receives contributions in parts and datagrams, puts them together, and adds late blocks to later ones (DGT)."""

import contextlib
import itertools
import os
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from geomx_cli.ps.aggregation.codec import exact_dtype
from geomx_cli.ps.aggregation.delivery_interface import ContributionInbox
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.delivery._dgt_blocks import Assembly, Fragment, as_contribution, decode_fragment
from geomx_cli.ps.net.addresses import split
from geomx_cli.ps.net.datagrams import MAX_CHANNELS, SALT, Opener, ReceiverSocket, session_key, session_of
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import view
from geomx_cli.ps.net.wire import MAX_ROUNDS_AHEAD, BadMessage, Form, Header, Kind

__all__ = ["DatagramReceiver", "Grace", "PartReceiver"]

MAX_OPEN = 4
"""Rounds of one slice whose parts one peer may send at a time."""
MAX_EARLY, LEAST_EARLY = 16 * 2**20, 512
"""Bytes of one peer's datagrams that may wait for the first part of their contribution, and what each takes beside its
content.
"""
LEAST_GRACE = 0.005
REPORT = 0.05
"""Seconds between reports to those that send."""
MAX_SENT = 65_536
"""Reports of one member, and contributions in them, that may wait for datagrams."""


@dataclass(slots=True)
class _Past:
    """A round that was handed in without all its blocks.

    dtype: in which they are sent.
    length: elements of the slice.
    code: of the slice's dtype.
    missing: bytes that were missing and have not come since.
    passed_at: when later datagrams had arrived, 0 if unknown.
    """

    dtype: "np.dtype[np.generic]"
    length: int
    code: int
    missing: int
    passed_at: float


class Grace:
    """How long to wait for datagrams once later ones have arrived on all channels, for paths that reorder them: twice
    as long as they were behind lately, at most `longest` seconds.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._behind = 0.0

    @property
    def seconds(self) -> float:
        """The present wait."""
        return min(self._longest, max(LEAST_GRACE, 2 * self._behind))

    def arrived(self, behind: float) -> None:
        """A datagram arrived so many seconds after that, or before (0)."""
        self._behind = max(behind, 0.9 * self._behind)


@dataclass(slots=True)
class _Member:
    """What is known of a member.

    grace: of its datagrams.
    slices: its contributions, by key and slice.
    early: bytes of its datagrams that wait for a first part.
    """

    link: Link
    grace: Grace
    slices: "dict[tuple[int, int], _Incoming]" = field(default_factory=dict)
    early: int = 0


@dataclass(slots=True)
class _Incoming:
    """One member's contributions to a slice.

    contributors: of its parts.
    handed_in: the last round that is complete, or waits no more.
    open: contributions of which a part has come, by round.
    early: fragments that arrived before the first part, by round.
    passed_at: when later datagrams than those of a round had arrived on all channels, by round.
    past: rounds of which blocks may still come.
    late: the sum of those that have, for the next round; None if there are none.
    """

    member: _Member
    contributors: tuple[int, ...] = ()
    handed_in: int = 0
    open: dict[int, Assembly] = field(default_factory=dict)
    early: dict[int, list[Fragment]] = field(default_factory=dict)
    passed_at: dict[int, float] = field(default_factory=dict)
    past: dict[int, _Past] = field(default_factory=dict)
    late: Array | None = None

    def may_come(self, round_: int) -> bool:
        """Whether this round is neither over nor too far ahead."""
        return self.handed_in < round_ <= self.handed_in + MAX_ROUNDS_AHEAD + 1


class PartReceiver:
    """Collects parts and datagrams, and hands in contributions that are complete or have waited long enough. Used by
    the loop's thread only.

    A contribution waits for datagrams at most `dgt_wait` seconds from its first part on, and no longer than `Grace`
    once later ones have arrived. Blocks that are missing then are zero; if they come later, they are added to the
    sender's next contribution to the slice.

    inbox: gets the contributions.
    bytes: of blocks, by name: those that arrived as datagrams, that were missing when a contribution was handed in, and
        of these that came late.
    """

    def __init__(self, node: Node, inbox: ContributionInbox) -> None:
        self.bytes = {"received": 0, "missing": 0, "late": 0}
        self._node = node
        self._inbox = inbox
        self._wait = node.settings.number("dgt_wait")
        self._members: dict[Link, _Member] = {}

    # Messages.

    def receive(self, link: Link, header: Header, payload: memoryview | None) -> bool:
        """Take a part, or a whole contribution to which late blocks are added. Any other message is left to the
        process. Raises BadMessage.
        """
        if header.kind == Kind.EXCHANGE and payload is not None:
            return self._take_whole(link, header, payload)
        if header.kind != Kind.PART:
            return False
        if payload is None:
            raise BadMessage("a part of a contribution without a payload")
        self._inbox.check(link, header)
        member = self._member(link)
        incoming = member.slices.setdefault((header.key, header.slice), _Incoming(member))
        incoming.contributors = header.contributors
        self._close_acked(incoming, header.acked)
        if not incoming.may_come(header.round):  # the whole contribution has come meanwhile
            link.consumed(len(payload))
        else:
            self._take_part(incoming, header, payload)
        return True

    def on_passed(self, link: Link, key: int, index: int, round_: int) -> None:
        """Datagrams that were sent after all of this contribution have arrived on all channels."""
        incoming = self._member(link).slices.get((key, index))
        if incoming is not None and incoming.may_come(round_):
            incoming.passed_at[round_] = time.monotonic()
            if round_ in incoming.open:
                self._set_timer(incoming, incoming.open[round_])
        elif incoming is not None and round_ in incoming.past:
            incoming.past[round_].passed_at = time.monotonic()

    def on_fragment(self, link: Link, fragment: Fragment) -> None:
        """A datagram has arrived. Raises BadMessage if it does not fit its contribution."""
        size = len(fragment.data)
        if not size:
            return
        self.bytes["received"] += size
        member, where = self._member(link), (fragment.key, fragment.part)
        incoming = member.slices.get(where) or _Incoming(member)
        assembly = incoming.open.get(fragment.round)
        if assembly is not None:
            assembly.place(fragment.offset, fragment.data)
            if assembly.complete:
                _observe(incoming, incoming.passed_at.get(fragment.round, 0.0))
                self._hand_in(incoming, assembly)
        elif incoming.may_come(fragment.round):
            if member.early + size <= MAX_EARLY:  # more are lost
                member.early += size + LEAST_EARLY
                incoming.early.setdefault(fragment.round, []).append(fragment)
                member.slices[where] = incoming
        elif fragment.round in incoming.past:
            self._add_late(incoming, incoming.past[fragment.round], fragment)

    # Internals.

    def _member(self, link: Link) -> _Member:
        if link not in self._members:
            self._members[link] = _Member(link, Grace(self._wait))
        return self._members[link]

    def _take_part(self, incoming: _Incoming, header: Header, payload: memoryview) -> None:
        link, assembly = incoming.member.link, incoming.open.get(header.round)
        if assembly is None:
            if len(incoming.open) >= MAX_OPEN:
                raise BadMessage(f"parts of more than {MAX_OPEN} rounds of one slice")
            assembly = incoming.open[header.round] = Assembly(header)
        try:
            is_first = assembly.take(header, payload, time.monotonic() + self._wait)
        except BadMessage:
            link.ask_again(header.request, damaged=True)
            raise
        if is_first and not assembly.by_datagram:
            # The important parts of all slices go before any other part, so they must not wait for those in the window.
            link.consumed(len(payload))
        else:
            assembly.credit += len(payload)
        for fragment in _remove_early(incoming, header.round) if is_first else ():
            with contextlib.suppress(BadMessage):
                assembly.place(fragment.offset, fragment.data)
        if assembly.complete:
            self._hand_in(incoming, assembly)
        elif is_first and assembly.by_datagram:
            self._set_timer(incoming, assembly)

    def _set_timer(self, incoming: _Incoming, assembly: Assembly) -> None:
        """Hand in the contribution when its wait is over."""
        if assembly.due is None:
            return
        if assembly.header.round in incoming.passed_at:
            assembly.due = min(assembly.due, time.monotonic() + incoming.member.grace.seconds)
        self._node.loop.call_at(assembly.due, partial(self._expire, incoming, assembly))

    def _expire(self, incoming: _Incoming, assembly: Assembly) -> None:
        round_ = assembly.header.round
        if incoming.open.get(round_) is assembly and assembly.due is not None and time.monotonic() >= assembly.due:
            if assembly.data_at:
                _observe(incoming, incoming.passed_at.get(round_, 0.0), assembly.data_at)
            self._hand_in(incoming, assembly)

    def _hand_in(self, incoming: _Incoming, assembly: Assembly) -> None:
        header, missing, round_ = assembly.header, assembly.missing, assembly.header.round
        del incoming.open[round_]
        passed_at = incoming.passed_at.get(round_, 0.0)
        _close(incoming, round_)
        if missing:
            self.bytes["missing"] += missing
            incoming.past[round_] = _Past(assembly.dtype, header.length, header.dtype, missing, passed_at)
        array = _with_late(incoming, assembly.data.view(assembly.dtype))
        self._inbox.hand_in(incoming.member.link, *as_contribution(header, array), assembly.credit)

    def _take_whole(self, link: Link, header: Header, payload: memoryview) -> bool:
        """Drop the parts of a contribution that has come whole. Returns whether it was handed in, with late blocks."""
        incoming = self._member(link).slices.get((header.key, header.slice))
        if incoming is None or header.contributors != incoming.contributors or not incoming.may_come(header.round):
            return False  # for others, it is no contribution of which parts may have come
        assembly = incoming.open.pop(header.round, None)
        if assembly is not None:
            link.consumed(assembly.credit)
        if incoming.late is None or header.form != Form.FULL:
            _close(incoming, header.round)
            return False
        self._inbox.check(link, header)
        array = _with_late(incoming, view(header, payload))
        _close(incoming, header.round)
        self._inbox.hand_in(link, *as_contribution(header, array), len(payload))
        return True

    @staticmethod
    def _close_acked(incoming: _Incoming, acked: int) -> None:
        """The sender has the results of rounds up to this one: another process may have brought the contributions."""
        _close(incoming, acked)
        for number in [number for number in incoming.open if number <= acked]:
            incoming.member.link.consumed(incoming.open.pop(number).credit)

    def _add_late(self, incoming: _Incoming, past: _Past, fragment: Fragment) -> None:
        size, dtype = len(fragment.data), past.dtype
        start, count = fragment.offset // dtype.itemsize, size // dtype.itemsize
        aligned = fragment.offset % dtype.itemsize == size % dtype.itemsize == 0
        if not aligned or start + count > past.length or size > past.missing:
            raise BadMessage("a late datagram that does not fit its contribution")
        _observe(incoming, past.passed_at)
        past.missing -= size
        if not past.missing:
            del incoming.past[fragment.round]
        self.bytes["late"] += size
        if incoming.late is None:
            incoming.late = np.zeros(past.length, exact_dtype(past.code))
        incoming.late[start : start + count] += np.frombuffer(fragment.data, dtype)


def _close(incoming: _Incoming, round_: int) -> None:
    """No part of this round, or of one before, is needed any more."""
    incoming.handed_in = max(incoming.handed_in, round_)
    for number in [number for number in incoming.early if number <= round_]:
        _remove_early(incoming, number)
    for number in [number for number in incoming.passed_at if number <= round_]:
        del incoming.passed_at[number]
    for number in [number for number in incoming.past if number < round_ - MAX_ROUNDS_AHEAD]:
        del incoming.past[number]


def _remove_early(incoming: _Incoming, round_: int) -> list[Fragment]:
    found = incoming.early.pop(round_, [])
    incoming.member.early -= sum(len(fragment.data) + LEAST_EARLY for fragment in found)
    return found


def _with_late(incoming: _Incoming, array: Array) -> Array:
    """The elements of a contribution with the late blocks, which are used up."""
    late, incoming.late = incoming.late, None
    return array if late is None else array.astype(late.dtype, copy=False) + late


def _observe(incoming: _Incoming, passed_at: float, arrived_at: float = 0.0) -> None:
    """A datagram arrived, now by default; later ones had arrived at `passed_at`, 0 if they had not."""
    behind = (arrived_at or time.monotonic()) - passed_at if passed_at else 0.0
    incoming.member.grace.arrived(max(0.0, behind))


@dataclass(slots=True)
class _Session:
    """The datagrams of one member.

    received: bytes so far.
    reported: bytes of them that the member knows of.
    longest: bytes of the longest datagram since then.
    last: when the last one arrived, time.monotonic seconds.
    newest: the highest counter of each channel.
    sent: contributions of which all blocks have been sent, and counters of later datagrams, in order.
    waiting: reports and contributions in `sent`.
    """

    link: Link
    opener: Opener
    received: int = 0
    reported: int = 0
    longest: int = 0
    last: float = field(default_factory=time.monotonic)
    newest: list[int] = field(default_factory=lambda: [-1] * MAX_CHANNELS)
    sent: deque[tuple[list[int], list[tuple[int, int, int]]]] = field(default_factory=deque)
    waiting: int = 0


class DatagramReceiver:
    """Listens at the address and port number of the process's TCP endpoint or, if it has none, at a port of loopback.
    Used by the loop's thread only. Raises InvalidSettings if the port is in use.

    parts: gets the authentic fragments.
    """

    def __init__(self, node: Node, parts: PartReceiver) -> None:
        self._node = node
        self._parts = parts
        endpoint = next((end for end in node.listens if end.startswith("tcp:")), "tcp://127.0.0.1:0")
        host, port = split(endpoint)
        self._socket = ReceiverSocket(host, int(port))
        self._sessions: dict[int, _Session] = {}
        self._numbers = itertools.count(int.from_bytes(os.urandom(3)))
        node.loop.watch(self._socket.fileno(), self._read)
        node.loop.every(REPORT, self._report)

    def open(self, request: Request) -> None:
        """Begin a session for the datagrams of a member; an earlier one of it ends. Raises BadMessage."""
        link, salt = request.link, request.body["salt"]
        if len(salt) != SALT:
            raise BadMessage(f"{len(salt)} bytes of salt")
        own = os.urandom(SALT)
        key = session_key(self._node.keys, link.name, self._node.process, salt + own, sends=False)
        self._sessions = {number: one for number, one in self._sessions.items() if one.link is not link}
        number = next(self._numbers)
        self._sessions[number] = _Session(link, Opener(key))
        request.answer({"session": number, "port": self._socket.port, "salt": own})

    def on_sent(self, request: Request) -> None:
        """A member has sent all blocks of some contributions. Raises BadMessage."""
        session = next((one for one in self._sessions.values() if one.link is request.link), None)
        counters = request.body.get("counters", [])
        sent = request.body.get("sent", [])
        if session is None or len(counters) != MAX_CHANNELS or session.waiting + 1 + len(sent) > MAX_SENT:
            raise BadMessage("a report on datagrams from a process that sends none, or too many")
        session.sent.append((counters, sent))
        session.waiting += 1 + len(sent)
        self._pass(session)

    def _read(self) -> None:
        for datagram in self._socket.read():
            try:
                session = self._sessions.get(session_of(datagram))
                if session is None:
                    raise BadMessage("a datagram of no member")
                self._take(session, len(datagram), *session.opener.open(datagram))
            except BadMessage as error:
                self._node.transport.count_refused(None, "datagram", str(error))

    def _take(self, session: _Session, size: int, channel: int, counter: int, content: bytes) -> None:
        link, wan = session.link, self._node.transport.wan

        def deliver() -> None:
            session.received += size
            session.longest = max(session.longest, size)
            session.last = time.monotonic()
            session.newest[channel] = max(session.newest[channel], counter)
            link.received += size
            try:
                self._parts.on_fragment(link, decode_fragment(content))
            except BadMessage as error:
                self._node.transport.count_refused(link, "datagram", str(error))
            self._pass(session)

        if wan is not None and link.wide_area:
            wan.receive(size, "tensors", link.name, deliver)
        else:
            deliver()

    def _pass(self, session: _Session) -> None:
        """Find the contributions after which newer datagrams have arrived on all channels that are in use."""
        while session.sent:
            counters, contributions = session.sent[0]
            if any(counter and newest < counter for counter, newest in zip(counters, session.newest, strict=True)):
                return
            session.sent.popleft()
            session.waiting -= 1 + len(contributions)
            for key, index, round_ in contributions:
                self._parts.on_passed(session.link, key, index, round_)

    def _report(self) -> None:
        """Tell members what has arrived."""
        for session in self._sessions.values():
            if session.received > session.reported:
                session.reported = session.received
                body = {"received": session.received, "at": session.last, "longest": session.longest}
                session.longest = 0
                session.link.control("datagrams", body)
