"""Framework-independent KVStore semantics over a client: keys, checks, initialization, hyper-parameters of pushes.

Initial values are numpy arrays of float32, float64 or float16, of any shape; contributions and results are 1-D.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.cluster.partition import Tensor
from geomx_cli.ps.net.payload import Content
from geomx_cli.ps.net.wire import FLOAT_NAMES
from geomx_cli.ps.operation_queue import PendingExchange
from geomx_cli.runtime.script.base_store import BaseStore, Key, pairs, plain
from geomx_cli.runtime.script.remote_optimizer import Hyper, MomentumCheck, RemoteOptimizer
from geomx_cli.runtime.training.worker_state import WorkerState

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client

__all__ = ["Store", "row_size"]

_MASTER_ENDS = (
    "the master worker has set the job up; it does not train, and ends here; global_rank 0 is the one to save a model"
)


class Store(BaseStore):
    """One worker's key-value store.

    `init` and `barrier` block; everything else returns at once, with futures. Callers of `start` and
    `fetch` from several threads must keep the order of calls per key; different keys need no order. After the job has
    failed, every call and future raises the client's error: PeerLost, TimedOut.

    recovery: what an earlier life of this worker has saved, if its script may save.
    optimizer: that of the global servers.
    momentum: of the script's optimizer, compared with the codec's.
    client: over which it is.
    """

    def __init__(self, client: "Client", kind: str = "dist_sync", recovery: WorkerState | None = None) -> None:
        super().__init__(client, kind)
        self.optimizer = RemoteOptimizer(client, recovery or WorkerState(None, str))
        self.momentum = MomentumCheck(client)
        self.client = client
        self._key_type: type | None = None
        self._tensors: dict[str, Tensor] = {}

    def init(
        self,
        keys: Key | Sequence[Key],
        values: Array | Sequence[Array] | Sequence[Sequence[Array]],
        hyper: Mapping[str, Hyper] | None = None,
    ) -> None:
        """Declare keys and wait at a `barrier`; all workers of the job must init the same keys.

        The master worker's values are used; those of the others only give size and dtype. For keys declared after the
        workers' first push, and thus after the end of a master that does not train, global rank 0's values are used.
        hyper: the master's per-key hyper-parameters, by name. Afterwards `fetch` returns the
        master's values on all workers. Raises InvalidSettings, with nothing changed, for an existing key, and for a
        dtype or size that this worker or another one rejects.
        """
        listed: list[Key] = list(keys) if isinstance(keys, (list, tuple)) else [keys]  # type: ignore[list-item]
        if len(set(listed)) < len(listed):
            raise InvalidSettings(f"a key stands twice in {listed}", "each key is initialised once")
        found = []
        for key, arrays in pairs(keys, values):
            if len(arrays) != 1:
                raise InvalidSettings(f"key {key!r} comes with {len(arrays)} initial values", "give one")
            found.append((self._new_tensor(key, arrays[0]), arrays[0]))
        self._client.declare([tensor for tensor, _ in found])
        given = {tensor.name: np.ascontiguousarray(array).reshape(-1) for tensor, array in found}
        source = self._client.late_source if self.optimizer.training else None
        self._client.init(given, hyper, source=source)
        self._tensors |= {tensor.name: tensor for tensor, _ in found}
        self._key_type = type(plain(listed[0])) if listed else self._key_type
        self.barrier()

    def _new_tensor(self, key: Key, value: Array) -> Tensor:
        name = self._name(key)
        if name in self._tensors:
            raise InvalidSettings(f"key {key!r} is initialised already", "each key is initialised once")
        if str(value.dtype) not in FLOAT_NAMES:
            raise InvalidSettings(f"key {key!r} is of {value.dtype}", f"a value is of {', '.join(FLOAT_NAMES)}")
        if value.size < 1:
            raise InvalidSettings(f"key {key!r} has no elements", "leave it out")
        return Tensor(name, value.size, str(value.dtype), row_size(value.shape))

    def adopt(self, key: Key) -> None:
        """Take up a key that an earlier life of this worker has initialised, and the client has declared again."""
        self._tensors[str(key)] = self._client.tensors[str(key)].placement.tensor
        self._key_type = type(key)

    def _name(self, key: Key) -> str:
        key = plain(key)
        if self._key_type is not None and type(key) is not self._key_type:
            raise InvalidSettings(f"key {key!r} among keys of {self._key_type.__name__}", "use either int or str keys")
        return str(key)

    def known(self, key: Key) -> str:
        """Return the name of a known key. Raises InvalidSettings for an unknown one."""
        name = self._name(key)
        if name not in self._tensors:
            raise InvalidSettings(f"key {key!r} has not been initialised", "call init first")
        return name

    def dtype(self, key: Key) -> str:
        """Return the dtype of an initialized key."""
        return self._tensors[self.known(key)].dtype

    def lookup(self, key: Key, size: int, dtype: str = "") -> str:
        """Return the name of a known key. Raises InvalidSettings for an unknown key, or one with another size or (if
        given) dtype.
        """
        name = self.known(key)
        tensor = self._tensors[name]
        if (size, dtype or tensor.dtype) != (tensor.size, tensor.dtype):
            raise InvalidSettings(
                f"key {key!r} has {tensor.size} elements of {tensor.dtype}, not {size} of {dtype or tensor.dtype}",
                "size and dtype of a key never change",
            )
        return name

    def begin_training(self) -> None:
        """Mark the transition from setup to training. Raises SystemExit in a master that does not train.

        A script unaware of masters would have it train on all data, as the only worker of its party, with weights that
        lag behind the others'. So it exits with status 0 and leaves the job as usual.
        """
        if not self._client.trains:
            print(_MASTER_ENDS, file=sys.stderr, flush=True)
            raise SystemExit(0)
        self.optimizer.training = True

    def has_rows(self, name: str, shape: Sequence[int]) -> bool:
        """Return whether an array of this shape has rows of the same size as the rows of a known key."""
        return self._tensors[name].row == row_size(shape)

    def start(
        self, name: str, source: Content, out: Array | None, priority: int, hyper: Hyper, weight: float = 1.0
    ) -> PendingExchange:
        """Begin the next round of one key with `source` (1-D, or rows), which must not change until the exchange's
        `sent` completes. The result is written to `out`, which may be `source`, or kept for `fetch`; that of rows stays
        at the servers.
        """
        return self._client.exchange(name, source, out, priority=priority, weight=weight, hyper=hyper)

    def abstain(self, name: str, out: Array | None, priority: int) -> PendingExchange:
        """Abstain from the next round of one key (weight 0). The result is written to `out`, or kept for `fetch`."""
        return self._client.exchange(name, None, out, priority=priority)

    @property
    def asynchronous(self) -> bool:
        """Whether parties train independently, so that the servers' value may be newer than the last result."""
        return self._client.asynchronous

    def fetch(self, name: str, out: Array, priority: int) -> "Future[None]":
        """Fill `out` (1-D) with the result of this key's latest round, else with the servers' value."""
        return self._client.pull(name, out, priority=priority)

    def fetch_rows(self, name: str, numbers: Array, out: Array, priority: int) -> "Future[None]":
        """Like `fetch`, for the rows `numbers` (strictly increasing) only; `out` (1-D) holds these rows."""
        return self._client.pull_rows(name, numbers, out, priority=priority)

    def set_compression(self, spec: str) -> None:
        """See ControlClient.set_compression."""
        self._client.control.set_compression(spec)
        self.momentum.use_codec(spec)

    def versions(self, key: Key) -> tuple[int, int]:
        """See Client.versions."""
        return self._client.versions(self._name(key))

    def barrier(self, scope: Literal["party", "all"] | None = None) -> None:
        """Wait for all workers of the party or job; without `scope`, for those counted by `num_workers`."""
        self._client.control.barrier(scope or ("all" if self._client.ranks_are_global else "party"))


def row_size(shape: Sequence[int]) -> int:
    """Return the number of elements per row of an array (fixed first index)."""
    return math.prod(shape[1:])
