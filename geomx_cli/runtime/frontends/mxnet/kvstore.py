"""Every method of MXNet's KVStore, over a Store and MXNet's engine."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from geomx_cli.core import plugins
from geomx_cli.core.errors import GeomxError, InvalidSettings
from geomx_cli.ps.arrays import Array
from geomx_cli.runtime.frontends.mxnet.arrays import Arrays, Engine
from geomx_cli.runtime.frontends.mxnet.exchanges import Exchanges
from geomx_cli.runtime.frontends.mxnet.native import ArrayInfo, Native
from geomx_cli.runtime.frontends.mxnet.script_optimizer import ScriptOptimizer
from geomx_cli.runtime.frontends.mxnet.store_state import StoreState
from geomx_cli.runtime.script.base_store import BaseStore, Key, pairs, plain
from geomx_cli.runtime.script.store import Store
from geomx_cli.runtime.training.worker_state import WorkerState

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.algorithms._esync_client import EsyncClient

__all__ = ["KVStore"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _guarded(method: _Method) -> _Method:
    """Decorate a public method: raise the job's failure, and convert errors to MXNetError."""

    @functools.wraps(method)
    def call(self: "KVStore", *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        try:
            if self.failure is not None:
                raise self.failure
            return method(self, *args, **kwargs)
        except GeomxError as error:
            raise self._mx.base.MXNetError(str(error)) from None

    return cast(_Method, call)


class KVStore(BaseStore):
    """Every method of mxnet.kvstore.KVStore, over a Store. `register` mixes it with that class, as Trainer requires.

    Values are NDArrays of float32, float64 or float16, dense or row-sparse, on any device. A list of values, one per
    device, is summed. The servers hold every row. Row-sparse values are sent as rows, and `push` waits until they are
    computed. The optimizer treats them like MXNet's optimizer. With lazy_update=True, the default of SGD and Adam, and
    in AdaGrad it updates only the gradient's rows. Otherwise the gradient is dense, with zeros elsewhere. If a row is
    longer than a slice, the value is sent dense. A round with any dense contribution is dense.

    Call the store from the training thread, and never in a forked child. Errors are MXNetErrors. When the job fails,
    every pending operation completes, MXNet raises the error from waiting calls, and each later call raises it again.

    kept: the part of the store's state that a script's state saves.
    """

    def __init__(self, mx: Any, client: "Client", kind: str, recovery: WorkerState) -> None:
        super().__init__(client, kind)
        self._mx = mx
        self._store = store = Store(client, kind, recovery)
        native = Native(mx)
        self._engine = Engine(mx, native)
        self._arrays = Arrays(mx, native)
        self._script_optimizer = ScriptOptimizer(mx, store)
        self._exchanges = Exchanges(mx, store, self._engine, self._arrays, self._script_optimizer)
        self.kept = StoreState(recovery, store, self._engine, self._arrays, self._exchanges, self._script_optimizer)
        self.handle = None
        self.calls = self.steps = 0

    def __del__(self) -> None:
        """Override: there is no native store handle to free."""

    @property
    def failure(self) -> BaseException | None:
        """The background failure, if any."""
        return self._engine.error

    def cause(self, error: BaseException) -> BaseException | None:
        """See ScriptStore."""
        return self.failure

    @_guarded
    def init(self, key: Any, value: Any) -> None:
        """Declare keys with their initial values; waits at a `barrier`. See Store.init."""
        found = [(one, self._arrays.values(arrays)) for one, arrays in pairs(key, value)]
        keys = list(key) if isinstance(key, (list, tuple)) else [key]
        script_optimizer = self._script_optimizer
        arrays = [[item.array.asnumpy() for item in values] for _, values in found]
        self._store.init(keys, arrays, script_optimizer.initial([plain(one) for one in keys]))
        for one, values in found:
            self._arrays.add(str(one), values[0].shape, values[0].dtype)
            script_optimizer.add(plain(one), values[0].shape, values[0].dtype, self._exchanges.fill)

    @_guarded
    def push(self, key: Any, value: Any, priority: int = 0, weight: float = 1.0) -> None:
        """Contribute to the keys' next round. Returns at once. `value` is not modified. Writes to it wait, in MXNet's
        engine, until the round is over.

        weight: the contribution's weight in algorithms that average. The servers divide sums by the total weight, and
            never multiply values by a weight. Only the rows of a row-sparse value are sent. The call then blocks until
            they are computed and the key's last round is over. Raises SystemExit in a master worker that does not
            train; see Store.begin_training.
        """
        checked = self._checked(key, value)
        self._store.begin_training()
        self.steps += 1
        news = [self._script_optimizer.news(plain(one)) for one, _ in checked]  # for all keys, before any is sent
        for (one, values), hyper in zip(checked, news, strict=True):
            self._exchanges.push(one, values, priority, hyper, weight)

    @_guarded
    def abstain(self, key: Any, priority: int = 0) -> None:
        """Take part in the keys' next round with weight 0. Returns at once. `pull` then gives the result.

        For a worker that has run out of data while others train: it stays in step without affecting results.
        """
        names = [self._store.known(one) for one in (key if isinstance(key, (list, tuple)) else [key])]
        self._store.begin_training()
        self.steps += 1
        for name in names:
            self._exchanges.abstain(name, priority)

    @_guarded
    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Write the result of the latest push of each key to `out`. Returns at once.

        Without a push it writes the servers' value. With `ignore_sparse`, row-sparse arrays stay unchanged; see
        `row_sparse_pull`. If an array's dtype differs from the key's, values are converted, as in MXNet. Pushed values
        must have the key's dtype.
        """
        if out is None:
            raise InvalidSettings("pull needs arrays to write to", "pass out=")
        for one, outs in self._checked(key, out, converted=True):
            taken = [item for item in outs if not (ignore_sparse and item.is_sparse)]
            if taken:
                self._exchanges.pull(one, taken, priority)

    @_guarded
    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        """Like `pull`, but write only the rows listed in `row_ids` to row-sparse arrays.

        row_ids: one array for each array of `out`, or one for all arrays of a key. It may be unordered and have
        duplicates. Only these rows are transferred. Waits for `row_ids` and for the rows of all keys together.
        """
        if out is None or row_ids is None:
            raise InvalidSettings("row_sparse_pull needs arrays and numbers of rows", "pass out= and row_ids=")
        self.kept.check_rows()
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
            targets = [self._exchanges.fetch_rows(*item, priority) for item in found]
            for (_, item, taken), target in zip(found, targets, strict=True):
                self._arrays.deliver_rows(taken, target, item)

    @_guarded
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """`push`, then `pull` to `out`, by default to `value`."""
        values = self._checked(key, value)
        outs = values if out is None else self._checked(key, out, converted=True)
        self._store.begin_training()
        self.steps += 1
        news = [self._script_optimizer.news(plain(one)) for one, _ in values]
        for (one, given), (_, taken), hyper in zip(values, outs, news, strict=True):
            self._exchanges.push(one, given, priority, hyper)
            self._exchanges.pull(one, taken, priority)

    @_guarded
    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """`init`, then `pull`."""
        self.init(key, value)
        self.pull(key, out, priority)

    @_guarded
    def set_optimizer(self, optimizer: Any) -> None:
        """Let the global servers update the weights. Waits until they acknowledge this.

        Each push of this process reads learning rate, rescale_grad, multipliers and the other hyper-parameters again,
        and a schedule advances with these pushes. For a master worker that does not train, the servers advance one of
        MXNet's schedules by the number of updates. If the servers cannot run an optimizer, the workers run it. Then all
        of them must set it. If another optimizer is set later, it takes effect with the next push, without state; see
        RemoteOptimizer.set.
        """
        self._script_optimizer.set(optimizer, self._exchanges.fill)

    def check_momentum(self, optimizer: Any) -> None:
        """Warn if this optimizer, which runs in the script, and the codec both have momentum."""
        self._script_optimizer.check_momentum(optimizer, on_servers=False)

    def _checked(self, key: Any, value: Any, *, converted: bool = False) -> list[tuple[Key, list[ArrayInfo]]]:
        """Return keys and values after checking all of them.

        converted: whether values may have another dtype than their key.
        """
        found = [(one, self._arrays.values(arrays)) for one, arrays in pairs(key, value)]
        for one, values in found:
            for item in values:
                self._store.lookup(one, item.size, "" if converted else item.dtype)
        return found

    def is_capable(self, capability: str) -> bool:
        """Return whether the store can run an optimizer ("optimizer")."""
        if capability.lower() == "optimizer":
            return True
        raise self._mx.base.MXNetError(f"unknown capability {capability!r}")

    @_guarded
    def barrier(self, scope: Literal["party", "all"] | None = None) -> None:
        """Wait for all workers of the party, or ("all") of the job; by default for those counted by `num_workers`."""
        if scope not in (None, "party", "all"):
            raise InvalidSettings(f"there is no barrier over {scope!r}", 'choose "party" or "all"')
        self._store.barrier(scope)

    def _barrier(self) -> None:
        self.barrier()

    @_guarded
    def set_gradient_compression(self, compression_params: Any) -> None:
        """Choose the codec for exchanges between parties and global servers, such as {"type": "fp16"} or {"type":
        "2bit", "threshold": 0.5}. The threshold is the number after the colon in `--compress 2bit:0.5`. All other items
        are the codec's parameters, such as in {"type": "bsc", "threshold": 0.01, "pull": "union"}. Blocks until all
        servers use it. All workers must call it before the first push. Raises MXNetError for an unknown codec.
        """
        params = dict(compression_params) if isinstance(compression_params, Mapping) else {}
        kind, argument = params.pop("type", None), params.pop("threshold", None)
        known = ("none", *plugins.codecs())
        if kind not in known:
            hint = f"""set {{"type": ...}} to {" or ".join(f'"{name}"' for name in known)}"""
            raise InvalidSettings(f"there is no gradient compression {kind or compression_params!r}", hint)
        words = [] if argument is None else [str(argument)]
        words += [f"{name}={value}" for name, value in params.items()]
        self._store.set_compression(f"{kind}:{','.join(words)}" if words else str(kind))

    @_guarded
    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the state of the servers' optimizer (momentum and the like, not the weights) to a file.

        Any worker may call it between its rounds. It waits for the rounds that the worker has begun. With
        `dump_optimizer`, loading the file also restores the hyper-parameters and this worker's update counts. The
        format is numpy's .npz (see optimizer_state.py).
        """
        self._engine.wait_for_operations()
        self._script_optimizer.save(Path(fname), dump_optimizer)

    @_guarded
    def load_optimizer_states(self, fname: str) -> None:
        """Restore the state of the servers' optimizer from a file of `save_optimizer_states`. The optimizer must be set
        already.

        With the same weights training continues bit for bit, whatever the number of servers. Call it on one training
        worker, or on all before the same round. If the optimizer runs on the workers, call it on all of them.
        """
        self._engine.wait_for_operations()
        self._script_optimizer.load(Path(fname))

    @property
    def _updater(self) -> Any:
        """The optimizer's location as gluon.Trainer expects it after loading states."""
        optimizer = self._script_optimizer.optimizer
        return None if optimizer is None else SimpleNamespace(optimizer=optimizer)

    @_guarded
    def option(self, name: str) -> Any:
        """Return the job's value of an option of `geomx launch`, such as option("k1")."""
        return super().option(name)

    def esync_client(self) -> "EsyncClient":
        """Return the client of ESync's state server for this worker. Raises InvalidSettings in a job with another
        algorithm.
        """
        self._check_paced()
        return self.kept.esync_client()

    def versions(self, key: Key) -> tuple[int, int]:
        """Return the lowest and highest version of the global servers' weights in the key's latest pull."""
        return self._store.versions(key)

    @_guarded
    def _set_updater(self, updater: Any) -> None:
        raise InvalidSettings("an updater of one's own cannot run on the servers", "use set_optimizer")

    @_guarded
    def _send_command_to_servers(self, head: int, body: Any) -> None:
        raise InvalidSettings(f"the servers know no command {head}", "use set_optimizer")

    def wait_for_operations(self) -> None:
        """Wait for all operations queued in MXNet. Raises MXNetError for failures."""
        self._engine.wait_for_operations()


def _only(item: Any) -> Any:
    """Return the item of a list that has one item. Return any other object unchanged."""
    return item[0] if isinstance(item, (list, tuple)) and len(item) == 1 else item
