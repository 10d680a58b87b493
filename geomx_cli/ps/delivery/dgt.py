"""Differential gradient transmission (DGT): local servers send the blocks of a sum that contribute most first.

Wang et al., FGCS 121 (2021). `--dgt 2` changes only the order: nothing is lost, and sums have the same bits as with
direct delivery. `--dgt 1` sends the other blocks as datagrams; those that are late join the next round of their slice.
`--dgt 3` is as 2, with 4 bits an element for the other blocks. Initial values, results, rows, and what a codec encodes
are delivered directly, so of a sparse codec's tensors only the small ones are divided.
See docs/explanation/delivery.md.
"""

import math
from functools import partial
from typing import TYPE_CHECKING, TypedDict

from geomx_cli.core.options import Option
from geomx_cli.ps.delivery.direct import Direct

if TYPE_CHECKING:
    from collections.abc import Mapping

    from geomx_cli.core.options import Value
    from geomx_cli.core.plugins import Spec
    from geomx_cli.ps.aggregation.delivery_interface import ContributionInbox
    from geomx_cli.ps.aggregation.upstream import OnResult, UpstreamClient
    from geomx_cli.ps.cluster.node import Node
    from geomx_cli.ps.cluster.rpc import Request
    from geomx_cli.ps.delivery._datagram_receiver import DatagramReceiver
    from geomx_cli.ps.delivery._datagram_sender import DatagramSender
    from geomx_cli.ps.net.link import Link
    from geomx_cli.ps.net.wire import Header

name = "dgt"
chosen_by = "dgt"
modules = ("cryptography",)
only_with = {"dgt_channels": 1, "dgt_wait": 1, "dgt_loss": 1}
options = (
    Option(
        "dgt", "int", 0, "ENABLE_DGT",
        "Differential gradient transmission: local servers send the blocks of a gradient that contribute most first. 2:"
        " the other blocks follow, and nothing is lost. 1: the other blocks are datagrams (UDP), which may be late or"
        " lost. 3: the other blocks follow, with 4 bits an element.", "transport", minimum=0, maximum=3, word="off",
    ),
    Option(
        "dgt_k", "float", 0.5, "DMLC_K", "Share of the blocks that go first (dgt).", "transport",
        minimum=0, maximum=1,
    ),
    Option(
        "dgt_adaptive", "bool", False, "ADAPTIVE_K_FLAG",
        "Reduce --dgt-k as training converges, in proportion to the loss that workers report (dgt).", "transport",
    ),
    Option(
        "dgt_k_min", "float", 0.2, "DMLC_K_MIN", "Smallest share with --dgt-adaptive (dgt).", "transport",
        minimum=0, maximum=1,
    ),
    Option(
        "dgt_block", "size", 4096, "DGT_BLOCK_SIZE", "Bytes of a block, a multiple of 64 (dgt).", "transport",
        minimum=256, maximum=2**20,
    ),
    Option(
        "dgt_channels", "int", 3, "DMLC_UDP_CHANNEL_NUM",
        "Channels for datagrams. Channels for blocks that contribute less have a lower DSCP (dgt 1).", "transport",
        minimum=1, maximum=7,
    ),
    Option(
        "dgt_wait", "duration", 1.0, "GEOMX_DGT_WAIT",
        "Longest wait for the datagrams of a contribution, after its first blocks have arrived (dgt 1).", "transport",
        minimum=0, maximum=3600,
    ),
    Option(
        "dgt_loss", "float", 0.0, "GEOMX_DGT_LOSS",
        "Emulate a lossy path: share of the datagrams that are dropped (dgt 1).", "transport", minimum=0, maximum=1,
    ),
    Option(
        "dgt_alpha", "float", 0.3, "DGT_CONTRIBUTION_ALPHA",
        "Weight of earlier rounds in a block's contribution, which is a moving average of its mean magnitude (dgt).",
        "transport", minimum=0, below=1,
    ),
)  # fmt: skip


def sends_datagrams(options: "Mapping[str, Value]") -> bool:
    """Whether local servers send datagrams to global servers."""
    return options["dgt"] == 1


def _encodes_everything(options: "Mapping[str, Value]") -> bool:
    """Whether the codec leaves no tensor as it is, not even the smallest."""
    from geomx_cli.ps.aggregation.codec import codec_at, complete_spec, parse_codec

    codec = parse_codec(complete_spec(str(options["compress"]), int(options["compress_min"])))
    return codec_at(codec, 1, 1) is not None


