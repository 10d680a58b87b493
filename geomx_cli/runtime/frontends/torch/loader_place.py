"""The place in a pass over a script's DataLoader. Another process returns to it without loading what comes before."""

import copy
import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from geomx_cli.runtime.frontends.torch.data import ShardSampler
from geomx_cli.runtime.frontends.torch.packing import pack_state, unpack_state
from geomx_cli.runtime.frontends.torch.random_state import random_state, set_random_state
from geomx_cli.runtime.script.loader_place import OwnPlace, ReadPlace, has_own_place
from geomx_cli.runtime.script.training_state import Place
from geomx_cli.runtime.training.worker_algorithm import State

__all__ = ["place_in"]


def place_in(loader: Any, name: str) -> Place:
    """Return a place at the begin of a loader; the kind depends on how one returns to it. name: for messages."""
    if has_own_place(loader):
        return OwnPlace(loader, lambda state: pack_state(state, name), unpack_state)
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        return _IndexPlace(loader)
    return ReadPlace(loader, random_state, set_random_state)


_FOLLOWED: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()
"""Copies of the script's loaders that take their indices from a _Skipping; they keep persistent workers."""


class _IndexPlace(Place):
    """Of a DataLoader of a map-style data set: its sampler, or batch sampler, returns to the place."""

    def __init__(self, loader: Any) -> None:
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        if loader not in _FOLLOWED:
            followed = copy.copy(loader)
            # A DataLoader refuses this to protect the workers that it may have started; a copy has none.
            vars(followed).update({name: _Skipping(getattr(loader, name)), "_iterator": None})
            _FOLLOWED[loader] = followed
        self._loader = _FOLLOWED[loader]
        self._indices: _Skipping = getattr(self._loader, name)
        self._indices.skipped, self._indices.begun, self._indices.begins = 0, None, None
        self._sampler, self._batch = _shard_sampler(loader)
        self._batches = 0  # of the pass so far, without those before an offset of the sampler

    def begin(self) -> Iterator[Any]:
        return iter(self._loader)

    def advance(self) -> None:
        """See Place."""
        self._batches += 1

    def state(self) -> State:
        state = State({"index": True})
        if self._sampler is not None:
            state.values["samples"] = self._sampler.place(self._batches * self._batch, within=self._batches > 0)
        if self._indices.begun is not None and self._batches:
            state.add("random", self._indices.begun)
        return state

    def load(self, state: State, batches: int) -> None:
        if self._sampler is not None:
            self._sampler.go_on(state.values["samples"])
        if self._sampler is None or not self._batch:
            self._batches = self._indices.skipped = batches
            self._indices.begins = state.part("random") if "random" in state.values else None


class _Skipping:
    """Gives what another sampler gives, from its `skipped`-th on.

    begun: the random state with which the pass has begun, None before. begins: the one with which it is to begin.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.skipped = 0
        self.begun: State | None = None
        self.begins: State | None = None

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __iter__(self) -> Iterator[Any]:
        skipped, begins, now = self.skipped, self.begins, random_state()
        if begins is not None:
            set_random_state(begins)
        self.begun, self.begins = begins or now, None
        for index, item in enumerate(self._sampler):
            if index == skipped and begins is not None:
                set_random_state(now)
            if index >= skipped:
                yield item


def _shard_sampler(loader: Any) -> tuple[ShardSampler | None, int]:
    """The `geomx_cli.torch.sampler` of a loader, None if it has another, and the samples of a batch, 0 if unknown."""
    batches = loader.batch_sampler
    inner, count = (loader.sampler, 1) if batches is None else (getattr(batches, "sampler", None), 0)
    if type(batches) is BatchSampler:
        count = batches.batch_size
    return (inner, count) if isinstance(inner, ShardSampler) else (None, 0)
