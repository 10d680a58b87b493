"""The place in a pass over a script's DataLoader. Another process returns to it without loading the earlier batches."""

import copy
import weakref
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from geomx_cli.runtime.frontends.torch.data import ShardSampler
from geomx_cli.runtime.frontends.torch.packing import pack_state, unpack_state
from geomx_cli.runtime.frontends.torch.random_state import random_state, set_random_state
from geomx_cli.runtime.script.loader_place import OwnPlace, ReadPlace, has_own_place
from geomx_cli.runtime.script.training_state import Place
from geomx_cli.runtime.training.worker_algorithm import State

__all__ = ["Skipping", "has_indices", "place_in"]


def place_in(loader: Any, name: str) -> Place:
    """Return a place at the begin of a loader. Its class depends on how a process returns to it. name: for messages."""
    if has_own_place(loader):
        return OwnPlace(loader, lambda state: pack_state(state, name), unpack_state)
    return _IndexPlace(loader) if has_indices(loader) else ReadPlace(loader, random_state, set_random_state)


def has_indices(loader: Any) -> bool:
    """Whether it is a DataLoader of a map-style data set that leaves its place to other code."""
    is_map = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    return is_map and not has_own_place(loader)


_FOLLOWED: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()
"""Copies of the script's loaders, with the objects that give them indices. They keep persistent workers."""


_DEPTH = 5
"""The most samplers, each within another one, that are searched."""


class _IndexPlace(Place):
    """The place in a DataLoader of a map-style data set. Its sampler or batch sampler returns to the place."""

    def __init__(self, loader: Any) -> None:
        if loader not in _FOLLOWED:
            _FOLLOWED[loader] = Skipping.in_copy(loader)
        self._loader, self._indices = _FOLLOWED[loader]
        self._indices.begin_anew()
        self._sampler, self._batch = _shard_sampler(loader)
        self._batches = 0  # of the pass so far, except those before an offset of the sampler

    def begin(self) -> Iterator[Any]:
        return iter(self._loader)

    def advance(self) -> None:
        """See Place."""
        self._batches += 1

    def state(self) -> State:
        state = State({"index": True})
        if self._sampler is not None:
            state.values["samples"] = self._sampler.place(self._batches * self._batch, within=self._batches > 0)
        begun = self._indices.begun if self._batches else None
        state.add("random", self._indices.generators() if begun is None else begun)
        return state

    def load(self, state: State, batches: int) -> None:
        if self._sampler is not None:
            self._sampler.go_on(state.values["samples"])
        if self._sampler is None or not self._batch:
            self._batches = self._indices.skipped = self._indices.until = batches
            if batches:
                self._indices.begins = state.part("random")
            else:
                self._indices.set_generators(state.part("random"))


class Skipping:
    """Yields the items of another sampler, from the `skipped`-th on.

    until: after so many items, random numbers continue as before `begins`.
    within: the other sampler, and the samplers within it.
    begun: the random state with which the pass has begun; None before.
    begins: the random state with which the pass has to begin.
    """

    def __init__(self, sampler: Any, *generators: Any) -> None:
        """generators: further random generators from which it draws."""
        self._sampler = sampler
        self.within = _within(sampler)
        found = [*generators, *(getattr(each, "generator", None) for each in self.within)]
        self._generators = list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())
        self.begin_anew()

    @classmethod
    def in_copy(cls, loader: Any) -> "tuple[Any, Self]":
        """Return a copy of a DataLoader that takes its indices from the second result."""
        copied = copy.copy(loader)
        # A DataLoader refuses this to protect the workers that it may have started; a copy has none.
        return copied, cls.put_in(copied)

    @classmethod
    def put_in(cls, loader: Any) -> "Self":
        """Like `in_copy`, in a DataLoader that was not iterated yet."""
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        own = cls(getattr(loader, name), loader.generator)
        vars(loader).update({name: own, "_iterator": None})
        return own

    def begin_anew(self) -> None:
        """The next pass is independent of earlier ones."""
        self.skipped = self.until = 0
        self.begun: State | None = None
        self.begins: State | None = None

    def generators(self) -> State:
        """The state of the generators alone, for a pass that has not begun."""
        return State({}, {f"generator/{at}": each.get_state().numpy() for at, each in enumerate(self._generators)})

    def set_generators(self, state: State) -> None:
        """Return to a state of the generators."""
        for at, each in enumerate(self._generators):
            each.set_state(torch.from_numpy(state.arrays[f"generator/{at}"].copy()))

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "_sampler":  # of an object that is being copied
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __iter__(self) -> Iterator[Any]:
        skipped, until, begins, now = self.skipped, self.until, self.begins, random_state()
        if begins is not None:
            set_random_state(begins)
            self.set_generators(begins)
        self.begun, self.begins = random_state(), None
        self.begun.arrays |= self.generators().arrays
        passed = 0
        for item in self._sampler:
            if passed == until and begins is not None:
                set_random_state(now)
            passed += 1
            if passed > skipped:
                yield item
        if passed <= until and begins is not None:  # the pass was at its end
            set_random_state(now)


def _within(sampler: Any) -> list[Any]:
    """A sampler, and the samplers within it."""
    found: list[Any] = []
    while sampler is not None and len(found) < _DEPTH:
        found.append(sampler)
        within = (getattr(sampler, name, None) for name in ("batch_sampler", "sampler"))
        sampler = next((each for each in within if each is not None), None)
    return found


def _shard_sampler(loader: Any) -> tuple[ShardSampler | None, int]:
    """The `geomx_cli.torch.sampler` of a loader, None if it has another one, and the samples of a batch, 0 if unknown.
    """
    batches = loader.batch_sampler
    inner, count = (loader.sampler, 1) if batches is None else (getattr(batches, "sampler", None), 0)
    if type(batches) is BatchSampler:
        count = batches.batch_size
    return (inner, count) if isinstance(inner, ShardSampler) else (None, 0)
