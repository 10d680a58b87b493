"""The rounds of each key, as operations in MXNet's engine.

The engine keeps the operations of a key in call order. `push` queues an operation that sends the value's own memory,
and completes with the round's result. `pull` queues an operation that copies the result to `out`. Both return at once.
A reader of `out`, or a writer to the value, waits only for that array. A key's next push waits, in the engine, until
the last one completes, so memory use is bounded even for scripts that never wait. Values on several devices, or with
another layout or dtype, go through a buffer of the key.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from geomx_cli.ps.arrays import Array
from geomx_cli.ps.operation_queue import PendingExchange
from geomx_cli.runtime.frontends.mxnet.arrays import Arrays, Completion, Engine
from geomx_cli.runtime.frontends.mxnet.native import ArrayInfo
from geomx_cli.runtime.frontends.mxnet.script_optimizer import ScriptOptimizer
from geomx_cli.runtime.script.base_store import Key
from geomx_cli.runtime.script.remote_optimizer import Hyper
from geomx_cli.runtime.script.store import Store
from geomx_cli.runtime.training.worker_algorithm import State

__all__ = ["Exchanges"]


@dataclass(slots=True)
class _Push:
    """The last push of a key: whether it is complete, and whether its result is the new value. The result is kept in
    memory until pulled once.
    """

    brings: bool = False
    over: bool = False


class Exchanges:
    """For the training thread. Callers have checked keys and values.

    rounds: pushes of all keys so far.
    before_round: receives the name of a key of which a round is about to begin.
    on_older: receives the name of a key that is pulled again, and whose last result only an earlier life of this worker
        had.
    """

    def __init__(
        self, mx: Any, store: Store, engine: Engine, arrays: Arrays, script_optimizer: ScriptOptimizer
    ) -> None:
        self._mx = mx
        self._store = store
        self._engine = engine
        self._arrays = arrays
        self._script_optimizer = script_optimizer
        self._pushes: dict[str, _Push] = {}
        self._rounds: dict[str, PendingExchange] = {}  # last round by key; only for operations in the key's order
        self._older: set[str] = set()  # keys whose last result only an earlier life had
        self.rounds = 0
        self.before_round: Callable[[str], object] = lambda name: None
        self.on_older: Callable[[str], object] = lambda name: None

    def push(self, key: Key, values: list[ArrayInfo], priority: int, hyper: Hyper, weight: float = 1.0) -> None:
        """Contribute the sum of `values` to the key's next round."""
        name, updates = str(key), self._script_optimizer.updates
        begin = partial(self._store.start, name, out=None, priority=priority, hyper=hyper, weight=weight)
        of_rows = updates is None and all(item.is_sparse for item in values)
        if of_rows and self._store.has_rows(name, values[0].shape):
            if name in self._pushes:  # rows are kept in memory here: only one round at a time
                self._arrays.order(name).wait_to_read()
            rows = self._arrays.rows(values)
            self._exchange(name, lambda: begin(source=rows), priority, _Push())
            return
        source, view = self._source(name, values), self._arrays.view
        self._exchange(name, lambda: begin(source=view(source)), priority, _Push(brings=True), reads=[source.array])

    def _source(self, name: str, values: list[ArrayInfo]) -> ArrayInfo:
        """Return the array to send: the value itself if possible, otherwise the key's buffer."""
        if len(values) == 1 and self._arrays.holds(name, values[0]):
            return values[0]
        buffer = self._arrays.buffer(name)
        with self._mx.autograd.pause():
            self._arrays.fill(buffer, values)
        return buffer

    def abstain(self, name: str, priority: int) -> None:
        """Abstain from the key's next round."""
        buffer, abstain, view = self._arrays.buffer(name), self._store.abstain, self._arrays.view
        push = _Push(brings=True)
        self._exchange(name, lambda: abstain(name, view(buffer), priority), priority, push, writes=[buffer.array])

    def _exchange(
        self, name: str, begin: Callable[[], PendingExchange], priority: int, push: _Push,
        *, reads: Sequence[Any] = (), writes: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        """Queue a round of a key, which may have a round in flight. Until then the value stays in the script's own
        arrays.
        """
        self.before_round(name)
        self.rounds += 1
        self._older.discard(name)
        self._pushes[name] = push

        def exchange(done: Completion) -> None:
            def finish(finished: Future[None]) -> None:
                push.over = True
                done(finished.exception())

            self._rounds.pop(name, None)  # frees the last result
            round_ = self._rounds[name] = begin()
            round_.done.add_done_callback(finish)

        writes = [self._arrays.order(name), *writes]
        self._engine.queue(exchange, reads=reads, writes=writes, priority=priority, name="geomx push")
        if (updates := self._script_optimizer.updates) is not None:
            updates.apply(name, self._fetch(name, priority))

    def pull(self, key: Key, outs: list[ArrayInfo], priority: int) -> None:
        """Write the result of the key's last round to all of `outs`. Without a round, write the servers' value."""
        name, updates, is_here = str(key), self._script_optimizer.updates, self._is_here(str(key))
        # Fetch from the servers only once: for several arrays, to the buffer.
        may_hold = updates is None and (len(outs) == 1 or is_here)
        direct: list[ArrayInfo] = []
        others: list[ArrayInfo] = []
        for out in outs:
            (direct if may_hold and self._arrays.holds(name, out) else others).append(out)
        buffer = self._arrays.buffer(name)
        if updates is None:
            self._write(name, [*direct, *([buffer] if others else [])], priority, is_here)
        if others:
            with self._mx.autograd.pause():
                self._arrays.deliver(buffer.array if updates is None else updates.weights[name], others)

    def fill(self, name: str, flat: Any) -> None:
        """Copy the key's result to a flat array."""
        with self._mx.autograd.pause():
            self._fetch(name).reshape(flat.shape).copyto(flat)

    def _value(self, name: str, priority: int) -> Any:
        """Return the array for the result of a pull: the weight if the optimizer runs here, otherwise the buffer."""
        updates = self._script_optimizer.updates
        return self._fetch(name, priority) if updates is None else updates.weights[name]

    def _fetch(self, name: str, priority: int = 0) -> Any:
        """Return the key's buffer, with a fetch of the result queued."""
        buffer = self._arrays.buffer(name)
        self._write(name, [buffer], priority, self._is_here(name))
        return buffer.array

    def _write(self, name: str, outs: list[ArrayInfo], priority: int, is_here: bool) -> None:
        """Queue writing the key's result to these suitable arrays. Afterwards only the servers have it."""
        order, buffer, left = self._arrays.order(name), self._arrays.buffer(name), list(outs)
        if name in self._older and not self._store.asynchronous:
            self.on_older(name)

        def copy(out: ArrayInfo, done: Completion) -> None:
            round_ = self._rounds[name]
            round_.copy_to(self._arrays.view(out))
            left.pop()
            if not left:
                round_.release()
            done()

        def fetch(out: ArrayInfo, done: Completion) -> None:
            future = self._store.fetch(name, self._arrays.view(out), priority)
            future.add_done_callback(lambda finished: done(finished.exception()))

        for out in outs:
            work, reads, writes = (copy, [order], []) if is_here else (fetch, [], [order])
            if is_here and out is not buffer:  # which has the result of a round that this worker abstained from
                reads.append(buffer.array)
            writes = [*writes, out.array]
            self._engine.queue(partial(work, out), reads=reads, writes=writes, priority=priority, name="geomx pull")
        if is_here:
            self._pushes[name].brings = False

    def state(self) -> State:
        """Return the results that were not pulled yet. Call it between rounds, when all rounds are over."""
        results: dict[str, Array] = {}
        for name, push in self._pushes.items():
            if push.brings:
                buffer = self._arrays.buffer(name)
                results[name] = np.empty(buffer.size, buffer.dtype)
                self._rounds[name].copy_to(results[name])
        return State({"rounds": self.rounds, "pushed": list(self._pushes)}, results)

    def go_on(self, state: State) -> None:
        """Continue from a `state` of the same keys."""
        self.rounds = state.values["rounds"]
        for name in state.values["pushed"]:
            if name in state.arrays:
                self._pushes[name] = _Push(brings=True, over=True)
                self._rounds[name] = PendingExchange.of(state.arrays[name].copy())
            else:
                self._pushes[name] = _Push(over=True)
                self._older.add(name)

    def _is_here(self, name: str) -> bool:
        """Return whether the key's last push returns the value, and the servers cannot have a newer one."""
        last = self._pushes.get(name)
        return last is not None and last.brings and not (last.over and self._store.asynchronous)

    def fetch_rows(self, key: Key, out: ArrayInfo, numbers: Array, priority: int) -> Any:
        """Return an array for these rows of a pull's result, with the row shape of `out`. None for no rows."""
        if not len(numbers):
            return None
        name = str(key)
        if self._script_optimizer.updates is not None or self._is_here(name):
            return self._arrays.take(self._value(name, priority), numbers, out)
        target = self._arrays.room(name, numbers, out)

        def fetch(done: Completion) -> None:
            future = self._store.fetch_rows(name, numbers, self._arrays.view(target), priority)
            future.add_done_callback(lambda finished: done(finished.exception()))

        writes = [target.array, self._arrays.order(name)]
        self._engine.queue(fetch, reads=[], writes=writes, priority=priority, name="geomx pull")
        return target.array
