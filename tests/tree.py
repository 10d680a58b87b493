"""The servers of a job in one process: the rounds of local servers and roots and the messages between, without sockets.

Messages arrive in the order of sending, contributions in the order given by a test.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from geomx_cli.contract.codecs import has_momentum
from geomx_cli.ps.aggregation.aggregator import Aggregator
from geomx_cli.ps.aggregation.algorithm import ServerAlgorithm
from geomx_cli.ps.aggregation.codec import SliceRound
from geomx_cli.ps.aggregation.compression import Compression
from geomx_cli.ps.aggregation.slices import SliceState, SliceTable
from geomx_cli.ps.aggregation.upstream import OnResult, UpstreamClient
from geomx_cli.ps.arrays import Array, SliceArrays
from geomx_cli.ps.cluster.members import CENTRAL
from geomx_cli.ps.net.payload import DTYPES, Content, Rows, as_payload, cast, content, form_of, numbers_payload
from geomx_cli.ps.net.wire import Form, Header, Kind, Reply
from geomx_cli.ps.optim import optimizers

Who = tuple[int, int]
"""Party and rank in it; party -1 has the central workers, which push to the roots."""
Slice = tuple[int, int]
"""Key and index; slices of index 1 belong to root 1, where there is one."""
Take = Callable[[Header, memoryview | None], None]


@dataclass(eq=False)
class Delivery:
    """A node's delivery: queues messages until all are carried to the other ends."""

    sent: deque[Callable[[], None]]
    upstream: UpstreamClient | None

    def up(self, server: int, header: Header, payload: memoryview | None, on_result: OnResult) -> None:
        assert self.upstream is not None
        self.upstream.send(self.upstream.links[server], header, payload, on_result)

    def down(self, link: "Wire", header: Header, payload: memoryview | None) -> None:
        self.sent.append(partial(link.down, header, payload))


def _nowhere(header: Header, payload: memoryview | None) -> None:
    pass


@dataclass(eq=False)
class Wire:
    """A link: handlers for messages at its upper and its lower (dialling) end, and for requests to send again."""

    name = "the member"
    up: Take = _nowhere
    down: Take = _nowhere
    again: Callable[[int], None] = lambda _: None
    sent: deque[Callable[[], None]] = field(default_factory=deque)
    hello: dict[str, Any] = field(default_factory=dict)
    dialled = True
    unread = 0

    def send(self, header: Header, payload: memoryview | None) -> None:
        self.sent.append(partial(self.up, header, payload))

    def ask_again(self, request: int, *, damaged: bool = False) -> None:
        self.sent.append(partial(self.again, request))

    def queues(self, header: Header) -> bool:
        return False

    def withdraw(self, header: Header) -> None:
        """Nothing is queued."""

    def consumed(self, size: int) -> None:
        """Windows are not tested here."""


@dataclass(frozen=True)
class Result:
    """A member's result: the value, or some rows of it, with the round, the version at the root and the weight."""

    value: Any
    round: int
    version: int
    weight: float
    contributors: tuple[int, ...]


@dataclass(eq=False)
class Node:
    """A server, the ranks of its remaining members, its client of the roots, if it is none, and all links."""

    rounds: Aggregator
    members: list[int]
    upstream: UpstreamClient | None = None
    wires: dict[int, Wire] = field(default_factory=dict)


@dataclass(eq=False)
class _Client:
    """A worker that encodes: its end of the exchanges, and the arrays that it keeps with each slice."""

    compression: Compression
    upstream: UpstreamClient = field(default_factory=UpstreamClient)
    slices: defaultdict[Slice, SliceArrays] = field(default_factory=lambda: defaultdict(SliceArrays))