def refuses(spec: "Spec") -> str | None:
    """Needs local servers, and tensors whose sums are sent as plain elements."""
    if not spec.options["dgt"]:
        return "write --dgt 1, 2 or 3, which says what becomes of blocks that contribute less"
    if spec.options["topology"] == "flat":
        return "a flat cluster has no local servers, whose sums would be sent in blocks"
    if _encodes_everything(spec.options):
        return f"--compress {spec.options['compress']} encodes all tensors, and what is encoded has no blocks"
    if int(spec.options["dgt_block"]) % 64:
        return "--dgt-block must be a multiple of 64 bytes"
    return None


class _Loss(TypedDict):
    loss: float


class DgtWorker(Direct):
    """The delivery of a worker, whose contributions to its local server are whole. With --dgt-adaptive it tells its
    servers the loss.
    """

    def begin(self, node: "Node", upstream: "UpstreamClient | None", others: object, /) -> None:
        """See WorkerDelivery.begin."""
        from geomx_cli.ps.cluster.bodies import Topic

        super().begin(node, upstream, others)
        self._node = node
        node.rpc.add_topics({"loss": Topic(_Loss)})
        self._told: float | None = None
        self._is_adaptive = bool(node.settings.options["dgt_adaptive"])
        if self._is_adaptive:
            # Contributions that go through other workers (--tsengine) do not come here.
            node.loop.every(node.settings.number("heartbeat"), self._tell_loss)

    def up(self, server: int, header: "Header", payload: memoryview | None, on_result: "OnResult") -> None:
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
    """The delivery of a server: a local server divides its sums, a root puts them together."""

    def begin(self, node: "Node", upstream: "UpstreamClient | None", inbox: "ContributionInbox", /) -> None:
        """See ServerDelivery.begin."""
        # Imported late: every command scans the deliveries.
        from geomx_cli.ps.cluster.bodies import Topic
        from geomx_cli.ps.delivery import _datagram_receiver as datagrams
        from geomx_cli.ps.delivery._datagram_sender import TOPICS
        from geomx_cli.ps.delivery._part_receiver import PartReceiver
        from geomx_cli.ps.delivery._splitter import BY_DATAGRAM, Splitter

        super().begin(node, upstream, inbox)
        self._node = node
        node.rpc.add_topics({"loss": Topic(_Loss), **TOPICS})
        self._splitter = Splitter(node.settings, inbox.kept)
        self._senders: dict[Link, DatagramSender] = {}
        self._parts = PartReceiver(node, inbox)
        self._datagrams: DatagramReceiver | None = None
        self._losses: dict[Link, tuple[float, float]] = {}  # the first and the last one of each worker
        if self._splitter.mode == BY_DATAGRAM and upstream is not None:
            node.telemetry.datagrams = {"sent": 0, "withdrawn": 0}  # counted by the senders
        elif self._splitter.mode == BY_DATAGRAM:
            node.telemetry.datagrams = self._parts.bytes
            self._datagrams = datagrams.DatagramReceiver(node, self._parts)

    def up(self, server: int, header: "Header", payload: memoryview | None, on_result: "OnResult") -> None:
        """Send a contribution in parts, if it can be divided and, with datagrams, if these arrive."""
        from geomx_cli.ps.delivery._parts import BEHIND, part_header
        from geomx_cli.ps.delivery._splitter import BY_DATAGRAM

        assert self.upstream is not None
        link = self.upstream.links[server]
        sender = self._sender(link) if self._splitter.mode == BY_DATAGRAM else None
        unsent = sender.withdraw(header.key, header.slice) if sender is not None and payload is not None else ()
        parts = self._splitter.split(header, payload, unsent)

        def transmit(header: "Header") -> None:
            first = part_header(header)
            link.send(first, memoryview(parts.important))
            if sender is not None:
                sender.send(first, parts.blocks)
            else:
                link.send(part_header(header, BEHIND), memoryview(parts.others))

        if parts.important and (sender is None or sender.ready):
            # No later round of the slice is under way: a local server sends one when it has the result of that before.
            forbid = None if sender is None else partial(sender.forbid_withdrawal, header.key, header.slice)
            self.upstream.send(link, header, parts.whole, on_result, transmit, on_repeat=forbid)
        else:
            self.upstream.send(link, header, parts.whole, on_result)

    def receive(self, link: "Link", header: "Header", payload: memoryview | None) -> bool:
        """Take parts, and contributions to which late blocks are added."""
        return self._parts.receive(link, header, payload)

    def on_request(self, request: "Request") -> bool:
        """Set up datagrams for a member; take what a member has sent, or a root received."""
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

    def _sender(self, link: "Link") -> "DatagramSender":
        from geomx_cli.ps.delivery._datagram_sender import DatagramSender

        if link not in self._senders:
            self._senders[link] = DatagramSender(self._node, link)
        return self._senders[link]


def worker() -> DgtWorker:
    """The delivery of a worker."""
    return DgtWorker()


def server() -> DgtServer:
    """The delivery of a server."""
    return DgtServer()
