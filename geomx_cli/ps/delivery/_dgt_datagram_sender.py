"""Blocks as datagrams (DGT), sent by a local server at the rate that the path carries."""

import bisect
import itertools
import os
import random
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from geomx_cli.contract.addresses import split
from geomx_cli.core.events import WarningRaised
from geomx_cli.ps.cluster.bodies import Body
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.delivery._dgt_blocks import FRAGMENT, Block, Fragment, encode_fragment
from geomx_cli.ps.net.datagrams import OVERHEAD, SALT, Sealer, SenderSocket, session_key
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.wire import MAX_REPORTED, Header

__all__ = ["DatagramSender", "Pace"]

TICK = 0.002
"""Seconds between bursts."""
PROBE = 0.2
"""Seconds between probes."""
MAX_BURST = 128 * 1024
"""Bytes in one burst: the receiver's kernel has room for so many."""
PASSING = 5
"""Empty datagrams after the last one. With so many, one arrives even if many are lost."""
UNHEARD = 3.0
"""Seconds without a report on datagrams after which blocks are sent reliably, until probes arrive again."""


class Pace:
    """The rate at which datagrams are sent: GAIN times the rate at which they recently arrived at the receiver.

    So the rate grows as long as the path carries more. Losses do not lower it, because a lossy path need not be full. A
    full path delivers less than is sent, and GAIN times the delivered rate is the new rate.

    rate: bytes per second, at least LEAST.
    """

    GAIN, LEAST, REPORTS = 1.25, 250_000.0, 20

    def __init__(self, rate: float) -> None:
        self.rate = max(self.LEAST, rate)
        self._rates: deque[float] = deque(maxlen=self.REPORTS)
        self._last: tuple[float, int] | None = None

    def report(self, at: float, received: int, *, busy: bool) -> None:
        """Apply a report of the receiver.

        at: when the newest datagram arrived, in seconds of the receiver's clock.
        received: total bytes that had arrived.
        busy: whether there was more to send all the time since the last report. If not, the path may carry more.
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
    """The blocks of one contribution that are still to be sent, those with the largest contribution first.

    header: of its first part.
    """

    header: Header
    blocks: deque[Block]


class DatagramSender:
    """Sends blocks to one server. Used by the loop's thread only.

    ready: whether datagrams reach the server. It is False until the first has arrived, and while none arrives. Then
        blocks have to be sent reliably.

    This process drops the fraction `dgt_loss` of the datagrams, to emulate a lossy path.
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
        """The server was restarted, and does not know the session. Blocks that were not sent wait until their
        contribution is repeated whole, or until the next contribution.
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
        """The blocks of a slice that were not sent. They are not sent any more."""
        item = self._by_slice.pop((key, index), None)
        if item is None:
            return []
        left = list(item.blocks)
        item.blocks.clear()
        self._node.telemetry.datagrams["withdrawn"] += sum(len(block.data) for block in left)
        return left

    def forbid_withdrawal(self, key: int, index: int) -> None:
        """The contribution is also sent whole. Its blocks are still sent. The server drops them, unless it has already
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
        if salt != self._salt:  # requested before the server was restarted
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
        """Find out whether datagrams arrive: long ones, and short ones that every path carries."""
        if not self._sockets:
            return
        silence = time.monotonic() - self._silent_since if self._silent_since else 0.0
        unheard = silence > UNHEARD
        if self.ready and silence < UNHEARD / 2:  # the last datagrams may be lost, and nothing follows them
            return
        if self.ready and unheard:
            self.ready, self._path = False, 0
        socket = self._sockets[0]
        # The short datagram arrives even if the path silently drops long ones. Reports tell the length that fits.
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
        """Send an empty datagram on each channel. If nothing else follows, it shows which earlier datagrams were lost.
        """
        for channel in range(1, self._channels + 1) if self._sockets and not self._ticking else ():
            self._emit(channel, [Fragment()], 0)

    def _send_some(self, finished: list[tuple[int, int, int]]) -> bool:
        """Send some datagrams of the first contribution whose first part has been sent. Returns False if there is none,
        or if the kernel has no room.
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
        """The emulated link has passed these datagrams. If the kernel has no room for some, they are lost."""
        socket.send(sealed)

    def _retry(self) -> bool:
        """Send the datagrams for which the kernel had no room. Returns False if it still has none."""
        assert self._unsent is not None
        socket, sealed = self._unsent
        if socket.send(sealed):
            self._unsent = None
        return self._unsent is None
