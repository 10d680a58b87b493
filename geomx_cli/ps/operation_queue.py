"""A worker's operations on tensors: when each may be sent, its messages (one for each slice), and their results."""

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from geomx_cli.core.errors import GeomxError, InvalidSettings
from geomx_cli.core.units import counted
from geomx_cli.ps.aggregation.algorithm import WorkerDelivery
from geomx_cli.ps.aggregation.codec import SliceRound
from geomx_cli.ps.aggregation.compression import Compression
from geomx_cli.ps.aggregation.upstream import OnResult, UpstreamClient
from geomx_cli.ps.arrays import Array, Arrays, SliceArrays
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.partition import Placement, Slice
from geomx_cli.ps.net.payload import Content, Rows, as_payload, form_of, numbers_payload
from geomx_cli.ps.net.wire import DTYPE_NAMES, Header, Kind, Reply
from geomx_cli.ps.result_log import ResultLog
from geomx_cli.ps.sent_contributions import SentContributions

__all__ = ["Operation", "OperationQueue", "PendingExchange"]

_NOTHING = np.empty(0, np.float32)

# One worker's exchange of one tensor: its slices are sent to the servers, and their results fill one array.


@dataclass(slots=True, eq=False)
class PendingExchange:
    """An operation's futures and its result.

    sent: set when the source may be reused.
    done: set when the result is complete, in `out` if given.
    lowest, highest: versions of the slices at the roots. They differ if parties train asynchronously.
    holds: whether the result is or will be stored here. The result of a round of rows is not.
    has_missed: whether the round, or a slice of it, was over without this worker's party. Then `out` keeps what it had.

    Any thread may use both futures. A failure of the job is set on both. Without `out` the result's slices are kept as
    received, for `copy_to`.
    """

    out: Array | None
    missing: int  # slices
    sent: "Future[None]" = field(default_factory=Future)
    done: "Future[None]" = field(default_factory=Future)
    contributors: tuple[int, ...] = ()
    weight: float = 0.0
    lowest: int = -1
    highest: int = -1
    holds: bool = True
    has_missed: bool = False
    started: float = field(default_factory=time.monotonic)
    _kept: list[tuple[int, Array]] = field(default_factory=list)

    @classmethod
    def of(cls, result: Array) -> "PendingExchange":
        """Return a finished operation with this 1-D result."""
        done = cls(None, 1)
        done.add(0, result, -1)
        return done

    def age(self) -> float:
        """Seconds since the operation began."""
        return time.monotonic() - self.started

    def add(self, offset: int, array: Array, version: int) -> None:
        """Add a slice's result; `array` stays valid as long as it is held."""
        self.lowest = version if self.lowest < 0 else min(self.lowest, version)
        self.highest = max(self.highest, version)
        if self.out is not None:
            np.copyto(self.out[offset : offset + len(array)], array)
        else:
            self._kept.append((offset, array))
        self.missing -= 1
        if self.missing == 0:
            self.sent.set_result(None)
            self.done.set_result(None)

    def copy_to(self, out: Array) -> None:
        """Copy the complete result to a 1-D array, which may be `out` itself; any thread, after `done`."""
        if self.out is not None and self.out.ctypes.data != out.ctypes.data:
            np.copyto(out, self.out)
        for offset, array in self._kept:
            np.copyto(out[offset : offset + len(array)], array)

    def release(self) -> None:
        """Free the result's memory; a later pull gets it from the servers."""
        self.holds = False
        self._kept.clear()

    def fail(self, error: Exception) -> None:
        """Fail the pending futures."""
        for future in (self.sent, self.done):
            if not future.done():
                future.set_exception(error)


# An operation on a tensor, as a client's thread gives it to the worker's loop.

