"""Every method of MXNet's KVStore, over a Store and MXNet's engine.

`push` returns at once: the engine copies the value when it is ready, and an operation of ours hands the copy to the
client. `pull` makes an operation that ends when the result is there; whoever reads `out` next waits for that one
array. Both also pass through one small array per key, its turn, so that pushes and pulls of one key happen in the order
in which they were called.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np

from geomx_cli import plugins
from geomx_cli.errors import GeomxError, InvalidSettings
from geomx_cli.ps.rows import Rows
from geomx_cli.ps.wire import Array
from geomx_cli.runtime.engine import Completion, Engine
from geomx_cli.runtime.keys import Key, pairs
from geomx_cli.runtime.kvstore import Store
from geomx_cli.runtime.mxnet_arrays import Arrays, is_sparse, size_of
from geomx_cli.runtime.mxnet_optimizer import from_mxnet, take_up
from geomx_cli.runtime.mxnet_standing import MxnetStanding

__all__ = ["MxnetStore"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


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
        self._engine = Engine(mx)
        self._arrays = Arrays(mx)
        self._turns: dict[str, Any] = {}
        self._optimizer: Any = None
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
        """Make keys known with their initial values; waits for the party's workers. See Store.init."""
        found = [(one, list(values)) for one, values in pairs(key, value)]
        self._arrays.check(item for _, values in found for item in values)
        keys = list(key) if isinstance(key, (list, tuple)) else [key]
        self._store.init(keys, [[item.asnumpy() for item in values] for _, values in found])
        for one, _ in found:
            self._turns[str(one)] = self._mx.nd.zeros((1,))

    @_guarded
    def push(self, key: Any, value: Any, priority: int = 0, weight: float = 1.0) -> None:
        """Contribute to the keys' next round; returns at once. `value` is not changed, and may change at once.

        Of a row-sparse value only its rows travel, and for these the call waits until they are computed.
        `weight` is what the contribution counts in algorithms that make means; they divide by it, nobody multiplies.
        Raises SystemExit in a master worker that does not train; see Store.begin_training.
        """
        checked = self._checked(key, value)
        self._store.begin_training()
        for one, values in checked:
            self._push(one, values, priority, weight)

    @_guarded
    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Write the result of the latest push of each key, or without one the servers' value; returns at once.

        With `ignore_sparse` row-sparse arrays stay as they are; see `row_sparse_pull`.
        """
        if out is None:
            raise InvalidSettings("pull needs arrays to write to", "pass out=")
        for one, outs in self._checked(key, out):
            taken = [item for item in outs if not (ignore_sparse and is_sparse(item))]
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
        outs, numbers = self._checked(key, out), pairs(key, row_ids)
        found: list[tuple[Key, Any, Array]] = []
        for (one, given), (_, rows) in zip(outs, numbers, strict=True):
            if not all(map(is_sparse, given)) or len(rows) not in (1, len(given)):
                message = f"key {one!r} comes with {len(given)} arrays and {len(rows)} of row numbers"
                raise InvalidSettings(message, "give row-sparse arrays, and numbers for each one or the same for all")
            wanted = rows * (len(given) // len(rows))
            found += [(one, out, self._arrays.numbers(row, out)) for out, row in zip(given, wanted, strict=True)]
        targets = [self._fetch_rows(*item, priority) for item in found]
        with self._mx.autograd.pause():
            for (_, item, taken), target in zip(found, targets, strict=True):
                self._arrays.deliver_rows(taken, target, item)

    @_guarded
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """`push`, then `pull` to `out`, or without it to `value`."""
        values = self._checked(key, value)
        outs = values if out is None else self._checked(key, out)
        self._store.begin_training()
        for (one, given), (_, taken) in zip(values, outs, strict=True):
            self._push(one, given, priority)
            self._pull(one, taken, priority)

    @_guarded
    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """`init`, then `pull`."""
        self.init(key, value)
        self.pull(key, out, priority)

    @_guarded
    def set_optimizer(self, optimizer: Any) -> None:
        """Have the global servers update the weights; waits until they know.

        Learning rate, rescale_grad and the other hyper-parameters are read again at each push of this process. A
        schedule moves with the pushes of this process too, so a master worker that only starts the job cannot have one.
        """
        self._store.set_optimizer(*from_mxnet(optimizer))
        self._optimizer = optimizer

    def _news(self, key: Key, name: str) -> dict[str, float]:
        """The hyper-parameters that go with a push."""
        if self._optimizer is not None:
            if self._optimizer.lr_scheduler is not None:
                self._optimizer._update_count(key)
            self._store.change(from_mxnet(self._optimizer)[1])
        return self._store.news(name)

    def _push(self, key: Key, values: list[Any], priority: int, weight: float = 1.0) -> None:
        name = str(key)
        news = self._news(key, name)
        if all(map(is_sparse, values)) and self._store.has_rows(name, values[0].shape):
            self._push_rows(name, self._arrays.rows(values), priority, news, weight)
            return
        source = self._arrays.source(name, values[0])
        with self._mx.autograd.pause():
            self._arrays.sum(values).copyto(source.array)

        def send(done: Completion) -> None:
            exchange = self._store.start(name, self._engine.view(source.array), priority, news, weight)
            exchange.sent.add_done_callback(source.release)
            done()

        self._engine.queue(send, reads=[source.array], writes=[self._turns[name]], priority=priority, name="geomx push")

    def _push_rows(self, name: str, rows: Rows, priority: int, news: dict[str, float], weight: float) -> None:
        def send(done: Completion) -> None:
            self._store.start(name, rows, priority, news, weight)
            done()

        self._engine.queue(send, reads=[], writes=[self._turns[name]], priority=priority, name="geomx push")

    def _pull(self, key: Key, outs: list[Any], priority: int) -> None:
        target = self._fetch(key, outs, priority)
        with self._mx.autograd.pause():
            self._arrays.deliver(target, outs)

    def _fetch(self, key: Key, outs: list[Any], priority: int) -> Any:
        """Where the key's result comes to, for `outs`."""
        name = str(key)
        target = self._arrays.target(name, outs)

        def fetch(done: Completion) -> None:
            future = self._store.fetch(name, self._engine.view(target), priority)
            future.add_done_callback(lambda finished: done(finished.exception()))

        self._engine.queue(fetch, reads=[], writes=[target, self._turns[name]], priority=priority, name="geomx pull")
        return target

    def _fetch_rows(self, key: Key, out: Any, numbers: Array, priority: int) -> Any:
        """Where rows of the key's result come to, for `out`; None for no rows."""
        if not len(numbers):
            return None
        name, target = str(key), self._arrays.room(numbers, out)

        def fetch(done: Completion) -> None:
            future = self._store.fetch_rows(name, numbers, self._engine.view(target), priority)
            future.add_done_callback(lambda finished: done(finished.exception()))

        self._engine.queue(fetch, reads=[], writes=[target, self._turns[name]], priority=priority, name="geomx pull")
        return target

    def _checked(self, key: Any, value: Any) -> list[tuple[Key, list[Any]]]:
        """Keys and values, after all of them have been checked; `mx.np` arrays as NDArrays of the same memory."""
        given: list[tuple[Key, list[Any]]] = pairs(key, value)
        self._arrays.check(item for _, values in given for item in values)
        found = [(one, [item.as_nd_ndarray() for item in values]) for one, values in given]
        for one, values in found:
            for item in values:
                self._store.lookup(one, size_of(item), np.dtype(item.dtype).name)
        return found

    def is_capable(self, capability: str) -> bool:
        """Whether the store can run an optimizer ("optimizer")."""
        if capability.lower() == "optimizer":
            return True
        raise self._mx.base.MXNetError(f"unknown capability {capability!r}")

    @_guarded
    def barrier(self, scope: str = "party") -> None:
        """Wait until all workers of the party, or with "all" of the job, have come here."""
        if scope not in ("party", "all"):
            raise InvalidSettings(f"there is no barrier over {scope!r}", 'choose "party" or "all"')
        self._store.barrier("party" if scope == "party" else "all")

    def _barrier(self) -> None:
        self.barrier()

    @_guarded
    def set_gradient_compression(self, compression_params: Any) -> None:
        """Choose a codec for what crosses the wide area, as in {"type": "none"}; "none" is all there is."""
        kind = compression_params.get("type") if isinstance(compression_params, Mapping) else None
        known = ("none", *plugins.codecs())
        if kind not in known:
            hint = f"""set {{"type": ...}} to {" or ".join(f'"{name}"' for name in known)}"""
            raise InvalidSettings(f"there is no gradient compression {kind!r}", hint)

    @_guarded
    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write what the servers' optimizer keeps, momentum and the like but not the weights, to a file.

        Any worker may call it, between its rounds; waits for those that it has begun. With `dump_optimizer` the
        hyper-parameters and this worker's numbers of updates are taken up too by who loads the file. It is numpy's .npz
        (see state_file.py).
        """
        self._engine.settle()
        counts = self._optimizer._index_update_count if self._optimizer is not None else {}
        self._store.save_states(Path(fname), counts if dump_optimizer else None)

    @_guarded
    def load_optimizer_states(self, fname: str) -> None:
        """Have the servers' optimizer, which has been set already, go on from a file of `save_optimizer_states`.

        With the same weights training goes on bit for bit, whatever the number of servers. One worker that trains may
        call it, or all of them, before the same round.
        """
        self._engine.settle()
        state = self._store.load_states(Path(fname))
        if state.counts is not None and self._optimizer is not None:
            take_up(self._optimizer, state.params, state.counts)

    @property
    def _updater(self) -> Any:
        """Where gluon.Trainer finds the optimizer after it has loaded states."""
        return None if self._optimizer is None else SimpleNamespace(optimizer=self._optimizer)

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
