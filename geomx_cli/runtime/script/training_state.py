"""The saved state of a script's training: objects, numbers, random state, and the place in the data.

The script iterates over epochs and batches through it. Between two batches it saves changed state. So the next life of
a killed worker continues at the same batch, and ends with the same bits (training/worker_state.py says why).
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.state_file import Saved
from geomx_cli.runtime.script import reports
from geomx_cli.runtime.script.random_state import random_state, set_random_state
from geomx_cli.runtime.training.worker_algorithm import State

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.training.worker_state import WorkerState

__all__ = ["Batches", "Place", "TrainingState"]

_Batch = TypeVar("_Batch")
_RESERVED = ("batches", "epochs", "resumed", "save")


class Place(ABC):
    """The place in one pass over a loader.

    begins_first: whether the pass begins before anything is saved in it. A loader that saves its place may draw random
    numbers when it is asked for it, as StatefulDataLoader does if it has not begun: they have to be the same numbers in
    each life, whenever that saves.
    """

    begins_first = False

    @abstractmethod
    def begin(self) -> Iterator[Any]:
        """Begin the pass, or go on at the place that `load` has set."""

    @abstractmethod
    def advance(self) -> None:
        """The script has got another batch."""

    @abstractmethod
    def state(self) -> State:
        """Return the place after the last batch that the script has got."""

    @abstractmethod
    def load(self, state: State, batches: int) -> None:
        """Go on behind so many batches, at the place of a `state`. Call before `begin`."""


class TrainingState(ABC):
    """See geomx_cli.torch.state and geomx_cli.mxnet.state. For the training thread.

    Every given number is an attribute, which the script may set. `epoch` counts the epochs that are over.

    resumed: whether this worker goes on from what an earlier life has saved.
    """

    resumed: bool = False

    def __init__(self, recovery: "WorkerState", client: "Client | None", given: Mapping[str, Any]) -> None:
        for name in given:
            if name in _RESERVED or name.startswith("_"):
                raise InvalidSettings(f"state(...) cannot call anything {name!r}", "choose another name")
        numbers = {name: number for name, value in given.items() if (number := _number(name, value)) is not None}
        self._set("_numbers", {"epoch": 0, **numbers})
        self._set("_objects", {name: each for name, each in given.items() if name not in numbers})
        self._recovery = recovery
        self._client = client
        self._loop = self._batches = 0  # the pass over a loader in this epoch, and batches that the script got in it
        self._passes = 0  # begun in this epoch by this life
        self._place: Place | None = None
        self._found: State | None = None  # the place that an earlier life has saved
        self._epoch_begun: tuple[int, State] | None = None  # an epoch, and random numbers at its begin
        self._check()
        if recovery.continues:
            recovery.restore(self._restore)
            self.resumed = True
            where = f"epoch {self.epoch}, batch {self._batches}"
            print(f"geomx: this worker goes on at {where}, round {self._rounds}", file=sys.stderr, flush=True)
        else:
            self.save()

    def __getattr__(self, name: str) -> Any:
        numbers = self.__dict__.get("_numbers", {})
        if name not in numbers:
            raise AttributeError(f"this state has no number {name!r}; state({name}=0) gives it one")
        return numbers[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name == "resumed":
            self._set(name, value)
        elif name not in self._numbers:
            raise AttributeError(f"this state has no number {name!r}; state({name}=0) gives it one")
        elif (number := _number(name, value)) is None:
            raise TypeError(f"{name} is a number, not {type(value).__name__}")
        else:
            self._numbers[name] = number

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs from `epoch` on, below `count`."""
        while self.epoch < count:
            self._passes = 0
            self._begin_epoch()
            yield self.epoch
            self.epoch += 1
            self._loop = self._batches = 0

    def _begin_epoch(self) -> None:
        """The script may draw random numbers before the passes of an epoch, and draws them again in its next life."""
        if self._found is not None and self._epoch_begun is not None and self._epoch_begun[0] == self.epoch:
            self._set_random_numbers(self._epoch_begun[1])
        else:
            self._epoch_begun = self.epoch, self._random_numbers()
        self._reseed()

    def batches(self, loader: Iterable[_Batch]) -> "Batches[_Batch]":
        """Return the batches of a pass over `loader`, from the place on at which an earlier life was killed.

        A pass that was over then has no more batches. The state is saved before a batch, once that is due.
        """
        return Batches(self, loader)

    def save(self) -> None:
        """Save now. Loops that do not use `batches` call it between two steps, at least once in each round."""
        self._complete()
        if not self._recovery.may_save:
            return
        client = Saved({}, {})  # of a worker for which another one exchanges
        if self._client is not None:
            self._client.await_rounds()  # some algorithms do not wait for all results
            client = self._client.recovery.state()
        self._recovery.save(self._rounds, self._state(), client)

    def _iterate(self, loader: Any) -> Iterator[Any]:
        number, self._passes = self._passes, self._passes + 1
        if number < self._loop:
            if number == self._loop - 1 and self._found is not None and not self._found.values:
                self._begin_again()  # it was saved after this pass
                self._found = None
            return
        place, self._place = self._place_in(loader), None
        found, self._found = self._found, None
        batches: Iterator[Any] | None = None
        if found is not None and not found.values:
            found = None
        if found is not None:
            place.load(found, self._batches)
        if place.begins_first or (found is not None and self._batches):
            self._reseed(number, 0)
            batches = place.begin()
        if found is not None:
            self._begin_again()
        self._place = place
        while True:
            self._save_if_due()
            self._reseed(number, self._batches)
            batches = place.begin() if batches is None else batches
            try:
                batch = next(batches)
            except StopIteration:
                break
            self._before_batch()
            yield batch
            place.advance()
            self._batches += 1
        self._place = None
        self._loop, self._batches = number + 1, 0

    def _save_if_due(self) -> None:
        if not self._is_exchanging and self._recovery.is_due(self._rounds):
            self.save()

    def _state(self) -> State:
        state = State({
            "numbers": dict(self._numbers), "loop": self._loop, "batches": self._batches, "reports": reports.state(),
        })  # fmt: skip
        place = self._place.state() if self._place is not None else self._found
        state.add("place", place or State())
        if self._epoch_begun is not None:
            state.values["epoch begun"], random = self._epoch_begun
            state.add("random at epoch", random)
        state.add("script", self._of_script(self._objects))
        return state

    def _restore(self, state: State, client: Saved) -> None:
        if self._client is not None:
            self._client.recovery.load(client)
        self._numbers.update(state.values["numbers"])
        self._loop, self._batches = state.values["loop"], state.values["batches"]
        self._found = state.part("place")
        if "epoch begun" in state.values:
            self._epoch_begun = state.values["epoch begun"], state.part("random at epoch")
        reports.load(state.values["reports"])
        self._load_script(self._objects, state.part("script"))

    # Of the framework.

    def _random_numbers(self) -> State:
        """Return the state of all random numbers that can be saved."""
        return random_state()

    def _set_random_numbers(self, state: State) -> None:
        """Return to `_random_numbers`."""
        set_random_state(state)

    def _reseed(self, *place: int) -> None:
        """Seed the random numbers that cannot be saved, if there are any, by the epoch and the `place` in it: the
        numbers of a pass and a batch.
        """
        del place

    @property
    @abstractmethod
    def _rounds(self) -> int:
        """Rounds that this worker has begun."""

    @property
    @abstractmethod
    def _is_exchanging(self) -> bool:
        """Whether a round is under way for whose result the script does not wait."""

    @abstractmethod
    def _check(self) -> None:
        """Raise InvalidSettings for objects that cannot be saved, and if one is missing that is trained."""

    @abstractmethod
    def _complete(self) -> None:
        """Wait for what is late."""

    @abstractmethod
    def _place_in(self, loader: Any) -> Place:
        """Return a place at the begin of a loader."""

    @abstractmethod
    def _before_batch(self) -> None:
        """The script gets the next batch."""

    @abstractmethod
    def _of_script(self, objects: Mapping[str, Any]) -> State:
        """Return the state of all objects, of the synchronisation and of random numbers."""

    @abstractmethod
    def _load_script(self, objects: Mapping[str, Any], state: State) -> None:
        """Continue from `_of_script`."""

    @abstractmethod
    def _begin_again(self) -> None:
        """Set random numbers as they were saved: the script has drawn some since, to come here."""


def _number(name: str, value: Any) -> bool | int | float | None:
    """Return a script's number as Python's own, which can be saved; None for what is no number. Numpy's numbers change
    their type so. Raises InvalidSettings for an integer of more than 64 bits.
    """
    if isinstance(value, np.generic):
        value = float(value) if isinstance(value, np.floating) else value.item()
    if isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value)
    if not isinstance(value, int):
        return None
    if not -(1 << 63) <= value < 1 << 64:
        raise InvalidSettings(f"{name} is an integer of more than 64 bits, which cannot be saved", "use a float")
    return int(value)


class Batches(Generic[_Batch]):
    """What `TrainingState.batches` returns: iterate once."""

    def __init__(self, state: TrainingState, loader: Iterable[_Batch]) -> None:
        self._state, self._loader = state, loader

    def __len__(self) -> int:
        """That of the loader. Raises TypeError if it has none."""
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[_Batch]:
        return self._state._iterate(self._loader)
