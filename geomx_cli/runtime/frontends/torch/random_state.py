"""The state of the random numbers that a script draws: of torch, its GPUs, numpy and Python."""

import random
from typing import Any

import numpy as np
import torch

from geomx_cli.runtime.training.worker_algorithm import State

__all__ = ["random_state", "set_random_state"]


def random_state() -> State:
    """Return the present state."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    arrays = {"torch": torch.get_rng_state().numpy(), "python": np.array(numbers, np.uint64), "numpy": keys}
    if torch.cuda.is_initialized():
        for index, device in enumerate(torch.cuda.get_rng_state_all()):
            arrays[f"cuda/{index}"] = device.numpy()
    return State({"python": [version, gauss], "numpy": [name, position, has_gauss, cached]}, arrays)


def set_random_state(state: State) -> None:
    """Return to a state, of the GPUs to that of those that are here."""
    version, gauss = state.values["python"]
    random.setstate((version, tuple(state.arrays["python"].tolist()), gauss))
    name, *rest = state.values["numpy"]
    np.random.set_state((name, state.arrays["numpy"], *rest))
    torch.set_rng_state(_bytes(state.arrays["torch"]))
    for index, array in state.named("cuda").items():
        if int(index) < torch.cuda.device_count():
            torch.cuda.set_rng_state(_bytes(array), int(index))


def _bytes(array: Any) -> Any:
    return torch.from_numpy(np.array(array, np.uint8))
