"""The state of the random numbers that a script draws: of torch, its GPUs, numpy and Python."""

from typing import Any

import numpy as np
import torch

from geomx_cli.runtime.script import random_state as general
from geomx_cli.runtime.training.worker_algorithm import State

__all__ = ["random_state", "set_random_state"]


def random_state() -> State:
    """Return the present state."""
    state = general.random_state()
    state.arrays["torch"] = torch.get_rng_state().numpy()
    if torch.cuda.is_initialized():
        for index, device in enumerate(torch.cuda.get_rng_state_all()):
            state.arrays[f"cuda/{index}"] = device.numpy()
    return state


def set_random_state(state: State) -> None:
    """Restore a state. Of GPUs, restore only those that this process has."""
    general.set_random_state(state)
    torch.set_rng_state(_bytes(state.arrays["torch"]))
    for index, array in state.named("cuda").items():
        if int(index) < torch.cuda.device_count():
            torch.cuda.set_rng_state(_bytes(array), int(index))


def _bytes(array: Any) -> Any:
    return torch.from_numpy(np.array(array, np.uint8))
