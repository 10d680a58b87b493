"""Blocks as datagrams (DGT): a local server sends them at the rate that the path carries, a root receives them."""

import bisect
import itertools
import os
import random
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, NotRequired, TypedDict

import msgspec

from geomx_cli.contract.addresses import split
from geomx_cli.core.events import WarningRaised
from geomx_cli.ps.cluster.bodies import Body, Count, Topic
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.delivery._dgt_blocks import FRAGMENT, Block, Fragment, decode_fragment, encode_fragment
from geomx_cli.ps.delivery._dgt_receiver import PartReceiver
from geomx_cli.ps.net.datagrams import (
    MAX_CHANNELS,
    OVERHEAD,
    SALT,
    Opener,
    ReceiverSocket,
    Sealer,
    SenderSocket,
    session_key,
    session_of,
)  # fmt: skip
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.wire import MAX_REPORTED, BadMessage, Header

__all__ = ["TOPICS", "DatagramReceiver", "DatagramSender", "Pace"]


class _Open(TypedDict):
    salt: bytes


class _Opened(_Open):
    session: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    port: Annotated[int, msgspec.Meta(ge=1, lt=65_536)]


class _Report(TypedDict):
    """Of a sender, or of a receiver.

    sent: key, slice and round of contributions whose blocks have all been sent.
    counters: of the next datagram on each channel; those of `sent` had lower ones.
    received: bytes so far.
    at: when the last of them came, in seconds of the receiver's clock.
    longest: bytes of the longest datagram since the last report.
    """

    sent: NotRequired[Annotated[list[tuple[Count, Count, Count]], msgspec.Meta(max_length=MAX_REPORTED)]]
    counters: NotRequired[Annotated[list[Count], msgspec.Meta(max_length=64)]]
    received: NotRequired[Count]
    at: NotRequired[float]
    longest: NotRequired[Count]


TOPICS = {"datagrams_open": Topic(_Open, _Opened), "datagrams": Topic(_Report, notifies=True)}


REPORT = 0.05
"""Seconds between reports to those that send."""
MAX_SENT = 65_536
"""Reports of one member, and contributions in them, that may wait for datagrams."""
TICK = 0.002  # seconds between bursts
PROBE = 0.2  # seconds between probes
MAX_BURST = 128 * 1024
"""Bytes in one burst: what the receiver's kernel has room for."""
PASSING = 5
"""Empty datagrams behind the last one: with so many, one arrives also where many are lost."""
UNHEARD = 3.0
"""Seconds without a report on datagrams after which blocks are sent reliably, until probes arrive again."""


class Pace:
    """The rate at which datagrams are sent: GAIN times what has arrived at the receiver lately.

    So it grows as long as the path takes more, and what is lost does not lower it: a lossy path is no full one. A path
    that is full delivers less than is sent, GAIN times which is the new rate.

    rate: bytes per second, LEAST or more.
    """

    GAIN, LEAST, REPORTS = 1.25, 250_000.0, 20

    def __init__(self, rate: float) -> None:
        self.rate = max(self.LEAST, rate)
        self._rates: deque[float] = deque(maxlen=self.REPORTS)
        self._last: tuple[float, int] | None = None

    def report(self, at: float, received: int, *, busy: bool) -> None:
        """Apply a report of the receiver.

        at: when the newest datagram arrived, in seconds of the receiver's clock.
        received: bytes that had arrived in all.
        busy: whether there was more to send all the time since the last report; else the path may carry more than that.
        """
        last, self._last = self._last, (at, received)
        if last is None or not at > last[0]:
            return
        delivered = (received - last[1]) / (at - last[0])
        if busy:
            self._rates.append(delivered)
            self.rate = max(self.LEAST, self.GAIN * max(self._rates))
        else:
            self.rate = max(self.rate, self.GAIN * delivered)


@dataclass(slots=True)
class _Outgoing:
    """The blocks of one contribution that are still to be sent, those that contribute most first.

    header: of its first part.
    """

    header: Header
    blocks: deque[Block]


