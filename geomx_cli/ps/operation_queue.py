"""A worker's operations on tensors: when each may be sent, its messages, one per slice, and their results."""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from geomx_cli.core.errors import GeomxError
from geomx_cli.ps.aggregation.codec import SliceRound
from geomx_cli.ps.aggregation.delivery_interface import WorkerDelivery
from geomx_cli.ps.aggregation.upstream import OnResult, UpstreamClient
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.partition import Slice
from geomx_cli.ps.net.payload import Content, as_payload, digest, form_of, numbers_payload
from geomx_cli.ps.net.rows import Rows
from geomx_cli.ps.net.wire import DTYPE_NAMES, MAX_ROUNDS_AHEAD, Header, Kind
from geomx_cli.ps.operation import Operation

__all__ = ["OperationQueue"]


@dataclass(slots=True)
class _KeyState:
    """waiting: the operations not yet sent, in order. rounds: those in flight, ascending. done: the last round whose
    result has arrived. pulls: those in flight that the next round waits for.
    """

    waiting: deque[Operation] = field(default_factory=deque)
    rounds: list[int] = field(default_factory=list)
    done: int = 0
    pulls: int = 0

    def may_send(self, operation: Operation) -> bool:
        if operation.in_turn:
            return operation.round <= self.done
        # Count from the oldest missing result, as servers do: after a cut, later results may arrive first.
        oldest = self.rounds[0] if self.rounds else operation.round
        return not self.pulls and operation.round < oldest + MAX_ROUNDS_AHEAD

    def begin(self, operation: Operation) -> None:
        if operation.in_turn:
            self.pulls += 1
        else:
            self.rounds.append(operation.round)

    def end(self, operation: Operation) -> None:
        if operation.in_turn:
            self.pulls -= 1
        else:
            self.rounds.remove(operation.round)
            self.done = max(operation.round, self.done)


class OperationQueue:
    """Sends the operations of each key, in order, until `give_up`. Used by the loop's thread only.

    contributors: the ranks in each EXCHANGE; set before the first. asynchronous: whether parties complete rounds
    separately, according to the results so far; read by any thread. plane: that in which the servers are.
    """

    def __init__(self, node: Node, upstream: UpstreamClient, delivery: WorkerDelivery) -> None:
        self.contributors: tuple[int, ...] = ()
        self.asynchronous = False
        self.plane: Literal["lan", "wan"] = "lan"
        self._node = node
        self._upstream = upstream
        self._compression = upstream.compression
        self._delivery = delivery
        self._error: GeomxError | None = None
        self._open: set[Operation] = set()
        self._keys: dict[int, _KeyState] = {}

    def start(self, operation: Operation) -> None:
        """Send all slices; a round too far ahead of the received results, and a PULL in turn, wait for results."""
        if self._error is not None:
            operation.pending.fail(self._error)
            return
        self._open.add(operation)
        if operation.kind == Kind.EXCHANGE or operation.in_turn:
            state = self._keys.setdefault(operation.placement.key, _KeyState())
            state.waiting.append(operation)
            self._send_ready(state)
        else:
            self._send(operation)

    def age(self) -> float:
        """Seconds since the oldest operation without a complete result began; 0 if there is none."""
        return max((operation.pending.age() for operation in self._open), default=0.0)

    def give_up(self, error: GeomxError) -> None:
        """Fail all operations, and those still to come."""
        self._error = error
        for operation in self._open:
            operation.pending.fail(error)
        self._open.clear()

    def _send_ready(self, state: _KeyState) -> None:
        """Send the operations of this key that need not wait any more."""
        while state.waiting and state.may_send(state.waiting[0]):
            operation = state.waiting.popleft()
            state.begin(operation)
            self._send(operation)

    def _send(self, operation: Operation) -> None:
        placement, place = operation.placement, 0
        dtype = DTYPE_NAMES.index(placement.tensor.dtype)
        contributors = self.contributors if operation.kind == Kind.EXCHANGE else ()
        # A local server has the results of all rounds; in asynchronous jobs it has only its own, so ask the roots.
        round_ = 0 if operation.in_turn and not self.asynchronous else operation.round
        codec = self._compression.spec if operation.kind == Kind.PULL and round_ else ""
        for index, piece, rows in operation.pieces:
            header = Header(
                kind=operation.kind, key=placement.key, slice=index, root=piece.root, offset=piece.offset,
                length=piece.length, dtype=dtype, row=placement.row or 1, round=round_, contributors=contributors,
                weight=operation.weight, priority=operation.priority, hyper=operation.hyper, reply=operation.reply,
                codec=codec, server=piece.server, size=placement.tensor.size, shard=placement.tensor.shard,
                **({} if rows is None else form_of(rows)),
            )  # fmt: skip
            if operation.numbers is not None and rows is not None:
                payload: memoryview | None = numbers_payload(rows.numbers)
                offset, place = place, place + len(rows) * placement.row
            else:
                payload, offset = self._payload(header, operation.src, piece, rows), piece.offset
            if operation.by_digest and payload is not None:
                header.digest = digest(payload, dtype)
            on_result = self._taker(operation, offset)
            if operation.kind == Kind.EXCHANGE:
                self._delivery.up(piece.server, header, payload, on_result)
            else:
                self._upstream.send(self._upstream.links[piece.server], header, payload, on_result)

    def _payload(self, header: Header, src: Content | None, piece: Slice, rows: Rows | None) -> memoryview | None:
        """The payload of a slice of `src`; `rows` are the slice's own."""
        if rows is not None:
            return as_payload(rows, header.dtype)
        if src is None or isinstance(src, Rows):
            return None
        array = src[piece.offset : piece.end]
        where = SliceRound(header.key, header.slice, header.dtype, header.size, header.round)
        if header.kind == Kind.EXCHANGE and (encoded := self._compression.contribution(where, array)):
            payload, about = encoded
            header.form, header.checksum, header.codec = about["form"], about["checksum"], self._compression.spec
            return payload
        return as_payload(array, header.dtype)

    def _taker(self, operation: Operation, offset: int) -> OnResult:
        pending = operation.pending

        def take(header: Header, found: Content) -> None:
            pending.contributors, pending.weight = header.contributors, header.weight
            self.asynchronous |= header.asynchronous  # acknowledgements of initial values do not tell
            pending.take(offset, found.values.reshape(-1) if isinstance(found, Rows) else found, header.value)
            if pending.missing == 0:
                self._end(operation)

        return take

    def _end(self, operation: Operation) -> None:
        """All results of this operation have arrived."""
        self._open.discard(operation)
        self._node.encoded = {self.plane: self._compression.bytes}
        if operation.kind == Kind.EXCHANGE and operation.weight:  # the others' last rounds are none of its own
            self._node.telemetry.round = max(operation.round, self._node.telemetry.round)
        if operation.kind == Kind.EXCHANGE or operation.in_turn:
            state = self._keys[operation.placement.key]
            state.end(operation)
            self._send_ready(state)
