"""The batches of a framework's DataLoader, so that another process continues within an epoch."""

from collections import deque
from collections.abc import Iterator
from typing import Any

from geomx_cli.ps.arrays import Array
from geomx_cli.runtime.frontends.torch.loader_place import Skipping
from geomx_cli.runtime.frontends.torch.random_state import random_state, set_random_state
from geomx_cli.runtime.training.worker_algorithm import State

__all__ = ["BatchOrder"]

_MOST = 1024
"""The most batches that are loaded ahead of a step."""


class BatchOrder(Skipping):
    """Also notes the random state with which each batch is loaded. Frameworks load some batches before they begin a
    step, and data sets and collators may draw random numbers.

    notes: whether it notes them. Not for a loader with processes of its own, which load the batches.
    """

    def __init__(self, sampler: Any, *generators: Any) -> None:
        self._noted: deque[tuple[int, State]] = deque(maxlen=_MOST)
        self._repeated: dict[int, State] = {}
        self._loaded = 0  # number of batches in this pass
        self._epochs: list[Any] = []  # of the samplers within, in this pass
        self.notes = self._returns = False
        super().__init__(sampler, *generators)

    def begin_pass(self) -> None:
        """The last pass is over, though perhaps not all of it was requested."""
        self._noted.clear()
        self._loaded, self._epochs, self.begun = 0, [], None

    def place(self, batch: int) -> State:
        """The place after so many batches of the pass, which only grows within a pass."""
        state = State({"batch": batch})
        state.add("begins", self.begun or State())
        state.add("generators", self.generators())
        state.values["epochs"] = self._epochs
        while len(self._noted) > 1 and self._noted[1][0] <= batch:
            self._noted.popleft()
        for index, noted in self._noted if self._loaded > batch else ():
            state.add(f"loaded/{max(index, batch)}", noted)
        return state

    def return_to(self, state: State, *, skips: bool) -> None:
        """Begin the next pass at a `place`.

        skips: whether this object skips the earlier batches; False if the iterating code skips them.
        """
        batch, self._epochs = state.values["batch"], state.values["epochs"]
        self.skipped, self.until = batch if skips else 0, batch
        if (begins := state.part("begins")).values:
            self.begins = begins
        else:
            self.set_generators(state.part("generators"))
        loaded = [name for name in state.values if name.startswith("loaded/")]
        self._returns = True
        self._repeated = {int(name.removeprefix("loaded/")): state.part(name) for name in loaded}

    def end_return(self) -> None:
        """All batches that were loaded before the place was saved are loaded again."""
        self._repeated.clear()
        self._returns = False
        self.skipped = self.until = 0

    def __iter__(self) -> Iterator[Any]:
        epochs = self._epochs if self._returns else []
        self.begin_pass()
        for each, epoch in zip(self.within, epochs, strict=False):  # samplers count them anew in a new process
            if epoch is not None and hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
        for index, item in enumerate(super().__iter__(), self.skipped):
            self._epochs = self._epochs or [getattr(each, "epoch", None) for each in self.within]
            if (noted := self._repeated.pop(index, None)) is not None:
                set_random_state(noted)
            if self.notes:
                self._note(index)
            self._loaded = index + 1
            yield item

    def _note(self, index: int) -> None:
        now = random_state()
        if not self._noted or not _equal(self._noted[-1][1], now):
            self._noted.append((index, now))


def _equal(one: State, other: State) -> bool:
    def same(array: Array, name: str) -> bool:
        return array.tobytes() == other.arrays[name].tobytes()

    return one.values == other.values and all(same(array, name) for name, array in one.arrays.items())
