"""Assembles contributions from their parts and datagrams, and adds late blocks to later contributions (DGT)."""

import contextlib
import time
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from geomx_cli.ps.aggregation.algorithm import ContributionInbox
from geomx_cli.ps.aggregation.codec import exact_dtype
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.delivery._dgt_blocks import Assembly, Fragment, as_contribution
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import view
from geomx_cli.ps.net.wire import BadMessage, Form, Header, Kind

__all__ = ["Grace", "PartReceiver"]

MAX_MISSED = 64
"""Limit on the rounds of one slice that another process may have brought, until a round again arrives in parts."""
MAX_PAST = 64
"""Limit on the rounds of one slice of which late blocks may still arrive."""
MAX_EARLY, LEAST_EARLY = 16 * 2**20, 512
"""Limit on the bytes of one peer's datagrams that may wait for the first part of their contribution, and the bytes that
each takes in addition to its content.
"""
LEAST_GRACE = 0.005


@dataclass(slots=True)
class _Past:
    """A round that was handed in without all its blocks.

    dtype: the dtype in which blocks are sent.
    length: elements of the slice.
    code: code of the slice's dtype.
    missing: bytes that were missing and have not arrived since.
    passed_at: when later datagrams had arrived; 0 if unknown.
    """

    dtype: "np.dtype[np.generic]"
    length: int
    code: int
    missing: int
    passed_at: float


class Grace:
    """How long to wait for datagrams once later ones have arrived on all channels, because some paths reorder them. The
    wait is twice as long as datagrams recently were late, at most `longest` seconds.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._behind = 0.0

    @property
    def seconds(self) -> float:
        """The present wait."""
        return min(self._longest, max(LEAST_GRACE, 2 * self._behind))

    def arrived(self, behind: float) -> None:
        """A datagram arrived so many seconds after later datagrams had arrived on all channels, or before (0)."""
        self._behind = max(behind, 0.9 * self._behind)


@dataclass(slots=True)
class _Member:
    """The state of a member.

    grace: the wait for its late datagrams.
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
    handed_in: the last round that is complete, or no longer waits.
    open: contributions of which a part has arrived, by round.
    early: fragments that arrived before the first part, by round.
    passed_at: by round, when datagrams later than the round's had arrived on all channels.
    past: rounds of which blocks may still arrive.
    late: the sum of the late blocks that have arrived, for the next round; None if there are none.
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
        return self.handed_in < round_ <= self.handed_in + MAX_MISSED + 1


class PartReceiver:
    """Collects parts and datagrams, and hands in contributions that are complete or have waited long enough. Used by
    the loop's thread only.

    A contribution waits for datagrams at most `dgt_wait` seconds after its first part. Once later datagrams have
    arrived, it waits no longer than `Grace`. Blocks that are missing then are zero. If they arrive later, they are
    added to the sender's next contribution to the slice.

    inbox: receives the contributions.
    bytes: bytes of blocks, by name: blocks that arrived as datagrams, blocks that were missing when a contribution was
        handed in, and missing blocks that arrived late.
    """

    def __init__(self, node: Node, inbox: ContributionInbox) -> None:
        self.bytes = {"received": 0, "missing": 0, "late": 0}
        self._node = node
        self._inbox = inbox
        self._wait = node.settings.number("dgt_wait")
        self._members: dict[Link, _Member] = {}

    # Messages.

    def receive(self, link: Link, header: Header, payload: memoryview | None) -> bool:
        """Accept a part, or a whole contribution to which late blocks are added. Leaves any other message to the
        process. Raises BadMessage.
        """
        if header.kind == Kind.EXCHANGE and payload is not None:
            return self._on_whole(link, header, payload)
        if header.kind != Kind.PART:
            return False
        if payload is None:
            raise BadMessage("a part of a contribution without a payload")
        self._inbox.check(link, header)
        member = self._member(link)
        incoming = member.slices.setdefault((header.key, header.slice), _Incoming(member))
        incoming.contributors = header.contributors
        self._close_before(incoming, header.round)
        if not incoming.may_come(header.round):  # the whole contribution has come meanwhile
            link.consumed(len(payload))
        else:
            self._add_part(incoming, header, payload)
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
        # A slice of which no part has arrived may be in any round: its server was restarted, or received it whole until
        # now.
        incoming = member.slices.get(where) or _Incoming(member, handed_in=max(0, fragment.round - 1))
        assembly = incoming.open.get(fragment.round)
        if assembly is not None:
            assembly.add_bytes(fragment.offset, fragment.data)
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

    def forget(self, link: Link) -> None:
        """The process at this link was restarted, and sends its contributions anew."""
        member = self._members.pop(link, None)
        for incoming in member.slices.values() if member is not None else ():
            incoming.open.clear()

    # Internals.

    def _member(self, link: Link) -> _Member:
        if link not in self._members:
            self._members[link] = _Member(link, Grace(self._wait))
        return self._members[link]

    def _add_part(self, incoming: _Incoming, header: Header, payload: memoryview) -> None:
        link, assembly = incoming.member.link, incoming.open.get(header.round)
        if assembly is None:
            assembly = incoming.open[header.round] = Assembly(header)
        try:
            is_first = assembly.add_part(header, payload, time.monotonic() + self._wait)
        except BadMessage:
            link.ask_again(header.request, damaged=True)
            raise
        if is_first and not assembly.by_datagram:
            # The important parts of all slices go before any other part, so they must not wait for the parts in the
            # window.
            link.consumed(len(payload))
        else:
            assembly.credit += len(payload)
        for fragment in _remove_early(incoming, header.round) if is_first else ():
            with contextlib.suppress(BadMessage):
                assembly.add_bytes(fragment.offset, fragment.data)
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

    def _on_whole(self, link: Link, header: Header, payload: memoryview) -> bool:
        """Drop the parts of a contribution that has arrived whole. Returns whether it was handed in, with late blocks.
        """
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
    def _close_before(incoming: _Incoming, round_: int) -> None:
        """The sender has the results of the rounds before this one. Another process may have brought its contributions.
        """
        _close(incoming, round_ - 1)
        for number in [number for number in incoming.open if number < round_]:
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
    """Parts of this round and of earlier rounds are no longer needed."""
    incoming.handed_in = max(incoming.handed_in, round_)
    for number in [number for number in incoming.early if number <= round_]:
        _remove_early(incoming, number)
    for number in [number for number in incoming.passed_at if number <= round_]:
        del incoming.passed_at[number]
    for number in [number for number in incoming.past if number < round_ - MAX_PAST]:
        del incoming.past[number]


def _remove_early(incoming: _Incoming, round_: int) -> list[Fragment]:
    found = incoming.early.pop(round_, [])
    incoming.member.early -= sum(len(fragment.data) + LEAST_EARLY for fragment in found)
    return found


def _with_late(incoming: _Incoming, array: Array) -> Array:
    """The elements of a contribution plus the late blocks, which are then discarded."""
    late, incoming.late = incoming.late, None
    return array if late is None else array.astype(late.dtype, copy=False) + late


def _observe(incoming: _Incoming, passed_at: float, arrived_at: float = 0.0) -> None:
    """A datagram arrived, by default now. Later datagrams had arrived at `passed_at`; 0 if they had not."""
    behind = (arrived_at or time.monotonic()) - passed_at if passed_at else 0.0
    incoming.member.grace.arrived(max(0.0, behind))
