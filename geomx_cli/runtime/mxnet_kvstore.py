"""Every method of MXNet's KVStore, over a Store and MXNet's engine.

MXNet's engine keeps everything of one key in the order of the calls. `push` queues an operation of ours that sends the
very memory of the value and ends when the round's result is here; `pull` queues one that copies the result to `out`. So
both return at once, whoever reads `out` or writes to the value next waits for that one array, and the next push of a
key waits, in the engine, until the last one is over: a script that never waits takes no more memory than one that does.
What is on several devices, or of another layout or dtype, goes through a buffer of the key.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, cast

from geomx_cli.core import plugins
from geomx_cli.core.errors import GeomxError, InvalidSettings
from geomx_cli.ps.net.payload import Array
from geomx_cli.ps.pending_exchange import PendingExchange
from geomx_cli.runtime.engine import Completion, Engine
from geomx_cli.runtime.keys import Key, pairs, plain
from geomx_cli.runtime.kvstore import Hyper, Store
from geomx_cli.runtime.mxnet_arrays import Arrays
from geomx_cli.runtime.mxnet_standing import MxnetStanding
from geomx_cli.runtime.native import ArrayInfo, Native
from geomx_cli.runtime.script_optimizer import ScriptOptimizer

__all__ = ["MxnetStore"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass(slots=True)
class _Push:
    """The last push of a key: whether it is over, and whether it brings the new value, which is pulled once: it takes
    memory until then.
    """

    brings: bool = False
    over: bool = False


def _guarded(method: _Method) -> _Method:
    """A public method: fails when the job has failed, and speaks MXNet's kind of error."""

    @functools.wraps(method)
    def call(self: "MxnetStore", *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        try:
            if self.failure is not None:
                raise self.failure
            return method(self, *args, **kwargs)
        except GeomxError as error:
            raise self._mx.base.MXNetError(str(error)) from None

    return cast(_Method, call)


class MxnetStore(MxnetStanding):
    """Every method of mxnet.kvstore.KVStore, over a Store. `register` mixes it with that class, which Trainer asks for.

    Values are NDArrays of float32, float64 or float16, dense or row-sparse, on any device; lists of values, one per
    device, are summed. The servers keep every row. Of row-sparse values only rows travel, and `push` waits until they
    are computed. The optimizer treats them as MXNet's does: with lazy_update=True, the default of SGD and Adam, and in
    AdaGrad only the gradient's rows change, else they count as a dense gradient with zeros elsewhere. They travel dense
    where a row is longer than a slice; a round in which somebody pushes a dense value is dense.
    For the training thread; a forked child must not use it. Errors are MXNetErrors. When the job fails, every pending
    operation ends, MXNet raises the error where somebody waits, and each later call raises it again.
    """

    def __init__(self, mx: Any, store: Store) -> None:
        super().__init__(store)
        self._mx = mx
        native = Native(mx)
        self._engine = Engine(mx, native)
        self._arrays = Arrays(mx, native)
        self._script_optimizer = ScriptOptimizer(mx, store)
        self._pushes: dict[str, _Push] = {}
        self._rounds: dict[str, PendingExchange] = {}  # of each key the last; only in operations in the key's order
        self.handle = None
        self.calls = 0

    def __del__(self) -> None:
        """There is no native store behind this one."""

    @property
    def failure(self) -> BaseException | None:
        """What has gone wrong in the background, if anything."""
        return self._engine.error

    @_guarded
    def init(self, key: Any, value: Any) -> None:
        """Make keys known with their initial values; waits at a `barrier`. See Store.init."""
        found = [(one, self._arrays.values(arrays)) for one, arrays in pairs(key, value)]
        keys = list(key) if isinstance(key, (list, tuple)) else [key]
        script_optimizer = self._script_optimizer
        arrays = [[item.array.asnumpy() for item in values] for _, values in found]
        self._store.init(keys, arrays, script_optimizer.initial([plain(one) for one in keys]))
        for one, values in found:
            self._arrays.add(str(one), values[0])
            script_optimizer.add(plain(one), values[0].shape, values[0].dtype, self._fill)

    @_guarded
    def push(self, key: Any, value: Any, priority: int = 0, weight: float = 1.0) -> None:
        """Contribute to the keys' next round; returns at once. `value` is not changed; whoever changes it waits, in
        MXNet's engine, until the round is over.

        Of a row-sparse value only its rows travel: the call waits until they are computed, and until the key's last
        round is over.
        `weight` is what the contribution counts in algorithms that make means; they divide by it, nobody multiplies.
        Raises SystemExit in a master worker that does not train; see Store.begin_training.
        """
        checked = self._checked(key, value)
        self._store.begin_training()
        news = [self._script_optimizer.news(plain(one)) for one, _ in checked]  # all, before any is on its way
        for (one, values), hyper in zip(checked, news, strict=True):
            self._push(one, values, priority, hyper, weight)

    @_guarded
    def abstain(self, key: Any, priority: int = 0) -> None:
        """Take part in the keys' next round with nothing to contribute; returns at once, and `pull` gives the result.

        For a worker that has no more data while others train: it stays in step with them, and counts for nothing.
        """
        names = [self._store.known(one) for one in (key if isinstance(key, (list, tuple)) else [key])]
        self._store.begin_training()
        for name in names:
            self._abstain(name, priority)

    @_guarded
    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Write the result of the latest push of each key, or without one the servers' value; returns at once.

        With `ignore_sparse` row-sparse arrays stay as they are; see `row_sparse_pull`. Arrays of another dtype than the
        key's get the values converted, as in MXNet; what is pushed has the key's.
        """
        if out is None:
            raise InvalidSettings("pull needs arrays to write to", "pass out=")
        for one, outs in self._checked(key, out, converted=True):
            taken = [item for item in outs if not (ignore_sparse and item.is_sparse)]
            if taken:
                self._pull(one, taken, priority)

    @_guarded
    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        """As `pull`, but write only some rows to row-sparse arrays: those whose numbers are in `row_ids`.

        row_ids: an array for each one of `out`, or one for all of a key's; in any order, perhaps more than once. Only
        these rows travel. Waits for `row_ids` and for the rows, of all keys at once.
        """
        if out is None or row_ids is None:
            raise InvalidSettings("row_sparse_pull needs arrays and numbers of rows", "pass out= and row_ids=")
        if isinstance(key, (list, tuple)) and len(key) == 1:
            key, out, row_ids = (_only(item) for item in (key, out, row_ids))
        outs, numbers = self._checked(key, out, converted=True), pairs(key, row_ids)
        found: list[tuple[Key, ArrayInfo, Array]] = []
        for (one, given), (_, rows) in zip(outs, numbers, strict=True):
            if not all(item.is_sparse for item in given) or len(rows) not in (1, len(given)):
                message = f"key {one!r} comes with {len(given)} arrays and {len(rows)} of row numbers"
                raise InvalidSettings(message, "give row-sparse arrays, and numbers for each one or the same for all")
            wanted = rows * (len(given) // len(rows))
            found += [(one, out, self._arrays.numbers(row, out)) for out, row in zip(given, wanted, strict=True)]
        with self._mx.autograd.pause():
            targets = [self._fetch_rows(*item, priority) for item in found]
            for (_, item, taken), target in zip(found, targets, strict=True):
                self._arrays.deliver_rows(taken, target, item)

    @_guarded
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """`push`, then `pull` to `out`, or without it to `value`."""
        values = self._checked(key, value)
        outs = values if out is None else self._checked(key, out, converted=True)
        self._store.begin_training()
        news = [self._script_optimizer.news(plain(one)) for one, _ in values]
        for (one, given), (_, taken), hyper in zip(values, outs, news, strict=True):
            self._push(one, given, priority, hyper)
            self._pull(one, taken, priority)

    @_guarded
    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """`init`, then `pull`."""
        self.init(key, value)
        self.pull(key, out, priority)

    @_guarded
    def set_optimizer(self, optimizer: Any) -> None:
        """Have the global servers update the weights; waits until they know.

        Learning rate, rescale_grad, multipliers and the other hyper-parameters are read again at each push of this
        process, and a schedule moves with these pushes. For a master worker that does not train the servers follow one
        of MXNet's schedules by the number of updates. An optimizer that cannot travel runs on the workers, which must
        all set it. Set anew later, an optimizer begins afresh with the next push; see Store.set_optimizer.
        """
        self._script_optimizer.set(optimizer, self._fill)

    def _push(self, key: Key, values: list[ArrayInfo], priority: int, hyper: Hyper, weight: float = 1.0) -> None:
        name, updates = str(key), self._script_optimizer.updates
        begin = partial(self._store.start, name, out=None, priority=priority, hyper=hyper, weight=weight)
        of_rows = updates is None and all(item.is_sparse for item in values)
        if of_rows and self._store.has_rows(name, values[0].shape):
            if name in self._pushes:  # rows are held here, so those of one round at a time
                self._arrays.order(name).wait_to_read()
            rows = self._arrays.rows(values)
            self._exchange(name, lambda: begin(source=rows), priority, _Push())
            return
        source, view = self._source(name, values), self._arrays.view
        self._exchange(name, lambda: begin(source=view(source)), priority, _Push(brings=True), reads=[source.array])

    def _source(self, name: str, values: list[ArrayInfo]) -> ArrayInfo:
        """The array that is to be sent: the value itself where that can be, else the key's buffer."""
        if len(values) == 1 and self._arrays.holds(name, values[0]):
            return values[0]
        buffer = self._arrays.buffer(name)
        with self._mx.autograd.pause():
            self._arrays.fill(buffer, values)
        return buffer

    def _abstain(self, name: str, priority: int) -> None:
        buffer, abstain, view = self._arrays.buffer(name), self._store.abstain, self._arrays.view
        push = _Push(brings=True)
        self._exchange(name, lambda: abstain(name, view(buffer), priority), priority, push, writes=[buffer.array])

    def _exchange(
        self, name: str, begin: Callable[[], PendingExchange], priority: int, push: _Push,
        *, reads: Sequence[Any] = (), writes: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        """Queue a round of one key, which has one under way: the next value waits for it in the script's own arrays."""
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

    def _pull(self, key: Key, outs: list[ArrayInfo], priority: int) -> None:
        name, updates, is_here = str(key), self._script_optimizer.updates, self._is_here(str(key))
        # What has to be fetched is fetched once, so for several arrays to the buffer.
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

    def _fill(self, name: str, flat: Any) -> None:
        """Copy the key's result to a flat array."""
        with self._mx.autograd.pause():
            self._fetch(name).reshape(flat.shape).copyto(flat)

    def _value(self, name: str, priority: int) -> Any:
        """The array in which what a pull gives will be: the weight where the optimizer runs here, else the buffer."""
        updates = self._script_optimizer.updates
        return self._fetch(name, priority) if updates is None else updates.weights[name]

    def _fetch(self, name: str, priority: int = 0) -> Any:
        """The key's buffer, in which its result will be."""
        buffer = self._arrays.buffer(name)
        self._write(name, [buffer], priority, self._is_here(name))
        return buffer.array

    def _write(self, name: str, outs: list[ArrayInfo], priority: int, is_here: bool) -> None:
        """Queue that the key's result comes to these arrays, which can hold it. Then only the servers have it."""
        order, buffer, left = self._arrays.order(name), self._arrays.buffer(name), list(outs)

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

    def _is_here(self, name: str) -> bool:
        """Whether the key's last push brings the value, and no newer one may be at the servers."""
        last = self._pushes.get(name)
        return last is not None and last.brings and not (last.over and self._store.asynchronous)

    def _fetch_rows(self, key: Key, out: ArrayInfo, numbers: Array, priority: int) -> Any:
        """An array in which these rows of what a pull gives will be, as `out` has them; None for no rows."""
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

    def _checked(self, key: Any, value: Any, *, converted: bool = False) -> list[tuple[Key, list[ArrayInfo]]]:
        """Keys and values, after all of them have been checked.

        converted: whether values may be of another dtype than their key.
        """
        found = [(one, self._arrays.values(arrays)) for one, arrays in pairs(key, value)]
        for one, values in found:
            for item in values:
                self._store.lookup(one, item.size, "" if converted else item.dtype)
        return found

    def is_capable(self, capability: str) -> bool:
        """Whether the store can run an optimizer ("optimizer")."""
        if capability.lower() == "optimizer":
            return True
        raise self._mx.base.MXNetError(f"unknown capability {capability!r}")

    @_guarded
    def barrier(self, scope: Literal["party", "all"] | None = None) -> None:
        """Wait until all workers of the party, or with "all" of the job, have come here; without `scope`, those that
        `num_workers` counts.
        """
        if scope not in (None, "party", "all"):
            raise InvalidSettings(f"there is no barrier over {scope!r}", 'choose "party" or "all"')
        self._store.barrier(scope)

    def _barrier(self) -> None:
        self.barrier()

    @_guarded
    def set_gradient_compression(self, compression_params: Any) -> None:
        """Choose the codec of what crosses between parties and global servers, as in {"type": "fp16"} or {"type":
        "2bit", "threshold": 0.5}; a threshold is what follows the colon in `--compress 2bit:0.5`. Blocks until all
        servers use it. Let all workers call it, before the first push. Raises MXNetError for one that does not exist.
        """
        params = dict(compression_params) if isinstance(compression_params, Mapping) else {}
        kind, argument = params.pop("type", None), params.pop("threshold", None)
        known = ("none", *plugins.codecs())
        if kind not in known or params:
            hint = f"""set {{"type": ...}} to {" or ".join(f'"{name}"' for name in known)}"""
            raise InvalidSettings(f"there is no gradient compression {kind or compression_params!r}", hint)
        self._store.set_compression(str(kind) if argument is None else f"{kind}:{argument}")

    @_guarded
    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write what the servers' optimizer keeps, momentum and the like but not the weights, to a file.

        Any worker may call it, between its rounds; waits for those that it has begun. With `dump_optimizer` the
        hyper-parameters and this worker's numbers of updates are taken up too by who loads the file. It is numpy's .npz
        (see state_file.py).
        """
        self._engine.settle()
        self._script_optimizer.save(Path(fname), dump_optimizer)

    @_guarded
    def load_optimizer_states(self, fname: str) -> None:
        """Have the servers' optimizer, which has been set already, go on from a file of `save_optimizer_states`.

        With the same weights training goes on bit for bit, whatever the number of servers. One worker that trains may
        call it, or all of them, before the same round; where the optimizer runs on the workers, all of them.
        """
        self._engine.settle()
        self._script_optimizer.load(Path(fname))

    @property
    def _updater(self) -> Any:
        """Where gluon.Trainer finds the optimizer after it has loaded states."""
        optimizer = self._script_optimizer.optimizer
        return None if optimizer is None else SimpleNamespace(optimizer=optimizer)

    @_guarded
    def option(self, name: str) -> Any:
        """What the job has for an option of `geomx launch`, as in option("k1")."""
        return self._store.option(name)

    @_guarded
    def _set_updater(self, updater: Any) -> None:
        raise InvalidSettings("an updater of one's own cannot run on the servers", "use set_optimizer")

    @_guarded
    def _send_command_to_servers(self, head: int, body: Any) -> None:
        raise InvalidSettings(f"the servers know no command {head}", "use set_optimizer")

    def settle(self) -> None:
        """Wait for everything queued in MXNet. Raises MXNetError for what has failed."""
        self._engine.settle()


def _only(item: Any) -> Any:
    """The item of a list of one; anything else as it is."""
    return item[0] if isinstance(item, (list, tuple)) and len(item) == 1 else item
