"""A worker in the cluster: its node, its servers and pending operations. Loop's thread only; see client.py."""

import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from geomx_cli.core.errors import GeomxError, InvalidSettings, PeerLost, TimedOut
from geomx_cli.core.events import EventLog
from geomx_cli.ps.aggregation.codec import SliceRound, complete_spec
from geomx_cli.ps.aggregation.compression import Compression
from geomx_cli.ps.aggregation.delivery import WorkerDelivery
from geomx_cli.ps.aggregation.upstream import OnResult, UpstreamClient
from geomx_cli.ps.cluster.config import NodeSettings
from geomx_cli.ps.cluster.liveness import NEWS, newest
from geomx_cli.ps.cluster.members import CENTRAL
from geomx_cli.ps.cluster.membership import Membership
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.partition import Placement, Slice
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.net.link import Lane, Link
from geomx_cli.ps.net.payload import Array, Content, as_payload, dtype_code, form_of, numbers_payload
from geomx_cli.ps.net.rows import Rows
from geomx_cli.ps.net.wire import MAX_ROUNDS_AHEAD, BadMessage, Header, Kind, Reply
from geomx_cli.ps.peers import Peers
from geomx_cli.ps.pending_exchange import PendingExchange

__all__ = ["Operation", "Worker", "WorkerInfo"]

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's position in the job. `contributor` is the rank under which its servers know it.

    `at_root`: its servers are the roots. `flat`: there is no other plane. `master_trains`: whether the job's master
    trains.
    """

    rank: int
    global_rank: int
    party_index: int
    num_all_workers: int
    trains: bool
    contributor: int
    at_root: bool
    flat: bool
    master_trains: bool


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation on a tensor: a PUSH, PULL or EXCHANGE of `src` (1-D, contiguous, or rows).

    round: of an EXCHANGE; of a PULL the last one that this worker has begun. reply: see wire.Reply. numbers: the rows
    requested by a PULL, None for all elements. in_turn: a PULL is sent after the result of its round has arrived and
    before the next round.
    """

    kind: Kind
    placement: Placement
    src: Content | None = None
    round: int = 0
    weight: float = 0.0
    priority: int = 0
    hyper: dict[str, float] = field(default_factory=dict)
    reply: Reply = Reply.FULL
    numbers: Array | None = None
    in_turn: bool = False

    def pieces(self) -> list[tuple[int, Slice, Rows | None]]:
        """The slices concerned, by index, each with its rows to send or request."""
        placement, rows = self.placement, self.src if isinstance(self.src, Rows) else None
        if self.numbers is not None:
            rows = Rows(self.numbers, np.empty((len(self.numbers), 0)))
        if rows is None:
            return [(index, piece, None) for index, piece in enumerate(placement.slices)]
        cut = [rows.cut(piece.offset // placement.row, piece.end // placement.row) for piece in placement.slices]
        found = zip(range(len(cut)), placement.slices, cut, strict=True)
        return [item for item in found if self.numbers is None or len(item[2])]


class Worker:
    """`ready` gets the WorkerInfo once connected; `ends` is set when the worker has said goodbye, after all workers
    that dial it, or has failed. `error`: why no further operation is possible, if so. `asynchronous`: whether parties
    complete rounds separately, according to the results so far.

    `run` is the thread's body; call the other methods in its loop. When it ends, pending and later operations fail with
    `error`.
    """

    def __init__(self, settings: NodeSettings, events: EventLog, delivery: WorkerDelivery) -> None:
        if settings.local is None:
            raise InvalidSettings("a worker needs a plane", "set DMLC_PS_ROOT_URI")
        self.ready: Future[WorkerInfo] = Future()
        self.ends: Future[None] = Future()
        self.error: GeomxError | None = None
        self.asynchronous = False
        self.peers = Peers(settings.local, delivery.peers(settings.local.workers))
        self.compression = Compression()
        self.upstream = UpstreamClient(self.compression)
        self.open: set[PendingExchange] = set()
        self.node = Node(
            settings, events, on_tensor=self._on_tensor, on_request=self._on_request, on_link=self._arrive,
            on_reconnect=self._come_back, on_asked=self._on_asked,
        )  # fmt: skip
        self._delivery = delivery
        delivery.begin(self.node, self.upstream, self.peers.links)
        self._settings = settings
        self._plane = settings.local
        self._rank = -1
        self._voice: tuple[int, ...] = ()
        self._done: dict[int, int] = {}  # the last round of each key whose result has arrived
        self._missing: dict[int, list[int]] = {}  # per key: the rounds in flight, ascending
        # per key: the operations that wait, in order
        self._later: dict[int, deque[tuple[PendingExchange, Operation]]] = {}
        self._pulls: dict[int, int] = {}  # per key: how many pulls the next round waits for

    def run(self) -> None:
        """Run the worker until it is stopped or the job fails."""
        error: GeomxError = InvalidSettings("this worker has left the job", "close it last")
        try:
            endpoints = self.peers.listen(self.node)
            self.node.join(
                self._plane, "worker", self._dial_servers, rank=self._settings.rank, endpoints=endpoints
            )
            self.node.loop.every(1.0, self._check_patience)
            self.node.run()
        except GeomxError as caught:
            error = caught
        except Exception as caught:
            error = PeerLost(f"the client's loop failed: {caught!r}")
            raise
        finally:
            self._give_up(error)
            self.node.close()

    def start(self, exchange: PendingExchange, operation: Operation) -> None:
        """Queue all slices of a tensor; a round too far ahead of the received results waits for them."""
        if self.error is not None:
            exchange.fail(self.error)
            return
        self.open.add(exchange)
        if operation.kind == Kind.EXCHANGE or operation.in_turn:
            self._later.setdefault(operation.placement.key, deque()).append((exchange, operation))
            self._go_on(operation.placement.key)
        else:
            self._send(exchange, operation)

    def _go_on(self, key: int) -> None:
        """Send the operations of this key that need not wait any more."""
        later, done = self._later[key], self._done.get(key, 0)
        while later:
            exchange, operation = later[0]
            if operation.in_turn:
                if operation.round > done:
                    return
                self._pulls[key] = self._pulls.get(key, 0) + 1
            else:
                # Count from the oldest missing result, as servers do: after a cut, later results may arrive first.
                missing = self._missing.setdefault(key, [])
                if self._pulls.get(key) or operation.round >= (missing or [operation.round])[0] + MAX_ROUNDS_AHEAD:
                    return
                missing.append(operation.round)
            later.popleft()
            self._send(exchange, operation)

    def _send(self, exchange: PendingExchange, operation: Operation) -> None:
        placement, place = operation.placement, 0
        dtype = dtype_code(np.dtype(placement.tensor.dtype))
        voice = self._voice if operation.kind == Kind.EXCHANGE else ()
        # A local server has the results of all rounds; in asynchronous jobs it has only its own, so ask the roots.
        round_ = 0 if operation.in_turn and not self.asynchronous else operation.round
        codec = self.compression.spec if operation.kind == Kind.PULL and round_ else ""
        for index, piece, rows in operation.pieces():
            header = Header(
                kind=operation.kind, key=placement.key, slice=index, root=piece.root, offset=piece.offset,
                length=piece.length, dtype=dtype, row=placement.row or 1, round=round_, contributors=voice,
                weight=operation.weight, priority=operation.priority, hyper=operation.hyper, reply=operation.reply,
                codec=codec, server=piece.server, size=placement.tensor.size, **({} if rows is None else form_of(rows)),
            )  # fmt: skip
            if operation.numbers is not None and rows is not None:
                payload: memoryview | None = numbers_payload(rows.numbers)
                offset, place = place, place + len(rows) * placement.row
            else:
                payload, offset = self._payload(header, operation.src, piece, rows), piece.offset
            on_result = self._taker(exchange, operation, offset)
            if operation.kind == Kind.EXCHANGE:
                self._delivery.up(piece.server, header, payload, on_result)
            else:
                self.upstream.send(self.upstream.links[piece.server], header, payload, on_result)

    def _payload(self, header: Header, src: Content | None, piece: Slice, rows: Rows | None) -> memoryview | None:
        """The payload of a slice of `src`; `rows` are the slice's own."""
        if rows is not None:
            return as_payload(rows, header.dtype)
        if src is None or isinstance(src, Rows):
            return None
        array = src[piece.offset : piece.end]
        where = SliceRound(header.key, header.slice, header.dtype, header.size, header.round)
        if header.kind == Kind.EXCHANGE and (encoded := self.compression.contribution(where, array)):
            payload, about = encoded
            header.form, header.checksum = about["form"], about["checksum"]
            return payload
        return as_payload(array, header.dtype)

    def ask(self, future: "Future[Body]", topic: str, body: Body, server: int, limit: float) -> None:
        """Send a request to one server; the answer goes to `future`. At a barrier the limit counts from the last
        progress.
        """
        if self.error is not None:
            future.set_exception(self.error)
        else:
            link = self.upstream.links[server]
            self.node.talk.ask(
                link, topic, body, future.set_result, future.set_exception, limit,
                "idle" if topic == "barrier" else "alive",
            )  # fmt: skip

    def leave(self) -> None:
        """This worker contributes no more."""
        if self.error is None:
            self._delivery.leave()

    def goodbye(self) -> None:
        """Say goodbye once all workers that dial this one have; `run` returns when every peer knows."""
        if self.error is None:
            self.peers.when_gone(self._say_goodbye)

    def _say_goodbye(self) -> None:
        self.node.goodbye([*self.upstream.links, *self.peers.dialled()])
        if not self.ends.done():
            self.ends.set_result(None)

    def _give_up(self, error: GeomxError) -> None:
        self.error = error
        for exchange in self.open:
            exchange.fail(error)
        self.open.clear()
        self.node.talk.give_up(error)
        if not self.ready.done():
            self.ready.set_exception(error)
        if not self.ends.done():
            self.ends.set_result(None)

    def _taker(self, exchange: PendingExchange, operation: Operation, offset: int) -> OnResult:
        key = operation.placement.key

        def take(header: Header, found: Content) -> None:
            exchange.contributors, exchange.weight = header.contributors, header.weight
            self.asynchronous = header.asynchronous
            array = found.values.reshape(-1) if isinstance(found, Rows) else found
            exchange.take(offset, array, header.value)
            if exchange.missing == 0:
                self.open.discard(exchange)
                self.node.encoded = self.compression.bytes
                if operation.kind == Kind.EXCHANGE:
                    self.node.telemetry.round = max(operation.round, self.node.telemetry.round)
                    self._done[key] = max(operation.round, self._done.get(key, 0))
                    self._missing[key].remove(operation.round)
                    self._go_on(key)
                elif operation.in_turn:
                    self._pulls[key] -= 1
                    self._go_on(key)

        return take

    def _dial_servers(self, membership: Membership) -> None:
        self._rank = membership.rank
        for member in membership.servers():
            link = self.node.transport.dial(
                member.endpoint_for(self._settings.host, self._settings.party), member.process,
                wide_area=member.party != self._settings.party, plane="local", rank=self._rank,
            )  # fmt: skip
            self.upstream.links.append(link)
            self.node.liveness.watch(link)
        self.peers.join(self.node, membership)
        asked = {"rank_scope": self._settings.text("rank_scope")}
        self.node.talk.ask(self.upstream.links[0], "cluster", asked, self._on_cluster, self.node.fail)

    def _on_cluster(self, body: Body) -> None:
        flat, at_root, trains = bool(body["flat"]), bool(body["root"]), bool(body["trains"])
        if not trains and self._settings.text("rank_scope") == "global":
            what = "with GEOMX_RANK_SCOPE=global the worker of global rank 0 is the master, and there is no other"
            hint = "leave out the central party's scheduler and worker, or set DMLC_ENABLE_CENTRAL_WORKER=1 there"
            self.node.fail(InvalidSettings(what, hint))
            return
        workers = [int(count) for count in body["workers"]]
        central = at_root and not flat
        planned = self._settings.party_index
        party_index = -1 if central else int(body["party_index"])  # in a flat cluster only the plan knows parties
        if flat and planned is not None:
            party_index = planned
        before = 0 if flat else sum(workers if central else workers[:party_index])
        contributor = self._rank + CENTRAL if central else self._rank
        self._voice = (contributor,)
        if flat:
            spec, smallest = self._settings.text("compress"), int(self._settings.number("compress_min"))
            self.compression.set(complete_spec(spec, smallest))
        info = WorkerInfo(
            rank=self._rank,
            global_rank=before + self._rank if trains else -1,
            party_index=party_index,
            num_all_workers=sum(workers) + int(body["central"]),
            trains=trains,
            contributor=contributor,
            at_root=at_root,
            flat=flat,
            master_trains=flat or int(body["central"]) > 0,
        )
        self.peers.when_here(lambda: self._begin(info))

    def _begin(self, info: WorkerInfo) -> None:
        self.node.telemetry.state = "training"
        self.ready.set_result(info)

    def _check_patience(self) -> None:
        """Fail if a round is pending and nothing has moved for longer than the option `patience`."""
        moved = newest([*self.upstream.links, *self.peers.links.values()])
        limit, idle = self._settings.number("patience"), time.monotonic() - moved
        if any(min(item.age(), idle) > limit + NEWS for item in self.open):
            message = f"waited {limit:g} s for the result of a round"
            self.node.fail(TimedOut(message, "is a worker stuck, or out of step?"))

    def _arrive(self, link: Link) -> None:
        self.peers.arrive(self.node, link)

    def _come_back(self, link: Link, lane: Lane) -> None:
        self.upstream.repeat(link, lane)
        self._delivery.on_reconnect(link, lane)

    def _on_tensor(self, link: Link, header: Header, payload: memoryview | None) -> None:
        if self._delivery.receive(link, header, payload):
            return
        if header.kind != Kind.RESULT:
            raise BadMessage(f"a {header.kind.name} for a worker")
        self.upstream.on_result(link, header, payload)

    def _on_asked(self, link: Link, header: Header) -> None:
        if header.topic == "again":
            self.upstream.again(link, header.request)
        else:
            self._delivery.on_asked(link, header)

    def _on_request(self, request: Request) -> None:
        if request.topic == "bye":
            self.peers.on_bye(self.node, request)
        elif not self._delivery.on_request(request):
            raise BadMessage(f"unknown topic {request.topic!r} for a worker")
