"""Receives blocks as datagrams (DGT) at a root, and reports to the senders which bytes have arrived."""

import itertools
import os
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Annotated, NotRequired, TypedDict

import msgspec

from geomx_cli.contract.addresses import split
from geomx_cli.ps.cluster.bodies import Count, Topic
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.delivery._dgt_blocks import decode_fragment
from geomx_cli.ps.delivery._dgt_parts import PartReceiver
from geomx_cli.ps.net.datagrams import MAX_CHANNELS, SALT, Opener, ReceiverSocket, session_key, session_of
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.wire import MAX_REPORTED, BadMessage

__all__ = ["TOPICS", "DatagramReceiver"]

REPORT = 0.05
"""Seconds between reports to the senders."""
MAX_SENT = 65_536
"""Limits on one member's reports that may wait for datagrams, and on the contributions in them."""


class _Open(TypedDict):
    salt: bytes


class _Opened(_Open):
    session: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    port: Annotated[int, msgspec.Meta(ge=1, lt=65_536)]


class _Report(TypedDict):
    """A report of a sender, or of a receiver.

    sent: key, slice and round of contributions whose blocks have all been sent.
    counters: the counter of the next datagram on each channel. The datagrams of `sent` had lower counters.
    received: bytes so far.
    at: when the last of these bytes arrived, in seconds of the receiver's clock.
    longest: bytes of the longest datagram since the last report.
    """

    sent: NotRequired[Annotated[list[tuple[Count, Count, Count]], msgspec.Meta(max_length=MAX_REPORTED)]]
    counters: NotRequired[Annotated[list[Count], msgspec.Meta(max_length=64)]]
    received: NotRequired[Count]
    at: NotRequired[float]
    longest: NotRequired[Count]


TOPICS = {"datagrams_open": Topic(_Open, _Opened), "datagrams": Topic(_Report, notifies=True)}


@dataclass(slots=True)
class _Session:
    """The datagrams of one member.

    received: bytes so far.
    reported: how many of these bytes the receiver has reported to the member.
    longest: bytes of the longest datagram since the last report.
    last: when the last datagram arrived, in time.monotonic seconds.
    newest: the highest counter of each channel.
    sent: contributions of which all blocks have been sent, and counters of later datagrams, in order.
    waiting: number of reports and contributions in `sent`.
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
    """Listens at the address and port number of the process's TCP endpoint. If the process has none, it listens at a
    port of loopback. Used by the loop's thread only. Raises InvalidSettings if the port is in use.

    parts: receives the authentic fragments.
    """

    def __init__(self, node: Node, parts: PartReceiver) -> None:
        self._node = node
        self._parts = parts
        listens = node.listens or node.settings.bind  # a server that was restarted listens once it has joined
        endpoint = next((end for end in listens if end.startswith("tcp:")), "tcp://127.0.0.1:0")
        host, port = split(endpoint)
        self._socket = ReceiverSocket(host, int(port))
        self._sessions: dict[int, _Session] = {}
        self._numbers = itertools.count(int.from_bytes(os.urandom(3)))
        node.loop.watch(self._socket.fileno(), self._read)
        node.loop.every(REPORT, self._report)

    def open(self, request: Request) -> None:
        """Begin a session for the datagrams of a member; the member's earlier session ends. Raises BadMessage."""
        link, salt = request.link, request.body["salt"]
        if len(salt) != SALT:
            raise BadMessage(f"{len(salt)} bytes of salt")
        own = os.urandom(SALT)
        key = session_key(self._node.keys, link.name, self._node.process, salt + own, sends=False)
        self.forget(link)
        number = next(self._numbers)
        self._sessions[number] = _Session(link, Opener(key))
        request.answer({"session": number, "port": self._socket.port, "salt": own})

    def forget(self, link: Link) -> None:
        """The process at this link was restarted: its session has ended."""
        self._sessions = {number: one for number, one in self._sessions.items() if one.link is not link}

    def on_sent(self, request: Request) -> None:
        """A member has sent all blocks of some contributions. Raises BadMessage."""
        session = next((one for one in self._sessions.values() if one.link is request.link), None)
        counters = request.body.get("counters", [])
        sent = request.body.get("sent", [])
        if session is None or len(counters) != MAX_CHANNELS or session.waiting + 1 + len(sent) > MAX_SENT:
            raise BadMessage("a report on datagrams from a process that sends none, or too many")
        session.sent.append((counters, sent))
        session.waiting += 1 + len(sent)
        self._find_passed(session)

    def _read(self) -> None:
        for datagram in self._socket.read():
            try:
                session = self._sessions.get(session_of(datagram))
                if session is None:
                    raise BadMessage("a datagram of no member")
                self._on_datagram(session, len(datagram), *session.opener.open(datagram))
            except BadMessage as error:
                self._node.transport.count_refused(None, "datagram", str(error))

    def _on_datagram(self, session: _Session, size: int, channel: int, counter: int, content: bytes) -> None:
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
            self._find_passed(session)

        if wan is not None and link.wide_area:
            wan.receive(size, "tensors", link.name, deliver)
        else:
            deliver()

    def _find_passed(self, session: _Session) -> None:
        """Find the contributions after which newer datagrams have arrived on all channels that are in use."""
        # On all channels: networks that honour DSCP let channels overtake each other, but seldom datagrams of one
        # channel. Datagrams that have not arrived by then are most likely lost, and Grace waits a little for the
        # others.
        while session.sent:
            counters, contributions = session.sent[0]
            if any(counter and newest < counter for counter, newest in zip(counters, session.newest, strict=True)):
                return
            session.sent.popleft()
            session.waiting -= 1 + len(contributions)
            for key, index, round_ in contributions:
                self._parts.on_passed(session.link, key, index, round_)

    def _report(self) -> None:
        """Report to members which datagrams have arrived."""
        for session in self._sessions.values():
            if session.received > session.reported:
                session.reported = session.received
                body = {"received": session.received, "at": session.last, "longest": session.longest}
                session.longest = 0
                session.link.control("datagrams", body)
