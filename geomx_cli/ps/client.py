"""A worker's interface to the parameter server: declare, init, exchange and pull tensors. Buffers in, futures out.

The client has one thread, which runs the worker's loop; public methods may be called from any thread. Every wait has a
limit: the option `patience` for rounds and barriers, `timeout` for everything else. The failure of any process of the
job ends all waits with PeerLost, which every later call raises again.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from geomx_cli.contract.config import NodeSettings
from geomx_cli.core.errors import GeomxError, InvalidSettings
from geomx_cli.core.event_log import EventLog
from geomx_cli.core.events import Traffic, WarningRaised
from geomx_cli.core.futures import after
from geomx_cli.core.state_notes import StateNotes
from geomx_cli.ps.aggregation.algorithm import WorkerDelivery
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.cluster.partition import Placement, Slice, Tensor
from geomx_cli.ps.control_client import ControlClient, _in_loop
from geomx_cli.ps.net.payload import Content, Rows
from geomx_cli.ps.net.wire import EVERY, MAX_HYPER, MAX_WORKER_WEIGHT, Kind, Reply
from geomx_cli.ps.operation_queue import Operation, PendingExchange
from geomx_cli.ps.result_log import ResultLog
from geomx_cli.ps.sent_contributions import SentContributions
from geomx_cli.ps.state_file import Saved
from geomx_cli.ps.worker import Worker

__all__ = ["Client", "DeclaredTensor", "MAX_OPEN"]

_Result = TypeVar("_Result")


MAX_OPEN = 4096
"""Rounds of one key that may be begun and without a result."""


@dataclass(slots=True)
class DeclaredTensor:
    """round: the last one begun. pulls: the number of those sent to the servers. newest: the exchange or pull begun
    last, None before any.

    All checks raise InvalidSettings.
    """

    placement: Placement
    round: int = 0
    pulls: int = 0
    newest: PendingExchange | None = None
    _open: deque[PendingExchange] = field(default_factory=deque)  # the latest one, and earlier ones without a result

    @property
    def latest(self) -> PendingExchange | None:
        """The exchange begun last, None before any."""
        return self._open[-1] if self._open else None

    def add_exchange(self, exchange: PendingExchange) -> None:
        """This exchange of the next round has begun."""
        self._open.append(exchange)
        self.newest = exchange
        self._forget_done()  # free the previous result's memory before the next one is allocated

    def add_pull(self, pull: PendingExchange) -> None:
        """This pull from the servers has begun."""
        self.pulls += 1
        self.newest = pull

    def go_on(self, round_: int, pulls: int, lowest: int, highest: int) -> None:
        """Go on after so many rounds and pulls. The servers have the last result, of these versions."""
        self.round, self.pulls = round_, pulls
        done = PendingExchange(None, 0, lowest=lowest, highest=highest, holds=False)
        for future in (done.sent, done.done):
            future.set_result(None)
        self.newest = done
        self._open = deque([done] if round_ else [])

    def check_open(self) -> None:
        """Check that another round may begin, as fewer than MAX_OPEN have no result yet."""
        self._forget_done()
        if len(self._open) >= MAX_OPEN:
            raise InvalidSettings(
                f"{len(self._open)} rounds of key {self.placement.tensor.name!r} have no result yet",
                "wait for some of them before the next",
            )

    def check_contributor(self, rank: int) -> None:
        """Check that the worker of this rank in its party contributes to this tensor."""
        tensor = self.placement.tensor
        if tensor.shard not in (EVERY, rank):
            what = f"key {tensor.name!r} is contributed by worker {tensor.shard} of each party"
            raise InvalidSettings(what, f"this one is worker {rank}: it may pull the key")

    def check(self, array: Array) -> None:
        """Check that an array has this tensor's size and dtype, and one dimension."""
        tensor = self.placement.tensor
        if array.shape != (tensor.size,) or array.dtype != tensor.dtype:
            shape = f"shape {array.shape}" if array.ndim != 1 else f"{array.size}"
            raise InvalidSettings(
                f"key {tensor.name!r} has {tensor.size} elements of {tensor.dtype}, not {shape} of {array.dtype}",
                "give one-dimensional arrays; size and dtype of a key never change",
            )

    def check_numbers(self, numbers: Array) -> None:
        """Check that the tensor has rows of these numbers, and that they increase."""
        tensor = self.placement.tensor
        last = tensor.size // tensor.row - 1
        if numbers.ndim != 1 or not (numbers[1:] > numbers[:-1]).all():
            raise InvalidSettings(f"row numbers of key {tensor.name!r} that do not increase", "sort them, each once")
        if len(numbers) and not 0 <= numbers[0] <= numbers[-1] <= last:
            raise InvalidSettings(f"row numbers of key {tensor.name!r} that are not from 0 to {last}")

    def contribution(self, src: Content | None, out: Array | None) -> Content | None:
        """Check both, and return `src` as it is sent: contiguous, and dense if no slice has whole rows."""
        if isinstance(src, Rows):
            if out is not None:
                what = f"key {self.placement.tensor.name!r}: the result of a round of rows comes to no array"
                raise InvalidSettings(what, "pull it")
            self._check_rows(src)
            return src if self.placement.row else src.dense(self.placement.tensor.size)
        for array in (src, out):
            if array is not None:
                self.check(array)
        return None if src is None else np.ascontiguousarray(src)

    def _check_rows(self, rows: Rows) -> None:
        tensor = self.placement.tensor
        if (rows.row, str(rows.values.dtype), len(rows.values)) != (tensor.row, tensor.dtype, len(rows.numbers)):
            raise InvalidSettings(
                f"key {tensor.name!r} has rows of {tensor.row} {tensor.dtype}, not {rows.row} {rows.values.dtype}",
                "give a row for each number; the shape and dtype of a key never change",
            )
        self.check_numbers(rows.numbers)

    def _forget_done(self) -> None:
        """Drop the finished exchanges, except the latest."""
        while len(self._open) > 1 and self._open[0].done.done():
            self._open.popleft()


