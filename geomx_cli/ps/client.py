"""A worker's interface to the parameter server: declare, init, exchange and pull tensors. Buffers in, futures out.

The client has one thread, which runs the worker's loop; public methods may be called from any thread. Every wait has a
limit: the option `patience` for rounds and barriers, `timeout` for everything else. The failure of any process of the
job ends all waits with PeerLost, which every later call raises again.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import numpy as np

from geomx_cli.contract.config import NodeSettings
from geomx_cli.core.errors import GeomxError, InvalidSettings
from geomx_cli.core.event_log import EventLog
from geomx_cli.core.events import Traffic
from geomx_cli.core.futures import after
from geomx_cli.ps.aggregation.algorithm import WorkerDelivery
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.client_recovery import ClientRecovery
from geomx_cli.ps.cluster.partition import Placement, Slice, Tensor
from geomx_cli.ps.control_client import ControlClient
from geomx_cli.ps.declared_tensor import DeclaredTensor
from geomx_cli.ps.net.payload import Content, Rows
from geomx_cli.ps.net.wire import MAX_HYPER, MAX_WORKER_WEIGHT, Kind, Reply
from geomx_cli.ps.operation_queue import Operation, PendingExchange
from geomx_cli.ps.worker import Worker

__all__ = ["Client"]

_Result = TypeVar("_Result")


class Client:
    """A worker's connection to the parameter server; connected when the constructor returns.

    control: requests other than tensors: optimizer, codec, barriers. tensors: those declared by this worker, by name.
    rank, num_workers: within the party's plane. party_index: -1 for the central party. global_rank: over all training
    workers, -1 for a master worker that does not train. num_all_workers: training workers of the job. flat: whether
    there is only one plane. trains: whether this worker may contribute. is_master: whether it configures the servers
    and provides the initial values; in a flat cluster that is rank 0, and with the option rank_scope "global" it is
    global rank 0. late_source: the `source` of `init` after a master that does not train has ended.
    recovery: what outlives this process.
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
        self.recovery = ClientRecovery(self._worker, self.control, self.tensors, self.declare)
        self._left = False

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
        self.recovery.check(name, tensor)
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
        return (-1, -1) if tensor is None else tensor.versions

    @property
    def asynchronous(self) -> bool:
        """Whether parties complete rounds separately, according to the results so far."""
        return self._worker.operations.asynchronous

    @property
    def has_missed(self) -> bool:
        """Whether the last round of some key was over without this worker's party, as it was left out (`--party-loss
        out`). Then this worker has to abstain from rounds, until it takes part again.
        """
        return bool(self._worker.operations.missed)

    def skip_missed(self) -> None:
        """This worker will look at `has_missed` after each round. Without this call, a missed round fails the job."""
        self._worker.operations.skips = True

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
