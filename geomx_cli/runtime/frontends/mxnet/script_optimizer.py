"""The optimizer that a script sets on its store: its hyper-parameters for the servers, or its run on the workers."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.optim import optimizers, schedules
from geomx_cli.ps.optim.schedules import MULTIPLIERS
from geomx_cli.runtime.frontends.mxnet.packing import attributes, pack_state, set_attributes, unpack_state
from geomx_cli.runtime.frontends.mxnet.worker_updates import WorkerUpdates
from geomx_cli.runtime.script.base_store import Key
from geomx_cli.runtime.script.remote_optimizer import Hyper
from geomx_cli.runtime.script.store import Store
from geomx_cli.runtime.training.worker_algorithm import State

__all__ = [
    "ScriptOptimizer", "can_travel", "from_mxnet", "index_of", "multipliers", "params_of", "schedule_of", "take_up",
]  # fmt: skip

# Converts MXNet's optimizer objects to name and hyper-parameters. Servers receive an optimizer in this form.

_COMMON = {"wd": "wd", "rescale_grad": "rescale_grad", "clip_gradient": "clip_gradient"}
_OWN: dict[str, dict[str, str]] = {
    "SGD": {"momentum": "momentum", "lazy_update": "lazy_update"},
    "NAG": {"momentum": "momentum"},
    "Adam": {"beta1": "beta1", "beta2": "beta2", "epsilon": "epsilon", "lazy_update": "lazy_update"},
    "AdaGrad": {"eps": "float_stable_eps"},
    "RMSProp": {
        "gamma1": "gamma1", "gamma2": "gamma2", "epsilon": "epsilon", "centered": "centered",
        "clip_weights": "clip_weights",
    },
    "DCASGD": {"momentum": "momentum", "lamda": "lamda"},
}  # fmt: skip
_MODULE = "mxnet.optimizer.optimizer"
_SCHEDULES_MODULE = "mxnet.lr_scheduler"
_WARMUP = ("base_lr", "warmup_steps", "warmup_begin_lr", "warmup_final_lr")
_SCHEDULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "FactorScheduler": ("factor", ("step", "factor", "stop_factor_lr", "count")),
    "MultiFactorScheduler": ("multifactor", ("factor",)),
    "PolyScheduler": ("poly", ("max_update", "base_lr_orig", "final_lr", "power")),
    "CosineScheduler": ("cosine", ("max_update", "base_lr_orig", "final_lr")),
}


def can_travel(optimizer: Any) -> bool:
    """Return whether the servers can run it. It has to be exactly one of MXNet's classes, because a subclass's `update`
    would not run, and it has to start at update 0.
    """
    kind = type(optimizer)
    return kind.__module__ == _MODULE and kind.__name__ in _OWN and not optimizer.begin_num_update


def from_mxnet(optimizer: Any) -> tuple[str, dict[str, float | bool]]:
    """Return the server's name for an optimizer, and its current hyper-parameters. A schedule gives the current rate.

    DCASGD maps to `dcasgd`, which remembers the weights sent to each party, as scripts that use it expect. MXNet's own
    rule is `dcasgd-mxnet`, for parity, and must be requested by that name. fp16 weights always have an fp32 master copy
    on the servers, whatever `multi_precision` says. Raises InvalidSettings for an optimizer that the servers cannot
    run, and for a hyper-parameter that they reject.
    """
    if not can_travel(optimizer):
        raise InvalidSettings(
            f"the optimizer {type(optimizer).__name__} cannot run on the servers",
            f"use one of {', '.join(_OWN)} itself, with begin_num_update 0, or update on the workers",
        )
    name, params = params_of(optimizer)
    optimizers.create(name, params)
    return name, params


def params_of(optimizer: Any) -> tuple[str, dict[str, float | bool]]:
    """Like `from_mxnet`, without the checks."""
    kind = type(optimizer).__name__
    params: dict[str, float | bool] = {"learning_rate": float(optimizer.learning_rate)}
    for name, attribute in {**_COMMON, **_OWN[kind]}.items():
        value = getattr(optimizer, attribute)
        if value is None:  # no limit now, but there may have been one before
            value = 0.0
        params[name] = value if isinstance(value, bool) else float(value)
    return kind.lower(), params


def schedule_of(scheduler: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the server's name for an MXNet scheduler and its current parameters; None for an unsupported one.

    Raises InvalidSettings for parameters that servers reject.
    """
    kind = type(scheduler)
    if kind.__module__ != _SCHEDULES_MODULE or kind.__name__ not in _SCHEDULES:
        return None
    name, own = _SCHEDULES[kind.__name__]
    params: dict[str, Any] = {key: float(getattr(scheduler, key)) for key in (*_WARMUP, *own)}
    params["warmup_constant"] = scheduler.warmup_mode == "constant"
    if name == "multifactor":
        params["steps"] = [float(step) for step in scheduler.step[scheduler.cur_step_ind :]]
    schedules.create(name, params)
    return name, params