class Client:
    """A worker's connection to the parameter server; connected when the constructor returns.

    control: requests other than tensors: optimizer, codec, barriers. tensors: those declared by this worker, by name.
    rank, num_workers: within the party's plane. party_index: -1 for the central party. global_rank: over all training
    workers, -1 for a master worker that does not train. num_all_workers: training workers of the job. flat: whether
    there is only one plane. trains: whether this worker may contribute. is_master: whether it configures the servers
    and provides the initial values; in a flat cluster that is rank 0, and with the option rank_scope "global" it is
    global rank 0. late_source: the `source` of `init` after a master that does not train has ended.
    before_contribution: called with the key's name before an exchange, until it returns True. By default it records
        that this worker saves nothing, so that it is not restarted.
    """

    def __init__(self, settings: NodeSettings, events: EventLog, delivery: WorkerDelivery) -> None:
        self.settings = settings
        self.events = events
        self.party = settings.party
        self._worker = Worker(settings, events, delivery)
        self.process = self._worker.node.process
        self.tensors: dict[str, DeclaredTensor] = {}
        self._thread = threading.Thread(target=self._worker.run, name="geomx-client", daemon=True)
        self._thread.start()
        info = self._worker.wait(self._worker.ready, self._worker.node.joining + 10, "the cluster")
        self.control = ControlClient(self._worker, info, lambda name: self.tensors[name].placement.key)
        self.rank = info.rank
        self.global_rank = info.global_rank
        self.party_index = info.party_index
        self.num_all_workers = info.num_all_workers
        self.num_workers = settings.local.workers if settings.local is not None else 0
        self.flat = info.flat
        self.trains = info.trains
        self.ranks_are_global = info.flat or settings.text("rank_scope") == "global"
        self.is_master = info.global_rank == 0 if self.ranks_are_global else settings.master
        self.late_source = None if info.master_trains else 0
        self.before_contribution: Callable[[str], bool] = self._is_not_saved
        self._left = self._contributes = False

    # Tensors.

    def declare(self, tensors: Sequence[Tensor]) -> None:
        """Declare `tensors` to the servers; blocks. Repeating a declaration is free. Raises InvalidSettings for a
        conflict, and for a shard that no worker has.
        """
        new = [tensor for tensor in tensors if not self._is_declared(tensor)]
        if not new:
            return
        for tensor, (key, slices) in zip(new, self.control.declare(new), strict=True):
            placement = Placement(key, tensor, tuple(Slice(*item) for item in slices))
            self.tensors.setdefault(tensor.name, DeclaredTensor(placement))

    def _is_declared(self, tensor: Tensor) -> bool:
        known = self.tensors.get(tensor.name)
        if known is not None and known.placement.tensor != tensor:
            what = f"key {tensor.name!r} was declared with {known.placement.tensor}, now with {tensor}"
            raise InvalidSettings(what, "size, dtype and shard of a key never change")
        return known is not None

    def init(
        self, values: Mapping[str, Array], hyper: Mapping[str, Mapping[str, float]] | None = None, *,
        source: int | None = None,
    ) -> None:  # fmt: skip
        """Set the initial values of declared tensors; blocks. Only the values of the master count, or of the worker
        with global rank `source`.

        values: 1-D, contiguous, of the declared size and dtype. They are sent together, which takes as long as the
        links need, and fails after the option `patience`. hyper: hyper-parameters of single tensors.
        """
        sets = self.is_master if source is None else self.global_rank == source
        if not sets:
            return
        self._worker.check()
        operations = []
        for name, value in values.items():
            tensor = self._tensor(name)
            tensor.check(value)
            operations.append(Operation(Kind.PUSH, tensor.placement, value, hyper=dict((hyper or {}).get(name, {}))))
        limit = self._worker.node.patience
        for exchange in [self._start(operation) for operation in operations]:
            self._worker.wait(exchange.done, limit, "the servers to take the initial values (--patience)")

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

        One round of a key is under way at a time: the next one is sent when the result of this has come.

        src: 1-D, of the declared size and dtype; it must not change before `.sent`, and is copied if not contiguous.
        Rows, numbered within the tensor, are sent alone, and change alone if the optimizer is lazy. Without `src` this
        worker abstains: it receives the round's result without counting in it, at almost no cost.
        out: as `src`; not with Rows, after which the needed parts of the result have to be pulled.
        priority: higher is sent first.
        weight: above 0, is sent with the contribution.
        hyper: hyper-parameters for the optimizer.

        Raises InvalidSettings for a worker that does not train or has left, for another one's shard, for rows that the
        key does not have, and if too many rounds of the key have no result yet (MAX_OPEN).
        """
        self._worker.check()
        self._check_contribution(weight, hyper or {})
        tensor = self._tensor(name)
        tensor.check_contributor(self.rank)
        src = tensor.contribution(src, out)
        tensor.check_open()
        latest = tensor.latest
        abstains_from_rows = src is None and out is None and latest is not None and not latest.holds
        if not self._contributes:
            self._contributes = self.before_contribution(name)
        if (results := self._worker.operations.results) is not None:
            results.check(tensor.placement.key, name, tensor.round + 1)
        tensor.round += 1
        operation = Operation(
            Kind.EXCHANGE, tensor.placement, src, out, tensor.round, 0.0 if src is None else weight, priority,
            dict(hyper or {}), Reply.NONE if isinstance(src, Rows) or abstains_from_rows else Reply.FULL,
        )  # fmt: skip
        tensor.add_exchange(self._start(operation))
        return operation.pending

    def _check_contribution(self, weight: float, hyper: Mapping[str, float]) -> None:
        """Raise InvalidSettings for such a contribution, or for any of this worker's."""
        if not 0 < weight <= MAX_WORKER_WEIGHT:
            hint = f"give a number above 0, at most {MAX_WORKER_WEIGHT:g}"
            raise InvalidSettings(f"a contribution of weight {weight}", hint)
        if len(hyper) > MAX_HYPER or not all(map(math.isfinite, hyper.values())):
            hint = f"give at most {MAX_HYPER} finite numbers"
            raise InvalidSettings(f"a contribution with hyper-parameters {dict(hyper)}", hint)
        if self._left or not self.trains:
            what = "has left the job" if self._left else "is the master, which does not train"
            hint = "is_master_worker and global_rank tell who is to push, and nobody pushes after leave"
            raise InvalidSettings(f"this worker {what}: it cannot contribute", hint)

    def pull(self, name: str, out: Array, *, priority: int = 0) -> "Future[None]":
        """Copy the result of this worker's latest exchange of the key, or without one the servers' value, to `out`.

        In an asynchronous job the value changes meanwhile: once that result has arrived, this gets the global servers'
        newest value. The result of a round of rows is fetched from the servers; a later round of the key waits until it
        is here.
        """
        self._worker.check()
        tensor = self._tensor(name)
        tensor.check(out)
        latest = tensor.latest
        elsewhere = latest is not None and not latest.holds
        if latest is None or elsewhere or (latest.done.done() and self.asynchronous):
            operation = Operation(
                Kind.PULL, tensor.placement, None, out, tensor.round, 0.0, priority, in_turn=elsewhere
            )  # fmt: skip
            tensor.add_pull(self._start(operation))
            return operation.pending.done
        return after([latest.done], partial(latest.copy_to, out))

    def pull_rows(self, name: str, numbers: Array, out: Array, *, priority: int = 0) -> "Future[None]":
        """Like `pull`, but only the rows `numbers` (1-D integers, strictly increasing), to `out`: 1-D, of as many rows.

        A later round of the key waits until they are here, so that they are not of that round.
        """
        self._worker.check()
        declared = self._tensor(name)
        declared.check_numbers(numbers)
        placement, tensor = declared.placement, declared.placement.tensor
        if (out.shape, str(out.dtype)) != ((len(numbers) * tensor.row,), tensor.dtype):
            what = f"{len(numbers)} rows of {tensor.row} {tensor.dtype} do not fit {out.shape} of {out.dtype}"
            raise InvalidSettings(what, "pull them into a one-dimensional array of their size and dtype")
        if not placement.row:  # all of the key is sent, or nothing
            whole = np.empty(tensor.size, tensor.dtype)
            pulled = self.pull(name, whole, priority=priority)
            return after([pulled], lambda: np.copyto(out, Rows.of(whole, tensor.row, numbers).values.reshape(-1)))
        if not len(numbers):
            done: Future[None] = Future()
            done.set_result(None)
            return done
        operation = Operation(
            Kind.PULL, placement, out=out, round=declared.round, priority=priority, numbers=numbers, in_turn=True
        )
        declared.add_pull(self._start(operation))
        return operation.pending.done

    def versions(self, name: str) -> tuple[int, int]:
        """Lowest and highest version at the roots among the slices of this worker's latest exchange or pull of the key;
        (-1, -1) before any. They differ only if parties train asynchronously.
        """
        tensor = self.tensors.get(name)
        if tensor is None or tensor.newest is None:
            return -1, -1
        return tensor.newest.lowest, tensor.newest.highest

    @property
    def asynchronous(self) -> bool:
        """Whether parties complete rounds separately, according to the results so far."""
        return self._worker.operations.asynchronous

    def _tensor(self, name: str) -> DeclaredTensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise InvalidSettings(f"key {name!r} has not been initialised", "call init first")
        return tensor

    def _start(self, operation: Operation) -> PendingExchange:
        self._worker.node.loop.submit(lambda: self._worker.operations.start(operation))
        return operation.pending

    def follow(self, active: Callable[[], float]) -> None:
        """Let others wait for this worker as long as those run for which it waits itself: `active` says when they last
        did (time.monotonic seconds).
        """
        self._worker.others_active = active

    def waits(self, waits: bool) -> None:
        """Whether the script waits for others: then they need not wait for it because it uses processor time."""
        self._worker.waits(waits)

    # What outlives this process.

    def _is_not_saved(self, name: str) -> bool:
        if self.settings.state_dir:
            StateNotes(Path(self.settings.state_dir)).end()
        return True

    def state(self) -> Saved:
        """What this end keeps between rounds: numbers of rounds and barriers, and the arrays of codecs. These are in
        the memory in use: read them before the next exchange. Raises InvalidSettings while a round has no result.
        """
        arrays = _in_loop(self._worker, self._worker.operations.state)
        tensors = {name: [*_about(each), *self.versions(name)] for name, each in self.tensors.items()}
        barriers = dict(self.control.barriers)
        return Saved({"tensors": tensors, "barriers": barriers, "asynchronous": self.asynchronous}, arrays)

    def load(self, state: Saved) -> None:
        """Go on from the `state` of this worker's earlier life, once the same tensors are initialised, and before the
        first exchange that this did not make.
        """
        begun = {name: each for name, each in state.fields["tensors"].items() if each[1] or name in self.tensors}
        self.declare([Tensor(name, *about) for name, (about, *_) in begun.items()])
        for name, (_, *numbers) in begun.items():  # keys that only compare what workers compute come later
            self._tensor(name).go_on(*numbers)
        self.control.barriers.update(state.fields["barriers"])
        operations = self._worker.operations

        def load() -> None:
            operations.asynchronous = state.fields["asynchronous"]
            operations.load(state.arrays)

        _in_loop(self._worker, load)

    def rounds(self) -> dict[int, int]:
        """The number of the last round begun of each key."""
        return {each.placement.key: each.round for each in list(self.tensors.values())}

    # For a worker that dies while the job continues.

    def keep_contributions(self, directory: Path) -> None:
        """Save each contribution in `directory` before it is sent, so that another process can complete it."""
        sent = SentContributions(directory, lambda message: self.events.write(WarningRaised(message=message)))
        self._worker.operations.sent = sent

    def complete_contributions(self, directory: Path) -> None:
        """Send again what an earlier life of this worker has kept, and wait until the servers have all of it."""
        sent = SentContributions(directory, lambda message: self.events.write(WarningRaised(message=message)))
        worker, limit = self._worker, self._worker.node.patience
        done: list[Future[None]] = []
        for header, payload in sent.load():
            done.append(Future())
            worker.node.loop.submit(partial(worker.send_again, header, payload, done[-1]))
        worker.ends.add_done_callback(lambda _: _fail(done, worker.error))
        for future in done:
            worker.wait(future, limit, "the rounds to which this worker had contributed")
        sent.close()

    def keep_results(self, results: ResultLog) -> None:
        """Keep the results of all exchanges there, and take from there those that an earlier life has got. Call before
        the first exchange.
        """
        self._worker.operations.results = results

    # Telemetry.

    @property
    def failure(self) -> GeomxError | None:
        """Why the client has ended, if it failed."""
        return self._worker.failure

    @property
    def is_failure_raised(self) -> bool:
        """Whether `failure` has been raised in one of the caller's threads, or will where it waits for a round."""
        return self._worker.is_raised

    def when_failed(self, call: Callable[[GeomxError], object]) -> None:
        """Call this, in the client's thread, if the client fails."""
        self._worker.ends.add_done_callback(lambda _: call(self.failure) if self.failure is not None else None)

    def report(self, **telemetry: Any) -> None:
        """Set fields of this process's Telemetry."""
        for name, value in telemetry.items():
            setattr(self._worker.node.telemetry, name, value)

    def traffic(self) -> Traffic:
        """Bytes of messages so far."""
        return self._worker.node.transport.traffic()

    # Shutdown.

    def await_rounds(self) -> None:
        """Wait for the results of all rounds that this worker has started."""
        for tensor in list(self.tensors.values()):
            if tensor.latest is not None:
                self._worker.wait(tensor.latest.done, self._worker.node.patience, "the last rounds")

    def leave(self) -> None:
        """Declare that this worker contributes no more. Waits for its pending results, and until the servers know."""
        self.await_rounds()
        self._left = True
        self._worker.node.loop.submit(self._worker.leave)
        self.control.leave()

    def drop(self) -> None:
        """End the client's thread without a message: another process will leave the job in this worker's name."""
        if self._thread.is_alive():
            self._worker.node.loop.submit(self._worker.node.loop.stop)
            self._thread.join(self.settings.number("timeout"))

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
            worker.check()
            worker.node.loop.submit(worker.goodbye)
            worker.ends.result()
        self._thread.join(self.settings.number("silence") + 5)


def _fail(futures: Sequence["Future[None]"], error: GeomxError | None) -> None:
    for future in futures:
        if error is not None and not future.done():
            future.set_exception(error)


def _about(declared: DeclaredTensor) -> list[Any]:
    """What is needed to declare the tensor again, and how far it has come."""
    tensor = declared.placement.tensor
    return [[tensor.size, tensor.dtype, tensor.row, tensor.shard], declared.round, declared.pulls]
