"""The place in a pass over an MXNet script's loader or iterator. Another process returns to it without loading, if the
loader permits that.
"""

import copy
import weakref
from collections.abc import Iterator
from typing import Any

from geomx_cli.runtime.frontends.mxnet.iterator_place import IteratorPlace, check_iterator
from geomx_cli.runtime.frontends.mxnet.load import load_mxnet
from geomx_cli.runtime.frontends.mxnet.packing import pack_state, unpack_state
from geomx_cli.runtime.script.loader_place import OwnPlace, ReadPlace, has_own_place
from geomx_cli.runtime.script.random_state import random_state, set_random_state
from geomx_cli.runtime.script.training_state import Place
from geomx_cli.runtime.training.worker_algorithm import State

__all__ = ["place_in"]


def place_in(loader: Any) -> Place:
    """Return a place at the begin of a loader. Its class depends on how a process returns to it.

    Raises InvalidSettings for an iterator that cannot return to a batch.
    """
    mx = load_mxnet()
    if has_own_place(loader):
        return OwnPlace(loader, lambda state: pack_state(state, "the loader"), unpack_state)
    if isinstance(loader, mx.gluon.data.DataLoader):
        return _IndexPlace(loader)
    if isinstance(loader, mx.io.NDArrayIter):
        return IteratorPlace(loader)
    check_iterator(loader)
    return ReadPlace(loader)


_FOLLOWED: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()
"""Copies of the script's loaders that take their indices from a _Skipping; they keep the processes of a loader."""


class _IndexPlace(Place):
    """The place in a gluon DataLoader, whose batch sampler returns to it."""

    def __init__(self, loader: Any) -> None:
        if loader not in _FOLLOWED:
            followed = copy.copy(loader)
            followed._batch_sampler, followed._iter = _Skipping(loader._batch_sampler), None
            followed.auto_reload = False  # it would begin the next pass early
            _FOLLOWED[loader] = followed
        self._loader = _FOLLOWED[loader]
        self._indices: _Skipping = self._loader._batch_sampler
        self._indices.skipped, self._indices.begins = 0, None
        self._begun = False

    def begin(self) -> Iterator[Any]:
        if self._indices.begins is None:
            self._indices.begins = self._indices.state()
        self._begun = True
        return iter(self._loader)

    def advance(self) -> None:
        """See Place."""

    def state(self) -> State:
        begins = self._indices.begins if self._begun else None
        return begins if begins is not None else self._indices.state()

    def load(self, state: State, batches: int) -> None:
        self._indices.skipped, self._indices.begins = batches, state if batches else None
        self._indices.rest = state.values["rest"]


class _Skipping:
    """Yields the batches of a batch sampler, from the `skipped`-th one on.

    begins: the state with which the pass begins.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.skipped = 0
        self.begins: State | None = None

    @property
    def rest(self) -> list[int]:
        """Indices that the last pass has left for the next one (last_batch="rollover")."""
        return [int(index) for index in getattr(self._sampler, "_prev", ())]

    @rest.setter
    def rest(self, indices: list[int]) -> None:
        if hasattr(self._sampler, "_prev"):
            self._sampler._prev = list(indices)

    def state(self) -> State:
        """Return the state that decides which indices a pass gives, if the pass begins now."""
        state = State({"rest": self.rest})
        state.add("random", random_state())
        return state

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        assert self.begins is not None
        now = random_state()
        set_random_state(self.begins.part("random"))
        items = iter(self._sampler)
        if self.skipped:
            for _ in range(self.skipped):
                next(items, None)
            set_random_state(now)
        yield from items