def index_of(optimizer: Any, key: Key, number: int) -> Key:
    """Return an optimizer's index for a key. Servers number str keys in the order of `init`; local stores do not."""
    names = (optimizer.param_dict, optimizer.lr_mult, optimizer.wd_mult, optimizer.idx2name)
    return number if isinstance(key, str) and any(number in known for known in names) else key


def multipliers(optimizer: Any, index: Key) -> dict[str, float]:
    """Return an optimizer's learning rate and weight decay multipliers for one parameter, as `lr_mult` and `wd_mult`.

    They are looked up as in MXNet: by Parameter, by index, by the index's name. Raises InvalidSettings for non-finite
    values.
    """
    found = {}
    for what, field in MULTIPLIERS.items():
        own = getattr(optimizer, what)
        if index in optimizer.param_dict:
            value = getattr(optimizer.param_dict[index], what)
        else:
            value = own.get(index, own.get(optimizer.idx2name.get(index), 1.0))
        found[what] = float(field.check(f"{what} of parameter {index!r}", value))
    return found


def take_up(optimizer: Any, params: Mapping[str, float | bool], counts: Mapping[int | str, int]) -> None:
    """Apply hyper-parameters from another optimizer's `from_mxnet`, and its update counts by key, to an optimizer.

    With a schedule, the learning rate follows from the counts.
    """
    for name, attribute in {**_COMMON, **_OWN[type(optimizer).__name__]}.items():
        if name in params:
            setattr(optimizer, attribute, params[name] or None if name.startswith("clip_") else params[name])
    if optimizer.lr_scheduler is None:
        optimizer.set_learning_rate(params["learning_rate"])
    optimizer._index_update_count.update(counts)
    optimizer.num_update = max([optimizer.num_update, *counts.values()])


_ON_WORKERS = (
    "geomx: the optimizer {} cannot run on the global servers: they sum gradients, and each worker updates its weights"
)


@dataclass(frozen=True, slots=True)
class _Known:
    """An initialized key, the store's `number`-th, counted from 0."""

    number: int
    shape: tuple[int, ...]
    dtype: Any


class ScriptOptimizer:
    """For the training thread.

    optimizer: MXNet's optimizer; None before `set`.
    updates: runs the optimizer on this worker; None if the servers run it.
    """

    def __init__(self, mx: Any, store: Store) -> None:
        self.optimizer: Any = None
        self.updates: WorkerUpdates | None = None
        self._mx = mx
        self._store = store
        self._keys: dict[Key, _Known] = {}

    def set(self, optimizer: Any, fill: Callable[[str, Any], None]) -> None:
        """Let the servers run it or, if they cannot, all workers. Blocks.

        fill: fetches a key's value from the servers into an array.

        A master that does not train sends its schedule and multipliers to the servers. A training worker sends the
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
        """See MomentumCheck. Also for an optimizer that the script itself runs on the sums that it pulls."""
        self._store.momentum.use_optimizer(float(getattr(optimizer, "momentum", 0.0)), on_servers=on_servers)

    def initial(self, keys: Sequence[Key]) -> dict[str, Hyper]:
        """Return the multipliers to send with the initial values of new keys, in a master that does not train."""
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

    def state(self) -> State:
        """Return the state between pushes: the optimizer, and its state in this worker."""
        kind = type(self.optimizer).__name__ if self.optimizer is not None else ""
        keys = [[key, list(known.shape), str(known.dtype)] for key, known in self._keys.items()]
        state = State({"remote": self._store.optimizer.state(), "kind": kind, "keys": keys})
        if self.optimizer is not None:
            state.add("optimizer", pack_state(attributes(self.optimizer, f"the optimizer {kind}"), kind))
        if self.updates is not None:
            state.add("updates", self.updates.state())
        return state

    def unknown_keys(self, state: State) -> list[tuple[Key, tuple[int, ...], str]]:
        """Return the keys of a `state` that this life has not initialised, with shapes and dtypes."""
        found = [(key, tuple(shape), dtype) for key, shape, dtype in state.values["keys"]]
        return [item for item in found if item[0] not in self._keys]

    def go_on(self, state: State) -> None:
        """Continue from a `state` of the same keys. Raises InvalidSettings if another optimizer is set now."""
        kind, now = state.values["kind"], type(self.optimizer).__name__ if self.optimizer is not None else ""
        if kind != now or ("updates" in state.values) != (self.updates is not None):
            what = f"the optimizer was {kind or 'not set'} when this worker saved its state, and is {now or 'not set'}"
            raise InvalidSettings(what, "set the optimizer before geomx.state, the same one each time the script runs")
        self._store.optimizer.go_on(state.values["remote"])
        if self.optimizer is not None:
            set_attributes(self.optimizer, unpack_state(state.part("optimizer")))
        if self.updates is not None:
            self.updates.go_on(state.part("updates"))

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
        if not about.sums_gradients:  # with sums, the workers may take the step
            raise InvalidSettings(
                f"the optimizer {kind} cannot run on the servers, and {about.name} needs one there",
                f"use one of {', '.join(optimizers.SUPPORTED)}",
            )