@dataclass(slots=True, eq=False)
class Operation:
    """A PUSH, PULL or EXCHANGE of `src` (1-D, contiguous, or rows).

    pending: receives the result, in `out` if given.
    round: the round of an EXCHANGE; for a PULL, the last round that this worker has begun.
    reply: see wire.Reply.
    numbers: the rows requested by a PULL; None for all elements.
    in_turn: whether a PULL is sent after the result of its round has arrived and before the next round.
    pieces: the slices concerned, by index, each with its rows to send or request.
    """

    kind: Kind
    placement: Placement
    src: Content | None = None
    out: Array | None = None
    round: int = 0
    weight: float = 0.0
    priority: int = 0
    hyper: dict[str, float] = field(default_factory=dict)
    reply: Reply = Reply.FULL
    numbers: Array | None = None
    in_turn: bool = False
    pieces: list[tuple[int, Slice, Rows | None]] = field(init=False)
    pending: PendingExchange = field(init=False)

    @property
    def takes_turns(self) -> bool:
        """Whether the operation waits for the results of earlier operations on its key."""
        return self.kind == Kind.EXCHANGE or self.in_turn

    def __post_init__(self) -> None:
        self.pieces = self._cut()
        self.pending = PendingExchange(self.out, len(self.pieces), holds=self.reply == Reply.FULL)

    def _cut(self) -> list[tuple[int, Slice, Rows | None]]:
        placement, rows = self.placement, self.src if isinstance(self.src, Rows) else None
        if self.numbers is not None:
            rows = Rows(self.numbers, np.empty((len(self.numbers), 0)))
        if rows is None:
            return [(index, piece, None) for index, piece in enumerate(placement.slices)]
        cut = [rows.cut(piece.offset // placement.row, piece.end // placement.row) for piece in placement.slices]
        found = zip(range(len(cut)), placement.slices, cut, strict=True)
        return [item for item in found if self.numbers is None or len(item[2])]


@dataclass(slots=True)
class _Key:
    """One key at this worker.

    waiting: the operations in turn that are not sent yet, oldest first.
    in_flight: the operation whose results have not arrived yet.
    slices: the arrays that are kept with each slice, by index.
    """

    waiting: deque[Operation] = field(default_factory=deque)
    in_flight: Operation | None = None
    slices: defaultdict[int, SliceArrays] = field(default_factory=lambda: defaultdict(SliceArrays))


class OperationQueue:
    """Sends the operations of each key until `give_up`: one round at a time, and pulls in turn between rounds.

    So this worker has the result of a round when it contributes to the next one. Servers rely on this: they keep one
    result of each slice, and the next round closes only when all members have contributed to it.

    contributors: the ranks in each EXCHANGE; set before the first one.
    compression: this end of encoded exchanges.
    asynchronous: whether parties complete rounds separately, according to the results so far; read by any thread.
    missed: the keys whose last round was over without this worker's party; read by any thread.
    skips: whether this worker looks at `missed` after each round. If it does not, a missed round fails the job.
    sent: keeps each contribution before it is sent; None if no one needs it.
    results: keeps the results of all exchanges; None if they are not kept.
    Used by the loop's thread only.
    """

    def __init__(self, node: Node, upstream: UpstreamClient, delivery: WorkerDelivery) -> None:
        self.contributors: tuple[int, ...] = ()
        self.compression = Compression(plane="lan")
        self.asynchronous = False
        self.missed: set[int] = set()
        self.skips = False
        self.sent: SentContributions | None = None
        self.results: ResultLog | None = None
        self._node = node
        self._upstream = upstream
        self._delivery = delivery
        self._error: GeomxError | None = None
        self._open: set[Operation] = set()
        self._keys: defaultdict[int, _Key] = defaultdict(_Key)

    def start(self, operation: Operation) -> None:
        """Send all slices. A round, or a PULL in turn, waits until earlier operations on its key have their results."""
        if self._error is not None:
            operation.pending.fail(self._error)
            return
        self._open.add(operation)
        if operation.takes_turns:
            key = self._keys[operation.placement.key]
            key.waiting.append(operation)
            self._send_next(key)
        else:
            self._send(operation)

    def age(self) -> float:
        """Seconds since the oldest operation without a complete result began; 0 if there is none."""
        return max((operation.pending.age() for operation in self._open), default=0.0)

    def state(self) -> Arrays:
        """The arrays kept with the slices, in the memory in use, as KEY/INDEX/PART/NAME. Raises InvalidSettings while
        a round, or a pull in turn, has no result. Other pulls read initial values, and keep nothing.
        """
        if pending := [operation for operation in self._open if operation.takes_turns]:
            what = f"{counted(len(pending), 'operation')} on tensors without a result"
            raise InvalidSettings(what, "wait for all results before saving")
        return {
            f"{number}/{index}/{part}/{name}": array
            for number, key in self._keys.items()
            for index, slice_ in key.slices.items()
            for part, arrays in slice_.parts.items()
            for name, array in arrays.items()
        }

    def load(self, arrays: Arrays) -> None:
        """Continue with copies of the arrays of a `state`, before the first operation in turn."""
        for path, array in arrays.items():
            number, index, part, name = path.split("/", 3)
            self._keys[int(number)].slices[int(index)].part(part)[name] = array.copy()

    def give_up(self, error: GeomxError) -> None:
        """Fail all operations, and all later ones."""
        self._error = error
        for operation in self._open:
            operation.pending.fail(error)
        self._open.clear()

    def _send_next(self, key: _Key) -> None:
        if key.in_flight is None and key.waiting:
            key.in_flight = key.waiting.popleft()
            self._send(key.in_flight)

    def _send(self, operation: Operation) -> None:
        messages: Iterable[tuple[Header, memoryview | None, OnResult]] = self._messages(operation)
        if operation.kind != Kind.EXCHANGE:
            for header, payload, on_result in messages:
                self._upstream.send(self._upstream.links[header.server], header, payload, on_result)
            return
        if self.sent is not None:
            messages = list(messages)
            self.sent.keep([(header, payload) for header, payload, _ in messages])
        for header, payload, on_result in messages:
            self._delivery.up(header.server, header, payload, on_result)

    def _messages(self, operation: Operation) -> Iterator[tuple[Header, memoryview | None, OnResult]]:
        placement, place, exchanges = operation.placement, 0, operation.kind == Kind.EXCHANGE
        dtype, slices = DTYPE_NAMES.index(placement.tensor.dtype), self._keys[placement.key].slices
        contributors = self.contributors if exchanges else ()
        # A local server has the results of all rounds; in asynchronous jobs it has only its own, so ask the roots.
        round_ = 0 if operation.in_turn and not self.asynchronous else operation.round
        codec = self.compression.spec if exchanges or (operation.kind == Kind.PULL and round_) else ""
        for index, piece, rows in operation.pieces:
            header = Header(
                kind=operation.kind, key=placement.key, slice=index, root=piece.root, offset=piece.offset,
                length=piece.length, dtype=dtype, row=placement.row or 1, round=round_, contributors=contributors,
                weight=operation.weight, priority=operation.priority, hyper=operation.hyper, reply=operation.reply,
                codec=codec, follows=exchanges and self.compression.has_reference(slices[index]),
                server=piece.server, size=placement.tensor.size, shard=placement.tensor.shard,
                **({} if rows is None else form_of(rows)),
            )  # fmt: skip
            if operation.numbers is not None and rows is not None:
                payload: memoryview | None = numbers_payload(rows.numbers)
                offset, place = place, place + len(rows) * placement.row
            else:
                payload, offset = self._payload(header, operation.src, piece, rows, slices[index]), piece.offset
            on_result = self._on_result(operation, header, offset, slices[index])
            if exchanges and self.results is not None:
                if (known := self.results.find(placement.key, index, operation.round)) is not None:
                    on_result(*known)  # the result of the same contribution of an earlier life
                    continue
                on_result = self.results.keeping(on_result)
            yield header, payload, on_result

    def _payload(
        self, header: Header, src: Content | None, piece: Slice, rows: Rows | None, kept: SliceArrays
    ) -> memoryview | None:
        """The payload of a slice of `src`; `rows` are the slice's own."""
        if rows is not None:
            return as_payload(rows, header.dtype)
        if src is None or isinstance(src, Rows):
            return None
        array = src[piece.offset : piece.end]
        where = SliceRound(kept, header.dtype, header.size, header.round)
        if header.kind == Kind.EXCHANGE and (encoded := self.compression.contribution(where, array)):
            payload, about = encoded
            header.form = about["form"]
            return payload
        return as_payload(array, header.dtype)

    def _on_result(self, operation: Operation, asked: Header, offset: int, kept: SliceArrays) -> OnResult:
        pending = operation.pending

        def on_result(header: Header, found: Content) -> None:
            if header.missed_to:
                pending.has_missed, found = True, _NOTHING
                if not self.skips:
                    what = "this worker's party was left out (GEOMX_PARTY_LOSS=out), and its script cannot skip rounds"
                    self._node.fail(InvalidSettings(what, "leave GEOMX_PARTY_LOSS out: then the others wait"))
            elif asked.kind == Kind.EXCHANGE:
                found = self.compression.value_of(kept, found, asked.dtype, header.form)
            elif asked.kind == Kind.PULL and not asked.round:
                found = self.compression.pulled(kept, header, found)
            pending.contributors, pending.weight = header.contributors, header.weight
            self.asynchronous |= header.asynchronous  # acknowledgements of initial values do not tell
            if asked.kind == Kind.EXCHANGE and pending.missing == 1:
                (self.missed.add if pending.has_missed else self.missed.discard)(asked.key)
            pending.add(offset, found.values.reshape(-1) if isinstance(found, Rows) else found, header.value)
            if pending.missing == 0:
                self._complete(operation)

        return on_result

    def _complete(self, operation: Operation) -> None:
        """All results of this operation have arrived."""
        self._open.discard(operation)
        self._node.encoded = {self.compression.plane: self.compression.bytes}
        if operation.kind == Kind.EXCHANGE and operation.weight:  # the others' last rounds are none of its own
            self._node.telemetry.round = max(operation.round, self._node.telemetry.round)
        if operation.takes_turns:
            key = self._keys[operation.placement.key]
            key.in_flight = None
            self._send_next(key)
