"""The state of the random numbers that any script draws: of numpy and Python."""

import random

import numpy as np

from geomx_cli.runtime.training.worker_algorithm import State

__all__ = ["random_state", "set_random_state"]


def random_state() -> State:
    """Return the present state."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    arrays = {"python": np.array(numbers, np.uint64), "numpy": np.asarray(keys)}
    return State({"python": [version, gauss], "numpy": [name, position, has_gauss, cached]}, arrays)


def set_random_state(state: State) -> None:
    """Return to a state."""
    version, gauss = state.values["python"]
    random.setstate((version, tuple(state.arrays["python"].tolist()), gauss))
    name, *rest = state.values["numpy"]
    np.random.set_state((name, state.arrays["numpy"], *rest))
