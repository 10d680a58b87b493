"""Every method of MXNet's KVStore, over a Store and MXNet's engine.

`push` returns at once: the engine copies the value when it is ready, and an operation of ours hands the copy to the
client. `pull` makes an operation that ends when the result is there; whoever reads `out` next waits for that one
array. Both also pass through one small array per key, its turn, so that pushes and pulls of one key happen in the order
in which they were called.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import numpy as np

from geomx_cli.errors import GeomxError, InvalidSettings
from geomx_cli.runtime.engine import Completion, Engine
from geomx_cli.runtime.kvstore import DTYPES, Key, Store, pairs
from geomx_cli.runtime.mxnet_optimizer import from_mxnet

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


class _Source:
    """An array that holds a value until its round is over; `free` says that it may hold another."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.free = False

    def release(self, _: object) -> None:
        self.free = True


class MxnetStore:
    """Every method of mxnet.kvstore.KVStore, over a Store. `register` mixes it with that class, which Trainer asks for.

    Values are dense NDArrays of float32, float64 or float16, on any device; lists of values, one per device, are
    summed. For the training thread; a forked child must not use it. Errors are MXNetErrors. When the job fails, every
    pending operation ends, MXNet raises the error where somebody waits, and each later call raises it again.
    """

    def __init__(self, mx: Any, store: Store) -> None:
        self._mx = mx
        self._store = store
        self._engine = Engine(mx)
        # MXNet's convolutions leave arrays in layouts that only its own operators can read.
        self._has_layouts = mx.runtime.Features().is_enabled("MKLDNN")
        self._turns: dict[str, Any] = {}
        self._sources: dict[str, list[_Source]] = {}
        self._targets: dict[str, Any] = {}
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
        self._dense(item for _, values in found for item in values)
        keys = list(key) if isinstance(key, (list, tuple)) else [key]
        self._store.init(keys, [[item.asnumpy() for item in values] for _, values in found])
        for one, _ in found:
            self._turns[str(one)] = self._mx.nd.zeros((1,))

    @_guarded
    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Contribute to the keys' next round; returns at once. `value` is not changed, and may change at once.

        Raises SystemExit in a master worker that does not train; see Store.begin_training.
        """
        checked = self._checked(key, value)
        self._store.begin_training()
        for one, values in checked:
            self._push(one, values, priority)

    @_guarded
    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Write the result of the latest push of each key, or without one the servers' value; returns at once."""
        if out is None or not ignore_sparse:
            raise InvalidSettings("pull needs out and knows no sparse arrays", "pass out=, leave ignore_sparse=True")
        for one, outs in self._checked(key, out):
            self._pull(one, outs, priority)

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

    def _push(self, key: Key, values: list[Any], priority: int) -> None:
        name = str(key)
        news = self._news(key, name)
        source = self._source(name, values[0])
        with self._mx.autograd.pause():
            self._sum(values).copyto(source.array)

        def send(done: Completion) -> None:
            exchange = self._store.start(name, self._engine.view(source.array), priority, news)
            exchange.sent.add_done_callback(source.release)
            done()

        self._engine.queue(send, reads=[source.array], writes=[self._turns[name]], priority=priority, name="geomx push")

    def _pull(self, key: Key, outs: list[Any], priority: int) -> None:
        name = str(key)
        target = outs[0] if self._is_plain(outs[0]) else self._target(name, outs[0])

        def fetch(done: Completion) -> None:
            future = self._store.fetch(name, self._engine.view(target), priority)
            future.add_done_callback(lambda finished: done(finished.exception()))

        self._engine.queue(fetch, reads=[], writes=[target, self._turns[name]], priority=priority, name="geomx pull")
        with self._mx.autograd.pause():
            for out in outs:
                if out is not target:
                    target.copyto(out)

    def _is_plain(self, array: Any) -> bool:
        """Whether its memory can be written to: on the CPU, and never in a layout of oneDNN's."""
        special = self._has_layouts and array.ndim > 1 and array.dtype == np.float32
        return array.context.device_type == "cpu" and not special

    def _target(self, name: str, like: Any) -> Any:
        """This key's array for results on their way to one that cannot be written to."""
        target = self._targets.get(name)
        if target is None or target.shape != like.shape:
            target = self._targets[name] = self._mx.nd.empty(like.shape, self._mx.cpu(), like.dtype)
        return target

    def _source(self, name: str, like: Any) -> "_Source":
        """An array of this key's for a value on its way that no round needs any more."""
        sources = self._sources.setdefault(name, [])
        for source in sources:
            if source.free and source.array.shape == like.shape:
                source.free = False
                return source
        sources[:] = [source for source in sources if not source.free]
        sources.append(_Source(self._mx.nd.empty(like.shape, self._mx.cpu(), like.dtype)))
        return sources[-1]

    def _sum(self, values: list[Any]) -> Any:
        """The sum of the devices' values; fp16 is added in fp32."""
        if len(values) == 1:
            return values[0]
        first, *others = (value.as_in_context(self._mx.cpu()) for value in values)
        total = first.astype("float32") if first.dtype == np.float16 else first
        for other in others:
            total = total + other.astype(total.dtype)
        return total.astype(first.dtype, copy=False)

    def _checked(self, key: Any, value: Any) -> list[tuple[Key, list[Any]]]:
        """Keys and values, after all of them have been checked; `mx.np` arrays as NDArrays of the same memory."""
        given: list[tuple[Key, list[Any]]] = pairs(key, value)
        self._dense(item for _, values in given for item in values)
        found = [(one, [item.as_nd_ndarray() for item in values]) for one, values in given]
        for one, values in found:
            for item in values:
                self._store.lookup(one, item.size, np.dtype(item.dtype).name)
        return found

    def _dense(self, values: Iterator[Any]) -> None:
        for value in values:
            if not isinstance(value, self._mx.nd.NDArray):
                raise InvalidSettings(f"a {type(value).__name__} is no NDArray")
            if value.stype != "default" or np.dtype(value.dtype).name not in DTYPES:
                what = value.stype if value.stype != "default" else np.dtype(value.dtype).name
                raise InvalidSettings(f"a value of {what} cannot travel", f"use a dense array of {', '.join(DTYPES)}")

    @property
    def type(self) -> str:
        """The type that the store was created with."""
        return self._store.type

    @property
    def rank(self) -> int:
        """This worker's rank in its party."""
        return self._store.rank

    @property
    def num_workers(self) -> int:
        """Workers of this worker's party."""
        return self._store.num_workers

    @property
    def num_all_workers(self) -> int:
        """Training workers of the job."""
        return self._store.num_all_workers

    @property
    def is_master_worker(self) -> bool:
        """Whether this worker configures the global servers and gives the initial weights."""
        return self._store.is_master_worker

    @property
    def party(self) -> str:
        """The name of this worker's party."""
        return self._store.party

    @property
    def global_rank(self) -> int:
        """This worker's rank among all training workers; -1 for a master worker that does not train."""
        return self._store.global_rank

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
    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        """Not there."""
        raise InvalidSettings("there is no row_sparse_pull", "use dense parameters")

    @_guarded
    def set_gradient_compression(self, compression_params: Any) -> None:
        """Not there."""
        raise InvalidSettings("there is no gradient compression")

    @_guarded
    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Not there."""
        raise InvalidSettings("the optimizer's state on the servers cannot be saved", "update on the workers")

    @_guarded
    def load_optimizer_states(self, fname: str) -> None:
        """Not there."""
        raise InvalidSettings("the optimizer's state on the servers cannot be loaded", "update on the workers")

    @_guarded
    def _set_updater(self, updater: Any) -> None:
        raise InvalidSettings("an updater of one's own cannot run on the servers", "use set_optimizer")

    @_guarded
    def _send_command_to_servers(self, head: int, body: Any) -> None:
        raise InvalidSettings(f"the servers know no command {head}", "use set_optimizer")

    def settle(self) -> None:
        """Wait for everything queued in MXNet. Raises MXNetError for what has failed."""
        self._engine.settle()