class DatagramSender:
    """Sends blocks to one server. Used by the loop's thread only.

    ready: whether datagrams reach the server. Until the first one has, and while none does, it is False and blocks have
        to be sent reliably.

    Of the datagrams the part `dgt_loss` is dropped here, to emulate a lossy path.
    """

    def __init__(self, node: Node, link: Link) -> None:
        settings = node.settings
        self.ready = False
        self._node, self._link = node, link
        self._channels = int(settings.number("dgt_channels"))
        self._block = int(settings.number("dgt_block"))
        self._loss = settings.number("dgt_loss")
        self._random = random.Random(f"{settings.options['seed']} {node.process} {link.name}")
        self._salt = b""
        self._sockets: list[SenderSocket] = []  # none until the server has opened the session
        self._sealer: Sealer | None = None
        self._path = 0  # bytes of the longest datagram that has arrived
        self._pace = Pace(0.0)
        self._budget, self._spent = 0.0, 0.0
        self._queue: list[tuple[int, int, _Outgoing]] = []
        self._order = itertools.count()
        self._by_slice: dict[tuple[int, int], _Outgoing] = {}
        self._unsent: tuple[SenderSocket, list[bytes]] | None = None
        self._busy = self._ticking = False
        self._silent_since = time.monotonic()  # the first datagram since the last report; 0 for none
        self._warned = False
        node.loop.every(PROBE, self._probe)
        self._open()

    def reopen(self) -> None:
        """The server was restarted, and knows nothing of the session. Blocks that were not sent wait: for their
        contribution, if it is repeated whole, or for the next one.
        """
        self.ready, self._path, self._pace = False, 0, Pace(self._pace.rate)
        self._queue.clear()
        self._unsent = self._sealer = None
        for made in self._sockets:
            made.close()
        self._sockets = []
        self._open()

    def _open(self) -> None:
        """Begin a session with the present life of the server."""
        self._salt = os.urandom(SALT)
        opened = partial(self._opened, self._salt)
        self._node.rpc.ask(self._link, "datagrams_open", {"salt": self._salt}, opened, self._node.fail)

    def send(self, header: Header, blocks: Iterable[Block]) -> None:
        """Send blocks of a contribution once its first part, with this header, has left the link's queue."""
        item = _Outgoing(header, deque(blocks))
        self._by_slice[header.key, header.slice] = item
        bisect.insort(self._queue, (-header.priority, next(self._order), item))
        if not self._ticking:
            self._ticking, self._busy = True, False
            now = time.monotonic()
            self._budget, self._spent = 0.0, now - TICK
            self._tick()

    def withdraw(self, key: int, index: int) -> list[Block]:
        """The blocks of a slice that were not sent, which are not sent any more."""
        item = self._by_slice.pop((key, index), None)
        if item is None:
            return []
        left = list(item.blocks)
        item.blocks.clear()
        self._node.telemetry.datagrams["withdrawn"] += sum(len(block.data) for block in left)
        return left

    def forbid_withdrawal(self, key: int, index: int) -> None:
        """The contribution is sent whole too. Its blocks still go, and the server drops them unless it has already
        summed the contribution without them.
        """
        self._by_slice.pop((key, index), None)

    def on_report(self, body: Body) -> None:
        """The server has received datagrams."""
        self._silent_since = 0.0
        self._path = max(self._path, int(body.get("longest", 0)))
        self._pace.report(float(body.get("at", 0.0)), int(body.get("received", 0)), busy=self._busy)
        self._busy = bool(self._queue)
        if not self.ready:
            self.ready, self._warned = True, False
            self._pace.rate = max(self._pace.rate, self._link.window.rate)

    def _opened(self, salt: bytes, body: Body) -> None:
        if salt != self._salt:  # asked for before the server was restarted
            return
        node, link = self._node, self._link
        key = session_key(node.keys, node.process, link.name, self._salt + body["salt"], sends=True)
        self._sealer = Sealer(key, int(body["session"]))
        host = split(link.endpoint)[0] if link.endpoint.startswith("tcp:") else "127.0.0.1"
        address = host, int(body["port"])
        try:
            self._sockets = [SenderSocket(address, self._channels - 1 - channel) for channel in range(self._channels)]
        except OSError as error:
            what = f"no datagrams can be sent to {link.name} at {host}: {error.strerror}"
            node.events.write(WarningRaised(message=f"{what}; all blocks are sent reliably"))
            return
        self._silent_since = time.monotonic()
        self._probe()

    def _probe(self) -> None:
        """Find out whether datagrams arrive, long ones and such as every path takes."""
        if not self._sockets:
            return
        silence = time.monotonic() - self._silent_since if self._silent_since else 0.0
        unheard = silence > UNHEARD
        if self.ready and silence < UNHEARD / 2:  # the last datagrams may be lost, and nothing follows them
            return
        if self.ready and unheard:
            self.ready, self._path = False, 0
        socket = self._sockets[0]
        # The short one arrives also where the path drops long datagrams silently; reports tell the length that fits.
        for size in (socket.size, socket.least):
            self._emit(1, [Fragment()], size - OVERHEAD - FRAGMENT.size)
        if unheard and not self._warned:
            self._warned = True
            what = f"no datagrams reach {self._link.name}, so all blocks are sent reliably: does a firewall drop UDP?"
            self._node.events.write(WarningRaised(message=what))

    def _tick(self) -> None:
        """Send as much as the rate allows since the last time."""
        now = time.monotonic()
        self._budget = min(self._budget + self._pace.rate * (now - self._spent), MAX_BURST)
        self._spent = now
        finished: list[tuple[int, int, int]] = []
        if self._unsent is None or self._retry():
            while self._budget > 0 and self._queue and len(finished) < MAX_REPORTED and self._send_some(finished):
                pass
        if finished:
            assert self._sealer is not None
            self._link.control("datagrams", {"sent": finished, "counters": self._sealer.counters})
        self._ticking = bool(self._queue or self._unsent)
        if self._ticking:
            self._node.loop.call_later(TICK, self._tick)
        else:
            for number in range(PASSING):
                self._node.loop.call_later(TICK * 2**number, self._pass)

    def _pass(self) -> None:
        """Send an empty datagram on each channel: if nothing else follows, it shows which of those before were lost."""
        for channel in range(1, self._channels + 1) if self._sockets and not self._ticking else ():
            self._emit(channel, [Fragment()], 0)

    def _send_some(self, finished: list[tuple[int, int, int]]) -> bool:
        """Send some datagrams of the first contribution whose first part has been sent. Returns False if there is none,
        or the kernel has no room.
        """
        queues = self._link.queues
        place = next((at for at, (_, _, item) in enumerate(self._queue) if not queues(item.header)), None)
        if place is None:
            return False
        item = self._queue[place][2]
        header = item.header
        if item.blocks:
            channel = item.blocks[0].channel
            socket = self._sockets[channel - 1]
            room = (max(socket.least, min(socket.size, self._path)) - OVERHEAD - FRAGMENT.size) // 8 * 8
            length = 8 * -(-self._block // (8 * -(-self._block // room)))  # equal pieces, for UDP_SEGMENT
            most = socket.batch(length + OVERHEAD + FRAGMENT.size)
            fragments: list[Fragment] = []
            while item.blocks and item.blocks[0].channel == channel and len(fragments) < most:
                _, offset, data = item.blocks.popleft()
                fragments.append(Fragment(header.key, header.slice, header.round, offset, data[:length]))
                if len(data) > length:
                    item.blocks.appendleft(Block(channel, offset + length, data[length:]))
            self._emit(channel, fragments, length)
        if not item.blocks:
            del self._queue[place]
            if self._by_slice.get((header.key, header.slice)) is item:
                del self._by_slice[header.key, header.slice]
            finished.append((header.key, header.slice, header.round))
        return self._unsent is None

    def _emit(self, channel: int, fragments: list[Fragment], length: int) -> None:
        """Send datagrams of one channel, each with a fragment and padding up to `length` bytes."""
        assert self._sealer is not None
        sealed = [self._sealer.seal(channel, encode_fragment(fragment, length)) for fragment in fragments]
        size = sum(map(len, sealed))
        self._silent_since = self._silent_since or time.monotonic()
        self._budget -= size
        self._node.telemetry.datagrams["sent"] += size
        self._link.sent += size
        if self._loss:
            sealed = [datagram for datagram in sealed if self._random.random() >= self._loss]
        socket, wan = self._sockets[channel - 1], self._node.transport.wan
        if sealed and wan is not None and self._link.wide_area:
            wan.send(size, "tensors", self._link.name, partial(self._leave, socket, sealed))
        elif sealed and not socket.send(sealed):
            self._unsent = socket, sealed

    @staticmethod
    def _leave(socket: SenderSocket, sealed: list[bytes]) -> None:
        """The emulated link has passed these datagrams; what the kernel has no room for is lost."""
        socket.send(sealed)

    def _retry(self) -> bool:
        """Send what the kernel had no room for. Returns False if it still has none."""
        assert self._unsent is not None
        socket, sealed = self._unsent
        if socket.send(sealed):
            self._unsent = None
        return self._unsent is None


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
        listens = node.listens or node.settings.bind  # a server that was restarted listens once it has joined
        endpoint = next((end for end in listens if end.startswith("tcp:")), "tcp://127.0.0.1:0")
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
        # On all: networks that honour DSCP let channels overtake each other, but seldom datagrams of one channel. What
        # has not come by then is most likely lost, and Grace waits a little for the rest.
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
