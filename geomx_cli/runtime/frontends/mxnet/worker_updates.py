"""Runs an MXNet optimizer that the servers cannot run on this worker, from the servers' sums."""

from pathlib import Path
from typing import Any

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Array
from geomx_cli.runtime.frontends.mxnet.packing import load_updater, updater_state
from geomx_cli.runtime.script import optimizer_state
from geomx_cli.runtime.script.base_store import Key
from geomx_cli.runtime.script.optimizer_state import SavedState
from geomx_cli.runtime.training.worker_algorithm import State

__all__ = ["WorkerUpdates"]


class WorkerUpdates:
    """The weights of all keys on this worker, and MXNet's updater over them. For the training thread.

    weights: by name, dense, on the CPU, uninitialized until filled; fp32, fp64 or fp16, with the keys' shapes.

    All workers start from the servers' values and apply the same sums in the same order, so their weights are
    identical.
    """

    def __init__(self, mx: Any, optimizer: Any) -> None:
        self.weights: dict[str, Any] = {}
        self._mx = mx
        self._optimizer = optimizer
        self._updater = mx.optimizer.get_updater(optimizer)
        self._indices: dict[str, Key] = {}

    def add(self, name: str, index: Key, shape: tuple[int, ...], dtype: Any) -> Any:
        """Allocate a key that the optimizer knows under `index`; return the flat weight, to be filled."""
        # Flat arrays never get a oneDNN layout, and results can be written to them.
        flat = self._mx.nd.empty((int(np.prod(shape)),), self._mx.cpu(), dtype)
        self.weights[name], self._indices[name] = flat.reshape(shape), index
        return flat

    def apply(self, name: str, total: Any) -> None:
        """Update the weight with the sum that `total` will have, which has the weight's size. Returns at once."""
        weight = self.weights[name]
        with self._mx.autograd.pause():
            self._updater(self._indices[name], total.reshape(weight.shape), weight)

    def save(self, path: Path) -> None:
        """Write the optimizer's state, without the weights, to a file. Waits for queued operations.

        Raises InvalidSettings for a state other than arrays of the weights' sizes.
        """
        state = SavedState(self._kind, {})
        for name, weight in self.weights.items():
            index, cut = self._indices[name], (0, weight.size)
            state.dtypes[name], state.slices[name] = np.dtype(weight.dtype).name, {cut: {}}
            if index in self._updater.states:
                arrays = [item.asnumpy().reshape(-1) for item in self._leaves(self._updater.states[index], weight)]
                step = np.array([self._optimizer._index_update_count.get(index, 0)])
                kept = {f"state{number}": array for number, array in enumerate(arrays)}
                state.slices[name][cut] = {"step": step, **kept}
        optimizer_state.write(path, state)

    def load(self, path: Path) -> None:
        """Restore from a file of `save`. Raises InvalidSettings if the file does not match; then nothing has changed.
        """
        state = optimizer_state.read(path)
        if state.optimizer != self._kind:
            raise InvalidSettings(f"{path} has the state of {state.optimizer}, not of {self._kind}")
        if state.slices.keys() != self.weights.keys():
            raise InvalidSettings(f"{path} has the state of other keys than this store")
        found = {name: self._read(name, state) for name in self.weights}
        optimizer = self._optimizer
        for name, (step, made, leaves, arrays) in found.items():
            index = self._indices[name]
            self._updater.states.pop(index, None)
            optimizer._index_update_count.pop(index, None)
            if arrays is None:
                continue
            for leaf, array in zip(leaves, arrays, strict=True):
                leaf[:] = array.reshape(leaf.shape)
            self._updater.states[index], self._updater.states_synced[index] = made, True
            optimizer._index_update_count[index] = step
            optimizer.num_update = max(optimizer.num_update, step)

    def state(self) -> State:
        """Return weights and the optimizer's arrays."""
        state = updater_state(self._updater, f"the optimizer {self._kind}")
        state.add("weights", State({}, {name: weight.asnumpy() for name, weight in self.weights.items()}))
        return state

    def go_on(self, state: State) -> None:
        """Continue from a `state` of the same keys."""
        load_updater(self._updater, state)
        for name, weight in self.weights.items():
            weight[:] = state.arrays[f"weights/{name}"]

    @property
    def _kind(self) -> str:
        return type(self._optimizer).__name__

    def _read(self, name: str, state: SavedState) -> tuple[int, Any, list[Any], list[Array] | None]:
        """Return a key's update count, a new state, its arrays, and their contents; None before the first update."""
        weight, (kept,) = self.weights[name], state.slices[name].values()
        if not kept:
            return 0, None, [], None
        made = self._optimizer.create_state_multi_precision(self._indices[name], weight)
        leaves, arrays = self._leaves(made, weight), [kept.get(f"state{number}") for number in range(len(kept) - 1)]
        fits = [array for array in arrays if array is not None and array.size == weight.size]
        if len(fits) != len(leaves) or len(arrays) != len(leaves) or "step" not in kept:
            raise InvalidSettings(f"the saved state of key {name!r} does not fit {self._kind}")
        return int(kept["step"][0]), made, leaves, fits

    def _leaves(self, state: Any, weight: Any) -> list[Any]:
        """Return the arrays in a state, which MXNet's optimizers nest in tuples."""
        if state is None:
            return []
        if isinstance(state, (tuple, list)):
            return [leaf for item in state for leaf in self._leaves(item, weight)]
        if isinstance(state, self._mx.nd.NDArray) and state.size == weight.size:
            return [state]
        what = f"the optimizer {self._kind} keeps a {type(state).__name__} that is no array of its weight's size"
        raise InvalidSettings(what, "its state cannot be saved")

