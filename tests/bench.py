"""An aggregator in this process, with links that only record messages."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from geomx_cli.ps.aggregation.aggregator import Aggregator
from geomx_cli.ps.aggregation.compression import Compression
from geomx_cli.ps.aggregation.slices import SliceTable
from geomx_cli.ps.aggregation.straggler_monitor import DeadlockBreaker
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.net.lanes import Lane
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import view
from geomx_cli.ps.net.wire import Header, Kind, decode_header
from geomx_cli.ps.optim import optimizers
from geomx_cli.runtime.algorithms.fsa import FsaServer

SIZE = 1000


class KeptLink:
    """Counts the returned credit, and records the requested slices."""

    name = "the member"
    unread = 0

    def __init__(self) -> None:
        self.credit = self.received = 0
        self.asked: list[tuple[int, int, int]] = []
        self.again: list[int] = []
        self.damaged: list[int] = []
        self.split: list[int] = []
        self.sent: list[tuple[Header, memoryview | None]] = []
        self.dialled = True
        self.wide_area = False
        self.hello: dict[str, Any] = {}

    def send(self, header: Header, payload: memoryview | None) -> None:
        self.sent.append((header, payload))

    def consumed(self, size: int) -> None:
        self.credit += size

    def request_slice(self, key: int, index: int, round_: int) -> None:
        self.asked.append((key, index, round_))

    def ask_again(self, request: int, *, damaged: bool = False) -> None:
        (self.damaged if damaged else self.again).append(request)

    def control(self, topic: str, body: dict[str, int]) -> None:
        assert topic == "split"
        self.split.append(body["request"])

    def queues(self, header: Header) -> bool:
        return False

    def withdraw(self, header: Header) -> None:
        """Nothing is queued."""


class RecordingTransport:
    """A link's transport, whose peer returns no credit by itself; records the requests of the tensors that are sent,
    and the headers of other messages.
    """

    def __init__(self, slice_bytes: int, window_bytes: int) -> None:
        self.job, self.slice_bytes, self.window_bytes = 0, slice_bytes, window_bytes
        self.who = {"process": "this process", "incarnation": 0}
        self.counters: Counter[str] = Counter()
        self.sent: list[int] = []
        self.control: list[Header] = []

    def schedule_credit(self, link: Link) -> None:
        """Nothing is owed."""

    def on_reconnect(self, link: Link, lane: Lane) -> None:
        """Nothing is sent again."""

    def warn(self, message: str) -> None:
        """There is no log."""

    def fuses(self, link: Link) -> None:
        link.flush()

    def hand_over(self, link: Link, lane: Lane, parts: list[Any], size: int) -> None:
        header = decode_header(memoryview(parts[0]), 0)
        if lane == "tensors":
            self.sent.append(header.request)
        else:
            self.control.append(header)


class KeptDelivery:
    """Records messages instead of sending them."""

    def __init__(self) -> None:
        self.downs: list[tuple[Any, Header, memoryview | None]] = []

    def down(self, link: Any, header: Header, payload: memoryview | None) -> None:
        self.downs.append((link, header, payload))


class Bench:
    """A root with `members`, two unless given otherwise, ranked from 0."""

    def __init__(
        self,
        optimizer: str = "",
        required_contributors: Callable[[], Any] = lambda: [0, 1],
        dtype: int = 0,
        algorithm: FsaServer | None = None,
        warn: Callable[[str], None] = lambda _: None,
        compress: str = "",
        shard_of: Callable[[int], int] = lambda rank: rank,
        members: int = 2,
    ) -> None:
        self.links = [KeptLink() for _ in range(members)]
        self.delivery = KeptDelivery()
        self.dtype = dtype
        table = SliceTable(
            algorithm=algorithm or FsaServer(), roots=None, required_contributors=required_contributors,
            shard_of=shard_of,
        )  # fmt: skip
        self.rounds = Aggregator(
            delivery=self.delivery, upstream=None, own_rank=lambda: 0, table=table, warn=warn,
            below=(Compression(compress),),
        )  # fmt: skip
        self.deadlocks = DeadlockBreaker(table, lambda rank: [self.links[rank]])
        if optimizer:
            self.rounds.use(optimizers.create(optimizer, {"learning_rate": 0.1}))

    def header(self, kind: Kind, **fields: Any) -> Header:
        return Header(**{"kind": kind, "length": SIZE, "dtype": self.dtype, **fields})

    def init(self, value: Array) -> None:
        self.rounds.values.on_push(self.links[0], self.header(Kind.PUSH), value.data.cast("B"))
        self.delivery.downs.clear()

    def push(self, rank: int, number: int, array: Array, **fields: Any) -> None:
        fields = {"weight": 1.0, "contributors": (rank,), "request": 10 * number + rank, **fields}
        header = self.header(Kind.EXCHANGE, round=number, **fields)
        self.rounds.on_exchange(self.links[rank], header, array.data.cast("B"), rank)

    def results(self) -> list[tuple[int, int, Array]]:
        """(request, round, value) of the answers since the last call."""
        found = [(header.request, header.round, view(header, payload)) for _, header, payload in self.delivery.downs]
        self.delivery.downs.clear()
        return found


def gradient(rank: int, number: int) -> Array:
    return np.random.default_rng([rank, number]).standard_normal(SIZE).astype(np.float32)
