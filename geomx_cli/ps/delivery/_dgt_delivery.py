"""DGT in one process: a worker reports its loss, a local server divides its sums, a root reassembles them."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

import numpy as np

from geomx_cli.contract.config import NodeSettings
from geomx_cli.ps.aggregation.algorithm import ContributionInbox
from geomx_cli.ps.aggregation.codec import exact_dtype
from geomx_cli.ps.aggregation.compression import can_encode
from geomx_cli.ps.aggregation.upstream import OnResult, UpstreamClient
from geomx_cli.ps.arrays import Array, Arrays
from geomx_cli.ps.cluster.bodies import Topic
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.delivery._dgt_blocks import (
    BEHIND,
    IMPORTANT,
    SILENT,
    Block,
    Ranking,
    bytes_in,
    dequantise,
    encode_part,
    encode_quantised,
    part_header,
    quantise,
)  # fmt: skip
from geomx_cli.ps.delivery._dgt_datagram_receiver import TOPICS, DatagramReceiver
from geomx_cli.ps.delivery._dgt_datagram_sender import DatagramSender
from geomx_cli.ps.delivery._dgt_parts import PartReceiver
from geomx_cli.ps.delivery.direct import Direct
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import dtype_of
from geomx_cli.ps.net.wire import Form, Header

__all__ = ["BY_DATAGRAM", "DgtServer", "DgtWorker", "Parts", "Splitter"]

BY_DATAGRAM, REORDERED, QUANTISED = 1, 2, 3
"""Values of --dgt: how blocks that are not important are sent."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A contribution, whole and in parts. If it is not divided, there are no parts.

    whole: its payload, as repeats send it.
    important: the payload of the first part.
    others: the payload of the second part.
    blocks: the blocks for datagrams instead, those with the largest contribution first.
    """

    whole: memoryview | None
    important: bytes = b""
    others: bytes = b""
    blocks: tuple[Block, ...] = ()


class Splitter:
    """Divides the contributions of one local server. Used by the loop's thread only.

    mode: see BY_DATAGRAM.
    k: the fraction of the blocks that is important.
    kept: returns the arrays kept with a header's slice: "average", the contribution of each block, and "residual", the
        part that quantisation has lost.
    """

    def __init__(self, settings: NodeSettings, kept: Callable[[Header], Arrays]) -> None:
        self._kept = kept
        self.mode = int(settings.number("dgt"))
        self.k = self._first_k = settings.number("dgt_k")
        self._least_k = settings.number("dgt_k_min")
        self._size = int(settings.number("dgt_block"))
        self._alpha = settings.number("dgt_alpha")
        self._channels = int(settings.number("dgt_channels"))

    def follow(self, losses: Iterable[tuple[float, float]]) -> None:
        """Set k to k_0 * loss / first loss, at least k_min. Both losses are means over the workers.

        losses: for each worker, its first and its present loss.
        """
        first, present = (sum(column) for column in zip(*losses, strict=True))
        ratio = present / first if first > 0 else 1.0
        self.k = min(1.0, max(self._least_k, self._first_k * ratio))

    def split(self, header: Header, payload: memoryview | None, unsent: Iterable[Block] = ()) -> Parts:
        """Divide a contribution. It stays whole if it has no elements, rows, encoded elements, a single block, only
        important blocks, or elements that are not finite.

        unsent: blocks of an earlier round of this slice that were not sent. They are added.
        """
        if payload is None or header.form != Form.FULL or dtype_of(header).kind != "f":
            return Parts(payload)
        kept, dtype = self._kept(header), dtype_of(header)
        exact = np.frombuffer(payload, dtype)
        for block in unsent:
            exact = _plus(exact, block)
        if (residual := kept.pop("residual", None)) is not None:
            exact = exact + residual
        array = exact.astype(dtype, copy=False)
        size, data, ranking = self._size, array.view(np.uint8), Ranking(kept.get("average"))
        if len(data) <= size or not ranking.update(array, size // dtype.itemsize, self._alpha):
            return Parts(memoryview(data.data))
        assert ranking.average is not None
        kept["average"] = ranking.average
        channel, order = ranking.channels(self.k, self._channels, _zeros(ranking.average, data, size))
        important, others = channel == IMPORTANT, (channel != IMPORTANT) & (channel != SILENT)
        if not others.any() or (self.mode == QUANTISED and not can_encode(exact)):
            return Parts(memoryview(data.data))
        rest = bytes_in(len(data), others, size)
        first = encode_part(data, important, size, rest, first=True, by_datagram=self.mode == BY_DATAGRAM)
        if self.mode == REORDERED:
            return Parts(memoryview(data.data), first, encode_part(data, others, size, first=False))
        if self.mode == BY_DATAGRAM:
            sent = order[others[order]]
            blocks = (Block(int(channel[at]), at * size, data[at * size : (at + 1) * size].tobytes()) for at in sent)
            return Parts(memoryview(data.data), first, blocks=tuple(blocks))
        # A repeat, which is whole, has the same quantised elements, so the residual is valid for it too.
        array = array.copy()
        rows = array[: len(data) // size * (size // dtype.itemsize)].reshape(-1, size // dtype.itemsize)
        where = others[: len(rows)]
        bounds, codes = quantise(rows[where])
        rows[where] = dequantise(bounds, codes).astype(dtype, copy=False)
        kept["residual"] = exact.astype(exact_dtype(header.dtype), copy=False) - array
        whole = memoryview(array.data).cast("B")
        return Parts(whole, first, encode_quantised(bounds, codes, others, size))


def _plus(array: Array, block: Block) -> Array:
    """The array with the elements of a block added."""
    array = array.copy()
    data = np.frombuffer(block.data, array.dtype)
    start = block.offset // array.dtype.itemsize
    array[start : start + len(data)] += data
    return array


def _zeros(average: Array, data: Array, size: int) -> Array:
    """Which of the blocks without a contribution have no bit set."""
    found = np.zeros(len(average), bool)
    for at in np.flatnonzero(average == 0):
        found[at] = not data[at * size : (at + 1) * size].any()
    return found


class _Loss(TypedDict):
    loss: float


class DgtWorker(Direct):
    """The delivery of a worker. It sends contributions whole to its local server. With --dgt-adaptive it reports the
    loss to its servers.
    """

    def begin(self, node: Node, upstream: UpstreamClient | None, others: object, /) -> None:
        """See WorkerDelivery.begin."""
        super().begin(node, upstream, others)
        self._node = node
        node.rpc.add_topics({"loss": Topic(_Loss)})
        self._told: float | None = None
        self._is_adaptive = bool(node.settings.options["dgt_adaptive"])
        if self._is_adaptive:
            # Contributions that pass through other workers (--tsengine) do not reach this function.
            node.loop.every(node.settings.number("heartbeat"), self._tell_loss)

    def up(self, server: int, header: Header, payload: memoryview | None, on_result: OnResult) -> None:
        """Send the contribution, after a loss that has changed."""
        self._tell_loss()
        super().up(server, header, payload, on_result)

    def _tell_loss(self) -> None:
        loss, links = self._node.telemetry.loss, self.upstream.links if self.upstream is not None else ()
        if self._is_adaptive and links and loss is not None and loss != self._told and math.isfinite(loss):
            self._told = loss
            for link in links:
                self._node.rpc.ask(link, "loss", {"loss": loss}, lambda _: None, lambda _: None)


class DgtServer(Direct):
    """The delivery of a server: a local server divides its sums, a root reassembles them."""

    def begin(self, node: Node, upstream: UpstreamClient | None, inbox: ContributionInbox, /) -> None:
        """See ServerDelivery.begin."""
        super().begin(node, upstream, inbox)
        self._node = node
        node.rpc.add_topics({"loss": Topic(_Loss), **TOPICS})
        self._splitter = Splitter(node.settings, inbox.kept)
        self._senders: dict[Link, DatagramSender] = {}
        self._parts = PartReceiver(node, inbox)
        self._datagrams: DatagramReceiver | None = None
        self._losses: dict[Link, tuple[float, float]] = {}  # the first and the last loss of each worker
        if self._splitter.mode == BY_DATAGRAM and upstream is not None:
            node.telemetry.datagrams = {"sent": 0, "withdrawn": 0}  # counted by the senders
        elif self._splitter.mode == BY_DATAGRAM:
            node.telemetry.datagrams = self._parts.bytes
            self._datagrams = DatagramReceiver(node, self._parts)

    def up(self, server: int, header: Header, payload: memoryview | None, on_result: OnResult) -> None:
        """Send a contribution in parts, if it can be divided. With datagrams, only if these arrive."""
        assert self.upstream is not None
        link = self.upstream.links[server]
        sender = self._sender(link) if self._splitter.mode == BY_DATAGRAM else None
        unsent = sender.withdraw(header.key, header.slice) if sender is not None and payload is not None else ()
        parts = self._splitter.split(header, payload, unsent)

        def transmit(header: Header) -> None:
            first = part_header(header)
            link.send(first, memoryview(parts.important))
            if sender is not None:
                sender.send(first, parts.blocks)
            else:
                link.send(part_header(header, BEHIND), memoryview(parts.others))

        if parts.important and (sender is None or sender.ready):
            # No later round of the slice is under way: a local server sends a round when it has the result of the round
            # before.
            forbid = None if sender is None else partial(sender.forbid_withdrawal, header.key, header.slice)
            self.upstream.send(link, header, parts.whole, on_result, transmit, on_repeat=forbid)
        else:
            self.upstream.send(link, header, parts.whole, on_result)

    def receive(self, link: Link, header: Header, payload: memoryview | None) -> bool:
        """Accept parts, and contributions to which late blocks are added."""
        return self._parts.receive(link, header, payload)

    def on_renewed(self, link: Link) -> None:
        """Drop parts and datagrams of the peer's earlier life. The aggregator knows which contributions have arrived.
        """
        self._parts.forget(link)
        self._losses.pop(link, None)
        if self._datagrams is not None:
            self._datagrams.forget(link)
        if link in self._senders:
            self._senders[link].reopen()

    def on_request(self, request: Request) -> bool:
        """Set up datagrams for a member. Apply a report of the datagrams that a member has sent or a root received."""
        if request.topic == "loss":
            loss = float(request.body["loss"])
            self._losses[request.link] = self._losses.get(request.link, (loss, loss))[0], loss
            self._splitter.follow(self._losses.values())
            request.answer()
        elif request.topic == "datagrams_open" and self._datagrams is not None:
            self._datagrams.open(request)
        elif request.topic == "datagrams" and request.link in self._senders:
            self._senders[request.link].on_report(request.body)
        elif request.topic == "datagrams" and self._datagrams is not None:
            self._datagrams.on_sent(request)
        else:
            return False
        return True

    def _sender(self, link: Link) -> DatagramSender:
        if link not in self._senders:
            self._senders[link] = DatagramSender(self._node, link)
        return self._senders[link]
