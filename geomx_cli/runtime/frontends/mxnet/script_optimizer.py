"""The optimizer that a script sets on its store: its hyper-parameters for the servers, or its run on the workers."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.optim import optimizers
from geomx_cli.runtime.frontends.mxnet.optimizer_params import (
    can_travel,
    from_mxnet,
    index_of,
    multipliers,
    params_of,
    schedule_of,
    take_up,
)
from geomx_cli.runtime.frontends.mxnet.worker_updates import WorkerUpdates
from geomx_cli.runtime.script.base_store import Key
from geomx_cli.runtime.script.remote_optimizer import Hyper
from geomx_cli.runtime.script.store import Store

__all__ = ["ScriptOptimizer"]

_ON_WORKERS = (
    "geomx: the optimizer {} cannot run on the global servers: they sum gradients, and each worker updates its weights"
)


@dataclass(frozen=True, slots=True)
class _Known:
    """An initialized key, the store's `number`-th, from 0."""

    number: int
    shape: tuple[int, ...]
    dtype: Any


class ScriptOptimizer:
    """For the training thread.

    optimizer: MXNet's, None before `set`.
    updates: runs the optimizer on this worker; None if the servers run it.
    """

    def __init__(self, mx: Any, store: Store) -> None:
        self.optimizer: Any = None
        self.updates: WorkerUpdates | None = None
        self._mx = mx
        self._store = store
        self._keys: dict[Key, _Known] = {}

    def set(self, optimizer: Any, fill: Callable[[str, Any], None]) -> None:
        """Have the servers run it, or if they cannot, all workers; blocks. `fill` fetches a key's value from the
        servers into an array.

        A master that does not train sends its schedule and multipliers to the servers; a training worker sends the
        current values with each push. Raises InvalidSettings for a user-defined schedule in such a master.
        """
        if can_travel(optimizer):
            schedule = None if self._store.trains else self._schedule(optimizer)
            own = {} if self._store.trains else {
                str(key): self._own(optimizer, key, known.number) for key, known in self._keys.items()
            }
            self._store.optimizer.set(*from_mxnet(optimizer), schedule, own)
            self.optimizer, self.updates = optimizer, None
            self.check_momentum(optimizer, on_servers=True)
            return
        kind = type(optimizer).__name__
        self._refuse_where_servers_must(kind)
        self._store.optimizer.leave_to_workers(kind)
        print(_ON_WORKERS.format(kind), file=sys.stderr, flush=True)
        self.optimizer = optimizer
        self.check_momentum(optimizer, on_servers=False)
        if self._store.trains:
            self._run_here(optimizer, fill)

    def check_momentum(self, optimizer: Any, *, on_servers: bool) -> None:
        """See MomentumCheck; also for an optimizer that the script runs itself on the sums that it pulls."""
        self._store.momentum.use_optimizer(float(getattr(optimizer, "momentum", 0.0)), on_servers=on_servers)

    def initial(self, keys: Sequence[Key]) -> dict[str, Hyper]:
        """Return what to send with the initial values of new keys: multipliers, from a master that does not train."""
        if self.optimizer is None or self._store.trains or not can_travel(self.optimizer):
            return {}
        numbers = {key: len(self._keys) + place for place, key in enumerate(keys)}
        return {str(key): self._own(self.optimizer, key, number) for key, number in numbers.items()}

    def add(self, key: Key, shape: tuple[int, ...], dtype: Any, fill: Callable[[str, Any], None]) -> None:
        """Register an initialized key."""
        self._keys[key] = _Known(len(self._keys), shape, dtype)
        if self.updates is not None:
            fill(str(key), self._make_room(self.updates, key))

    def news(self, key: Key) -> Hyper:
        """Return the hyper-parameters for a push. Raises InvalidSettings for values that the servers would reject."""
        optimizer = self.optimizer
        if optimizer is None or self.updates is not None:
            return self._store.optimizer.hyper.news(str(key))
        if optimizer.lr_scheduler is not None:
            optimizer._update_count(key)
        name, params = params_of(optimizer)
        self._store.optimizer.hyper.change(params)
        news = self._store.optimizer.hyper.news(str(key), self._own(optimizer, key, self._keys[key].number))
        if news:
            optimizers.create(name, params)
        return news

    def save(self, path: Path, dump_optimizer: bool) -> None:
        """See KVStore.save_optimizer_states."""
        if self.updates is not None:
            self.updates.save(path)
            return
        counts = self.optimizer._index_update_count if self.optimizer is not None else {}
        self._store.optimizer.save(path, counts if dump_optimizer else None)

    def load(self, path: Path) -> None:
        """See KVStore.load_optimizer_states."""
        if self.updates is not None:
            self.updates.load(path)
            return
        state = self._store.optimizer.load(path)
        if state.counts is not None and self.optimizer is not None:
            take_up(self.optimizer, state.params, state.counts)

    def _run_here(self, optimizer: Any, fill: Callable[[str, Any], None]) -> None:
        former, self.updates = self.updates, WorkerUpdates(self._mx, optimizer)
        for key in self._keys:
            weight = self._make_room(self.updates, key)
            if former is None:
                fill(str(key), weight)
            else:
                former.weights[str(key)].reshape(-1).copyto(weight)

    def _make_room(self, updates: WorkerUpdates, key: Key) -> Any:
        known = self._keys[key]
        return updates.add(str(key), index_of(self.optimizer, key, known.number), known.shape, known.dtype)

    def _own(self, optimizer: Any, key: Key, number: int) -> Hyper:
        return multipliers(optimizer, index_of(optimizer, key, number))

    def _schedule(self, optimizer: Any) -> tuple[str, Mapping[str, Any]] | None:
        if optimizer.lr_scheduler is None:
            return None
        found = schedule_of(optimizer.lr_scheduler)
        if found is None:
            kind = getattr(type(optimizer.lr_scheduler), "__name__", "")
            raise InvalidSettings(
                f"the learning-rate schedule {kind} cannot travel to the servers, and this master does not train",
                "use one of mxnet.lr_scheduler itself, or have the workers that train call set_optimizer",
            )
        return found

    def _refuse_where_servers_must(self, kind: str) -> None:
        about = plugins.algorithms()[str(self._store.option("algo"))]
        if not about.sums_gradients:  # those that do may leave the step to the workers
            raise InvalidSettings(
                f"the optimizer {kind} cannot run on the servers, and {about.name} needs one there",
                f"use one of {', '.join(optimizers.SUPPORTED)}",
            )
