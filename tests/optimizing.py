"""Optimizers with the arrays of several slices, as a root has them."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from geomx_cli.ps.arrays import Array, Arrays
from geomx_cli.ps.net.payload import Rows
from geomx_cli.ps.optim import optimizers

Where = tuple[int, int]


class Optimizing:
    """An optimizer, and its state of each slice."""

    def __init__(self, optimizer: optimizers.Optimizer) -> None:
        self.optimizer = optimizer
        self.states: defaultdict[Where, Arrays] = defaultdict(dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def update(self, where: Where, weight: Array, grad: Array, member: int = 0) -> Array:
        return self.optimizer.update(self.states[where], weight, grad, member=member)

    def update_rows(self, where: Where, weight: Array, grad: Rows) -> Rows | Array:
        return self.optimizer.update_rows(self.states[where], weight, grad)

    def export_state(self) -> Arrays:
        """Copies of all arrays, named "key/slice/what"."""
        return {
            f"{key}/{index}/{what}": array.copy()
            for (key, index), state in sorted(self.states.items())
            for what, array in state.items()
        }

    def import_state(self, named: Mapping[str, Array]) -> None:
        self.states = defaultdict(dict, self.optimizer.states_in(named))


def create(name: str, params: Mapping[str, Any]) -> Optimizing:
    return Optimizing(optimizers.create(name, params))
