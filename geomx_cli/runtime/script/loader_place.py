"""Places in a pass over what any script iterates over: loaders that save their own, and anything else."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

from geomx_cli.runtime.script.random_state import random_state, set_random_state
from geomx_cli.runtime.script.training_state import Place
from geomx_cli.runtime.training.worker_algorithm import State

__all__ = ["OwnPlace", "ReadPlace", "has_own_place"]


def has_own_place(loader: Any) -> bool:
    """Whether a loader saves its own place."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


class OwnPlace(Place):
    """Of a loader that saves its own place, as torchdata's StatefulDataLoader.

    pack, unpack: make what its `state_dict` returns a State, and back.
    """

    begins_first = True

    def __init__(self, loader: Any, pack: Callable[[Any], State], unpack: Callable[[State], Any]) -> None:
        self._loader, self._pack, self._unpack = loader, pack, unpack

    def begin(self) -> Iterator[Any]:
        return iter(self._loader)

    def advance(self) -> None:
        """See Place; the loader knows."""

    def state(self) -> State:
        return self._pack(self._loader.state_dict())

    def load(self, state: State, batches: int) -> None:
        self._loader.load_state_dict(self._unpack(state))


class ReadPlace(Place):
    """Of anything else that can be iterated: one returns by reading what comes before, with the same random numbers.

    random, set_random: the state of these, and its opposite.
    """

    def __init__(
        self, loader: Any, random: Callable[[], State] = random_state,
        set_random: Callable[[State], None] = set_random_state,
    ) -> None:  # fmt: skip
        self._loader, self._random, self._set_random = loader, random, set_random
        self._skipped = 0
        self._begun: State | None = None

    def begin(self) -> Iterator[Any]:
        if self._begun is None:
            self._begun = self._random()
        else:
            self._set_random(self._begun)
        batches: Iterator[Any] = iter(self._loader)
        if self._skipped:
            kind = f"{type(self._loader).__name__} has no place to return to"
            print(f"geomx: {kind}: reading {self._skipped} batches once more", file=sys.stderr, flush=True)
        for _ in range(self._skipped):
            next(batches, None)
        return batches

    def advance(self) -> None:
        """See Place."""

    def state(self) -> State:
        state = State({"read": True})
        if self._begun is not None:
            state.add("random", self._begun)
        return state

    def load(self, state: State, batches: int) -> None:
        self._skipped = batches
        self._begun = state.part("random") if batches else None