class Tree:
    """Local servers of `parties` (numbers of workers) below `roots`; `part(workers, is_root)` makes their algorithm.

    Every slice has `size` elements in rows of `row`, and its tensor `tensor`. `crossed` has the bytes of each payload
    between parties. With `compress_lan` workers encode, their results are decoded, and `inside` has the bytes of their
    payloads. clients: workers repeat their requests, as those that encode do.
    """

    def __init__(
        self, parties: Sequence[int], part: Callable[[int, bool], ServerAlgorithm], *, central: int = 0, roots: int = 1,
        size: int = 8, dtype: str = "float32", row: int = 1, compress: str = "", tensor: int = 0,
        compress_lan: str = "", clients: bool = False,
    ) -> None:  # fmt: skip
        self._compress, self._compress_lan = compress, compress_lan
        self._has_clients = clients or bool(compress_lan)
        self._clients: dict[Who, _Client] = {}
        code = [str(kind) for kind in DTYPES].index(dtype)
        self._shape = {"length": size, "dtype": code, "row": row, "size": tensor}
        self.crossed: list[int] = []
        self.inside: list[int] = []
        self._gradients = not part(1, True).starts_from_value
        self._sent: deque[Callable[[], None]] = deque()
        self._got: dict[tuple[Who, Slice], list[Result]] = {}
        ranks = [*range(len(parties)), *(CENTRAL + rank for rank in range(central))]
        self.roots = [self._node(part(1, True), list(ranks), None) for _ in range(roots)]
        self.servers = [self._server(party, part(workers, False), workers) for party, workers in enumerate(parties)]
        for root in self.roots:
            root.wires |= {CENTRAL + rank: self._worker((-1, rank), root) for rank in range(central)}

    def use(self, name: str, **params: float) -> "Tree":
        """Have the roots run an optimizer."""
        for root in self.roots:
            root.rounds.use(optimizers.create(name, params))
        return self

    def init(self, value: Array, where: Slice = (0, 0)) -> None:
        """Set the initial value of a slice, at its root."""
        self._root(where).rounds.values.on_push(Wire(), self._header(Kind.PUSH, where), _bytes(value))  # type: ignore[arg-type]
        self._run()

    def push(
        self, who: Who, number: int, value: Content | None, where: Slice = (0, 0), weight: float = 1.0,
        reply: Reply | None = None, hyper: dict[str, float] | None = None,
    ) -> None:  # fmt: skip
        """Send a worker's contribution to a round; without a value it abstains. A contribution of rows wants no result.
        """
        node, rank = self._above(who, where)
        given = {} if value is None else form_of(value)
        if reply is None:
            reply = Reply.NONE if given else Reply.FULL
        header = self._header(
            Kind.EXCHANGE, where, round=number, contributors=(rank,), weight=0.0 if value is None else weight,
            reply=reply, hyper=hyper or {}, **given,
        )  # fmt: skip
        payload = None if value is None else _bytes(value if isinstance(value, Rows) else value.copy())
        client = self._clients.get(who)
        if client is None:
            node.rounds.on_exchange(node.wires[rank], header, payload, rank)  # type: ignore[arg-type]
        else:
            self._send(client, who, header, payload, value)
        self._run()

    def _send(
        self, client: "_Client", who: Who, header: Header, payload: memoryview | None, value: Content | None
    ) -> None:
        """Send for a worker that encodes."""
        kept, compression = client.slices[header.key, header.slice], client.compression
        exchanges = header.kind == Kind.EXCHANGE
        if exchanges:
            header.codec, header.follows = compression.spec, compression.has_reference(kept)
        if exchanges and isinstance(value, np.ndarray):
            encoded = compression.contribution(SliceRound(kept, header.dtype, header.size, header.round), value)
            if encoded is not None:
                payload, header.form = encoded[0], encoded[1]["form"]

        def take(result: Header, found: Content) -> None:
            if exchanges:
                found = compression.value_of(kept, found, header.dtype, result.form)
            elif not header.round:
                found = compression.pulled(kept, result, found)
            self._keep(who, result, found)

        node, rank = self._above(who, (header.key, header.slice))
        client.upstream.send(node.wires[rank], header, payload, take)  # type: ignore[arg-type]

    def pull(self, who: Who, where: Slice = (0, 0), number: int = 0, rows: Array | None = None) -> None:
        """Pull the value, or some rows of it, for a worker that has begun round `number`."""
        node, rank = self._above(who, where)
        fields = {} if rows is None else {"form": Form.ROWS, "rows": len(rows)}
        header, payload = self._header(Kind.PULL, where, round=number, **fields), None
        if rows is not None:
            payload = numbers_payload(rows)
        client = self._clients.get(who)
        if client is None:
            node.rounds.values.on_pull(node.wires[rank], header, rank, payload)  # type: ignore[arg-type]
        else:
            header.codec = self._compress_lan if number else ""
            self._send(client, who, header, payload, None)
        self._run()

    def leave(self, who: Who) -> None:
        """Let a worker leave; its party leaves with its last worker."""
        party, rank = who
        if party < 0:
            left = [(root, CENTRAL + rank) for root in self.roots]
        else:
            left = [(self.servers[party], rank)]
            left += [(root, party) for root in self.roots if self.servers[party].members == [rank]]
        for node, member in left:
            node.members.remove(member)
            node.rounds.members_changed()
        self._run()

    def got(self, who: Who, where: Slice = (0, 0)) -> list[Result]:
        """All results of a slice that a worker has received, in order."""
        return self._got.get((who, where), [])

    def last(self, who: Who, where: Slice = (0, 0)) -> Any:
        """The newest value of a slice that a worker has."""
        return self.got(who, where)[-1].value

    def _commit(self, rounds: Aggregator, entry: SliceState) -> None:
        """Nothing is saved here."""

    def _run(self) -> None:
        while self._sent:
            self._sent.popleft()()

    def _root(self, where: Slice) -> Node:
        return self.roots[where[1] % len(self.roots)]

    def _above(self, who: Who, where: Slice) -> tuple[Node, int]:
        """A worker's server for a slice, and the worker's contributing rank there."""
        party, rank = who
        return (self._root(where), CENTRAL + rank) if party < 0 else (self.servers[party], rank)

    def _server(self, party: int, part: ServerAlgorithm, workers: int) -> Node:
        gradients = self._gradients and not has_momentum(self._compress_lan)
        upstream, above = UpstreamClient(), Compression(self._compress, gradients=gradients)
        for root in self.roots:
            wire = root.wires.setdefault(party, Wire(sent=self._sent))
            self._connect(wire, root, party, upstream)
        node = self._node(part, list(range(workers)), upstream, party, above)
        node.wires = {rank: self._worker((party, rank), node) for rank in range(workers)}
        return node

    def _connect(self, wire: Wire, root: Node, party: int, upstream: UpstreamClient) -> None:
        """Connect a local server with a root."""
        wire.up = partial(self._at_root, root, party)
        wire.down = partial(self._below_root, upstream, wire)
        wire.again = partial(upstream.again, wire)
        upstream.links.append(wire)  # type: ignore[arg-type]

    def _node(
        self, part: ServerAlgorithm, members: list[int], upstream: UpstreamClient | None, party: int = 0,
        above: Compression | None = None,
    ) -> Node:  # fmt: skip
        wan = [Compression(self._compress)] if upstream is None else []
        rounds = Aggregator(
            commit=lambda entry: self._commit(rounds, entry), above=above,
            below=[*wan, Compression(self._compress_lan, "lan")],
            delivery=Delivery(self._sent, upstream), upstream=upstream, own_rank=lambda: party,  # type: ignore[arg-type]
            table=SliceTable(
                algorithm=part, roots=None if upstream is None else lambda: len(upstream.links),
                required_contributors=lambda: members, cohort_of=lambda rank: min(rank, CENTRAL) + 1,
            ),
        )  # fmt: skip
        return Node(rounds, members, upstream)

    def _at_root(self, root: Node, party: int, header: Header, payload: memoryview | None) -> None:
        self.crossed.append(0 if payload is None else len(payload))
        _take(root, root.wires[party], party, header, payload)

    def _below_root(self, upstream: UpstreamClient, wire: Wire, header: Header, payload: memoryview | None) -> None:
        self.crossed.append(0 if payload is None else len(payload))
        upstream.on_result(wire, header, payload)  # type: ignore[arg-type]

    def _worker(self, who: Who, node: Node) -> Wire:
        wire = Wire(down=lambda header, payload: self._keep(who, header, content(header, payload)), sent=self._sent)
        if self._has_clients:
            client = _Client(Compression(self._compress_lan, "lan", gradients=self._gradients))
            self._clients[who] = client
            wire.up = partial(self._at_server, node, wire, who)
            wire.down = partial(self._below_server, client.upstream, wire)
            wire.again = partial(client.upstream.again, wire)
        return wire

    def _keep(self, who: Who, header: Header, found: Content) -> None:
        value = cast(found, header.dtype) if isinstance(found, np.ndarray) else found
        result = Result(value, header.round, header.value, header.weight, header.contributors)
        self._got.setdefault((who, (header.key, header.slice)), []).append(result)

    def _at_server(self, node: Node, wire: Any, who: Who, header: Header, payload: memoryview | None) -> None:
        rank = who[1] if who[0] >= 0 else CENTRAL + who[1]
        self.inside.append(0 if payload is None else len(payload))
        _take(node, wire, rank, header, payload)

    def _below_server(self, client: UpstreamClient, wire: Any, header: Header, payload: memoryview | None) -> None:
        self.inside.append(0 if payload is None else len(payload))
        client.on_result(wire, header, payload)

    def _header(self, kind: Kind, where: Slice, **fields: Any) -> Header:
        key, index = where
        return Header(kind=kind, key=key, slice=index, root=index % len(self.roots), **self._shape, **fields)


def _take(node: Node, wire: Any, rank: int, header: Header, payload: memoryview | None) -> None:
    if header.kind == Kind.PULL:
        node.rounds.values.on_pull(wire, header, rank, payload)
    else:
        node.rounds.on_exchange(wire, header, payload, rank)


def _bytes(value: Content) -> memoryview:
    dtype = DTYPES.index(value.values.dtype if isinstance(value, Rows) else value.dtype)
    return as_payload(value, dtype)
