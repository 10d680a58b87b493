"""A worker's interface to the parameter server: declare, init, exchange, pull, barrier. Buffers in, futures out.

The client has one thread, which runs the worker's loop; public methods may be called from any thread. Every wait has a
limit: the option `patience` for rounds and barriers, `timeout` for everything else. The failure of any process of the
job ends all waits with PeerLost, which every later call raises again.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import numpy as np

from geomx_cli.core.errors import GeomxError, InvalidSettings, TimedOut
from geomx_cli.core.events import EventLog, Traffic
from geomx_cli.ps.aggregation.codec import complete_spec
from geomx_cli.ps.aggregation.delivery import WorkerDelivery
from geomx_cli.ps.cluster.config import NodeSettings
from geomx_cli.ps.cluster.liveness import NEWS, newest
from geomx_cli.ps.cluster.partition import Placement, Slice, Tensor
from geomx_cli.ps.net.payload import Array, Content
from geomx_cli.ps.net.rows import Rows
from geomx_cli.ps.net.wire import MAX_HYPER, Kind, Reply
from geomx_cli.ps.pending_exchange import PendingExchange
from geomx_cli.ps.worker import Operation, Worker, WorkerInfo

__all__ = ["Client"]

Body = dict[str, Any]

MAX_OPEN = 4096
"""Rounds of one key that may be begun and without a result."""


class Client:
    """A worker's connection to the parameter server; connected when the constructor returns.

    rank, num_workers: within the party's plane. party_index: -1 for the central party. global_rank: over all training
    workers, -1 for a master worker that does not train. num_all_workers: training workers of the job. flat: whether
    there is only one plane. trains: whether this worker may contribute. is_master: whether it configures the servers
    and provides the initial values; in a flat cluster that is rank 0, and with the option rank_scope "global" it is
    global rank 0.
    """

    def __init__(self, settings: NodeSettings, events: EventLog, delivery: WorkerDelivery) -> None:
        self.settings = settings
        self.events = events
        self.party = settings.party
        self._worker = Worker(settings, events, delivery)
        self.process = self._worker.node.process
        self._placements: dict[str, Placement] = {}
        self._rounds: dict[str, int] = {}
        self._open: dict[str, deque[PendingExchange]] = {}  # the latest one, and earlier ones without a result
        self._newest: dict[str, PendingExchange] = {}
        self._thread = threading.Thread(target=self._worker.run, name="geomx-client", daemon=True)
        self._thread.start()
        info: WorkerInfo = self._wait(self._worker.ready, settings.number("timeout") + 10, "the cluster")
        self._info = info
        self.rank = info.rank
        self.global_rank = info.global_rank
        self.party_index = info.party_index
        self.num_all_workers = info.num_all_workers
        self.num_workers = settings.local.workers if settings.local is not None else 0
        self.flat = info.flat
        self.trains = info.trains
        self.ranks_are_global = info.flat or settings.text("rank_scope") == "global"
        self.is_master = info.global_rank == 0 if self.ranks_are_global else settings.master
        self._left = False

    # Tensors.

    def declare(self, tensors: Sequence[Tensor]) -> None:
        """Declare `tensors` to the servers; blocks. Repeating a declaration is free. Raises InvalidSettings for a
        conflict.
        """
        new = [tensor for tensor in tensors if self._known(tensor) is None]
        if not new:
            return
        body = self.control("declare", {"tensors": [[item.name, item.size, item.dtype, item.row] for item in new]})
        for tensor, (key, slices) in zip(new, body["placements"], strict=True):
            self._placements[tensor.name] = Placement(key, tensor, tuple(Slice(*item) for item in slices))

    @property
    def placements(self) -> Mapping[str, Placement]:
        """The placements of the tensors declared by this worker, by name."""
        return self._placements

    def init(
        self, values: Mapping[str, Array], hyper: Mapping[str, Mapping[str, float]] | None = None, *, late: bool = False
    ) -> None:
        """Set the initial values of declared tensors; blocks. No effect for workers other than the master.

        values: 1-D, contiguous, of the declared size and dtype. They are sent together, which takes as long as the
        links need, and fails after the option `patience`. hyper: hyper-parameters of single tensors. late: training has
        begun and a master that does not train has ended, so the worker of global rank 0 sets them instead.
        """
        in_place = late and self.global_rank == 0 and not self._info.master_trains
        if not (self.is_master or in_place):
            return
        self._check()
        operations = [
            Operation(Kind.PUSH, self._placement(name, value), value, hyper=dict((hyper or {}).get(name, {})))
            for name, value in values.items()
        ]
        limit = self.settings.number("patience")
        for exchange in [self._start(None, operation) for operation in operations]:
            self._wait(exchange.done, limit, "the servers to take the initial values (--patience)")

    def exchange(
        self,
        name: str,
        src: Content | None,
        out: Array | None,
        *,
        priority: int = 0,
        weight: float = 1.0,
        hyper: Mapping[str, float] | None = None,
    ) -> PendingExchange:
        """Contribute `src` to this key's next round; the result goes to `out`, or is kept for `pull`. Returns at once.

        src, out: 1-D, of the declared size and dtype. `src` must not change before `.sent`; it is copied if it is not
        contiguous. `src` may be Rows, numbered within the tensor: only they are sent, only they change if the optimizer
        is lazy, and `out` is not allowed; needed parts of the result have to be pulled. Without `src` this worker
        abstains: it receives the round's result without counting in it, at almost no cost. Higher `priority` is sent
        first. `weight`, above 0, is sent with the contribution; `hyper` holds hyper-parameters for the optimizer.
        Raises InvalidSettings for a worker that does not train or has left, for rows that the key does not have, and if
        MAX_OPEN rounds of the key have no result yet.
        """
        self._check()
        if isinstance(src, Rows):
            if out is not None:
                raise InvalidSettings(f"key {name!r}: the result of a round of rows comes to no array", "pull it")
            src = self._checked_rows(name, src)
        if not 0 < weight < math.inf:
            raise InvalidSettings(f"a contribution of weight {weight}", "give a finite number above 0")
        if len(hyper or {}) > MAX_HYPER or not all(map(math.isfinite, (hyper or {}).values())):
            hint = f"give at most {MAX_HYPER} finite numbers"
            raise InvalidSettings(f"a contribution with hyper-parameters {dict(hyper or {})}", hint)
        if self._left or not self.trains:
            what = "has left the job" if self._left else "is the master, which does not train"
            hint = "is_master_worker and global_rank tell who is to push, and nobody pushes after leave"
            raise InvalidSettings(f"this worker {what}: it cannot contribute", hint)
        arrays = [array for array in (src, out) if array is not None and not isinstance(array, Rows)]
        placement = self._placement(name, *arrays)
        begun = self._open.setdefault(name, deque())
        _forget_done(begun)
        if len(begun) >= MAX_OPEN:
            raise InvalidSettings(
                f"{len(begun)} rounds of key {name!r} have no result yet", "wait for some of them before the next"
            )
        if src is None:
            weight = 0.0
        elif not isinstance(src, Rows) and not src.flags.c_contiguous:
            src = np.ascontiguousarray(src)
        of_rows = isinstance(src, Rows) or (src is None and out is None and bool(begun) and not begun[-1].holds)
        reply = Reply.NONE if of_rows else Reply.FULL
        number = self._rounds[name] = self._rounds.get(name, 0) + 1
        operation = Operation(Kind.EXCHANGE, placement, src, number, weight, priority, dict(hyper or {}), reply)
        exchange = self._newest[name] = self._start(out, operation)
        begun.append(exchange)
        _forget_done(begun)  # free the previous result's memory before the next one is allocated
        return exchange

    def _checked_rows(self, name: str, rows: Rows) -> Content:
        """The rows of a contribution; a dense array if the key's slices are not made of whole rows."""
        placement = self._placement(name)
        tensor, numbers = placement.tensor, rows.numbers
        if (rows.row, str(rows.values.dtype), len(rows.values)) != (tensor.row, tensor.dtype, len(numbers)):
            raise InvalidSettings(
                f"key {name!r} has rows of {tensor.row} {tensor.dtype}, not {rows.row} {rows.values.dtype}",
                "give a row for each number; the shape and dtype of a key never change",
            )
        _check_numbers(name, tensor, numbers)
        return rows if placement.row else rows.dense(tensor.size)

    def pull(self, name: str, out: Array, *, priority: int = 0) -> "Future[None]":
        """Copy the result of this worker's latest exchange of the key, or without one the servers' value, to `out`.

        In an asynchronous job the value changes meanwhile: once that result has arrived, this gets the global servers'
        newest value. The result of a round of rows is fetched from the servers; a later round of the key waits until it
        is here.
        """
        self._check()
        placement = self._placement(name, out)
        latest = self._open[name][-1] if self._open.get(name) else None
        elsewhere = latest is not None and not latest.holds
        if latest is None or elsewhere or (latest.done.done() and self.asynchronous):
            round_ = self._rounds.get(name, 0)
            operation = Operation(Kind.PULL, placement, round=round_, priority=priority, in_turn=elsewhere)
            pulled = self._newest[name] = self._start(out, operation)
            return pulled.done
        done: Future[None] = Future()

        def copy(finished: "Future[None]") -> None:
            try:
                finished.result()
                latest.copy_to(out)
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)

        latest.done.add_done_callback(copy)
        return done

    def pull_rows(self, name: str, numbers: Array, out: Array, *, priority: int = 0) -> "Future[None]":
        """Like `pull`, but only the rows `numbers` (1-D integers, strictly increasing), to `out`: 1-D, of as many rows.

        A later round of the key waits until they are here, so that they are not of that round.
        """
        self._check()
        placement = self._placement(name)
        tensor = placement.tensor
        _check_numbers(name, tensor, numbers)
        if (out.shape, str(out.dtype)) != ((len(numbers) * tensor.row,), tensor.dtype):
            what = f"{len(numbers)} rows of {tensor.row} {tensor.dtype} do not fit {out.shape} of {out.dtype}"
            raise InvalidSettings(what, "pull them into a one-dimensional array of their size and dtype")
        if not placement.row:
            return self._pick_rows(name, numbers, out, priority)
        operation = Operation(
            Kind.PULL, placement, round=self._rounds.get(name, 0), priority=priority, numbers=numbers, in_turn=True
        )
        if not len(numbers):
            done: Future[None] = Future()
            done.set_result(None)
            return done
        pulled = self._newest[name] = self._start(out, operation)
        return pulled.done

    def _pick_rows(self, name: str, numbers: Array, out: Array, priority: int) -> "Future[None]":
        """Pull all of a key that is sent only as a whole, and select its rows."""
        tensor = self._placement(name).tensor
        whole, done = np.empty(tensor.size, tensor.dtype), Future[None]()

        def pick(finished: "Future[None]") -> None:
            try:
                finished.result()
                np.copyto(out, Rows.of(whole, tensor.row, numbers).values.reshape(-1))
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)

        self.pull(name, whole, priority=priority).add_done_callback(pick)
        return done

    def versions(self, name: str) -> tuple[int, int]:
        """Lowest and highest version at the roots among the slices of this worker's latest exchange or pull of the key;
        (-1, -1) before any. They differ only if parties train asynchronously.
        """
        found = self._newest.get(name)
        return (-1, -1) if found is None else (found.lowest, found.highest)

    # Requests.

    def set_optimizer(
        self,
        name: str,
        params: Mapping[str, float | int | bool],
        *,
        schedule: tuple[str, Mapping[str, Any]] | None = None,
        multipliers: Mapping[str, Mapping[str, float]] | None = None,
        serial: int = 0,
    ) -> None:
        """Have the roots update the model with this optimizer (see optimizers.py); blocks. Repeating it is free.

        schedule: name and numbers (see schedules.py), for a master that does not train; training workers send the rate
        with their contributions. multipliers: `lr_mult` and `wd_mult` of single declared tensors. serial: 0 for the
        first optimizer, which takes effect at once. A later one takes over per tensor, with the first contribution that
        names its serial number among its hyper-parameters, or, if this worker does not train, in the round after the
        last one closed by any root.
        """
        by_key = [[self._placements[tensor].key, dict(own)] for tensor, own in (multipliers or {}).items()]
        body: Body = {
            "name": name, "params": dict(params), "by": self.process, "schedule": schedule, "multipliers": by_key,
            "serial": serial,
        }  # fmt: skip
        if not self.trains:
            body |= self._hold_rounds(serial)
        self.tell("optimizer", body, "take the optimizer")

    def set_compression(self, spec: str) -> None:
        """Encode every exchange with the global servers by the codec SPEC (see `--compress`); blocks until all servers
        do so. Repeating it is free. Rounds in flight may or may not be encoded, so call this before training.

        Raises InvalidSettings for an unknown codec, and if another one is in use.
        """
        spec = complete_spec(spec, int(self.settings.number("compress_min")))
        self.tell("compression", {"spec": spec}, "take the codec")
        if self.flat:
            changed: Future[None] = Future()

            def change() -> None:
                self._worker.compression.set(spec)
                changed.set_result(None)

            self._worker.node.loop.submit(change)
            self._wait(changed, self.answer_limit, "this worker's own loop")

    def leave_optimizer_to_workers(self, kind: str, serial: int = 0) -> None:
        """Tell the roots that every worker runs an optimizer of this class itself; blocks. They refuse the next round
        unless all training workers have said so. serial: see `set_optimizer`.
        """
        serial = serial if self.trains else 0
        body = {"name": "", "params": {}, "by": self.process, "kind": kind, "serial": serial}
        self.tell("optimizer", body, "leave the optimizer to the workers")

    def _hold_rounds(self, serial: int) -> Body:
        """Stop the roots from closing rounds until they have the optimizer; returns its first round of each key."""
        closed: dict[int, int] = {}
        for answer in self.tell("optimizer", {"hold": True, "by": self.process}, "hold the rounds"):
            for key, round_ in answer["closed"]:
                closed[key] = max(round_, closed.get(key, 0))
        by_round = [[key, round_ + 1] for key, round_ in closed.items()]
        return {"serial": max(serial, 1) if closed else 0, "by_round": by_round}

    def tell(self, topic: str, body: Body, what: str) -> list[Body]:
        """Send a request to all roots; blocks. `what` describes it in the message of a failure.

        Returns their answers; behind a local server that is a single empty one.
        """
        servers = range(len(self._worker.upstream.links)) if self._info.at_root else (0,)
        futures = [self._ask(topic, body, server) for server in servers]
        return [self._wait(future, self.answer_limit, f"the servers to {what}") for future in futures]

    def barrier(self, scope: Literal["party", "all"] = "party") -> None:
        """Wait until all workers of the party, or of the job, have called this; workers that have left do not count."""
        limit = self.settings.number("patience")
        future = self._ask("barrier", {"scope": scope}, 0, limit)
        self._wait(future, limit, f"the other workers at a barrier over {scope}")

    def control(self, topic: str, body: Body, root: int | None = None) -> Body:
        """Send a request to the rank-0 server, which relays unknown topics to the rank-0 root; blocks.

        With `root`, that root answers, for topics that name one.
        """
        limit, server = self.answer_limit, 0
        if root is not None:
            server, body = root if self._info.at_root else 0, {**body, "root": root}
        answer: Body = self._wait(self._ask(topic, body, server, limit), limit, f"an answer to {topic!r}")
        return answer

    def ask(self, topic: str, body: Body) -> "Future[Body]":
        """Like `control`, but returns at once; a failure of the job is set on the future."""
        return self._ask(topic, body, 0)

    @property
    def asynchronous(self) -> bool:
        """Whether parties complete rounds separately, according to the results so far."""
        return self._worker.asynchronous

    # Telemetry.

    @property
    def failure(self) -> GeomxError | None:
        """Why the client has ended, if it failed."""
        return self._worker.error

    def report(self, **telemetry: Any) -> None:
        """Set fields of this process's Telemetry."""
        for name, value in telemetry.items():
            setattr(self._worker.node.telemetry, name, value)

    def traffic(self) -> Traffic:
        """Bytes of messages so far."""
        return self._worker.node.transport.traffic()

    # Shutdown.

    def settle(self) -> None:
        """Wait for the results of all rounds that this worker has started."""
        for begun in list(self._open.values()):
            self._wait(begun[-1].done, self.settings.number("patience"), "the last rounds")

    def leave(self) -> None:
        """Declare that this worker contributes no more. Waits for its pending results, and until the servers know."""
        self.settle()
        self._left = True
        self._worker.node.loop.submit(self._worker.leave)
        for future in [self._ask("leave", {}, server) for server in range(len(self._worker.upstream.links))]:
            self._wait(future, self.answer_limit, "the servers to know that this worker leaves")

    def close(self, error: GeomxError | None = None) -> None:
        """Say goodbye and end the client's thread; with `error`, report to all processes that this worker failed.

        If other workers' contributions pass through this one, it first waits for them to finish.
        """
        worker = self._worker
        if not self._thread.is_alive():
            return
        if error is not None:
            worker.node.loop.submit(lambda: worker.node.fail(error))
        else:
            self._check()
            worker.node.loop.submit(worker.goodbye)
            worker.ends.result()
        self._thread.join(self.settings.number("silence") + 5)

    # Internals.

    def _known(self, tensor: Tensor) -> Placement | None:
        placement = self._placements.get(tensor.name)
        if placement is not None and placement.tensor != tensor:
            what = f"key {tensor.name!r} was declared as {placement.tensor}, now as {tensor}"
            raise InvalidSettings(what, "size and dtype of a key never change")
        return placement

    def _placement(self, name: str, *arrays: Array) -> Placement:
        placement = self._placements.get(name)
        if placement is None:
            raise InvalidSettings(f"key {name!r} has not been initialised", "call init first")
        tensor = placement.tensor
        for array in arrays:
            if (array.shape, str(array.dtype)) != ((tensor.size,), tensor.dtype):
                shape = f"shape {array.shape}" if array.ndim != 1 else f"{array.size}"
                raise InvalidSettings(
                    f"key {name!r} has {tensor.size} elements of {tensor.dtype}, not {shape} of {array.dtype}",
                    "give one-dimensional arrays; size and dtype of a key never change",
                )
        return placement

    def _start(self, out: Array | None, operation: Operation) -> PendingExchange:
        exchange = PendingExchange(out, len(operation.pieces()), holds=operation.reply == Reply.FULL)
        self._worker.node.loop.submit(lambda: self._worker.start(exchange, operation))
        return exchange

    @property
    def answer_limit(self) -> float:
        """Seconds that an answer may take while the link works: the option timeout. A local server that relays a
        request allows its own link the same time, not counting its silence, and answers if that link is lost.
        """
        relayed = 0.0 if self._info.at_root else self.settings.number("silence")
        return self.settings.number("timeout") + relayed

    def _ask(self, topic: str, body: Body, server: int, limit: float = 0.0) -> "Future[Body]":
        self._check()
        future: Future[Body] = Future()
        limit = limit or self.answer_limit
        self._worker.node.loop.submit(lambda: self._worker.ask(future, topic, body, server, limit))
        return future

    def _wait(self, future: "Future[Any]", limit: float, what: str) -> Any:
        """Wait for the result; the limit restarts with any progress on the links or a restored connection."""
        while True:
            try:
                return future.result(limit + 5)
            except TimeoutError:
                if time.monotonic() - newest(self._worker.upstream.links) > limit + NEWS:
                    raise TimedOut(f"waited {limit:g} s for {what}", "see the other processes' logs") from None

    def _check(self) -> None:
        if self._worker.error is not None:
            raise self._worker.error


def _forget_done(begun: deque[PendingExchange]) -> None:
    """Drop the finished exchanges, except the latest."""
    while len(begun) > 1 and begun[0].done.done():
        begun.popleft()


def _check_numbers(name: str, tensor: Tensor, numbers: Array) -> None:
    """Raise InvalidSettings for row numbers that the tensor does not have, or that do not increase."""
    last = tensor.size // tensor.row - 1
    if numbers.ndim != 1 or not (numbers[1:] > numbers[:-1]).all():
        raise InvalidSettings(f"row numbers of key {name!r} that do not increase", "sort them, each once")
    if len(numbers) and not 0 <= numbers[0] <= numbers[-1] <= last:
        raise InvalidSettings(f"row numbers of key {name!r} that are not from 0 to {last}")
