"""The place in a pass over an NDArrayIter. Such an iterator shuffles its data again from its last order.

The iterator of another process has another order. To let it return to the same order, each iterator's order is noted
when it shuffles.
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.mxnet.load import load_mxnet
from geomx_cli.runtime.frontends.mxnet.packing import pack_state, unpack_state
from geomx_cli.runtime.script.training_state import Place
from geomx_cli.runtime.training.worker_algorithm import State

__all__ = ["IteratorPlace", "check_iterator", "observe_shuffles"]

_ORDER = "_geomx_order"
"""The attribute of an iterator that has the numbers of its samples, in their present order. The script's order is 0, 1,
...
"""
_CACHED = ("_cache_data", "_cache_label")
"""The attributes with the rest of the last pass, which belongs to the first batch of the next pass."""


def observe_shuffles(kind: Any) -> None:
    """Make iterators of this class note their order. Idempotent."""
    shuffle = kind._shuffle_data
    if hasattr(shuffle, "__wrapped__"):
        return

    @functools.wraps(shuffle)
    def shuffle_and_note(self: Any) -> None:
        shuffle(self)
        before = vars(self).get(_ORDER)
        setattr(self, _ORDER, self.idx.copy() if before is None else before[self.idx])

    kind._shuffle_data = shuffle_and_note


def check_iterator(iterator: Any) -> None:
    """Raise InvalidSettings for an iterator that reads another, shuffling iterator. That one may have read further than
    the script.
    """
    inner = [*getattr(iterator, "iters", ()), *filter(None, [getattr(iterator, "data_iter", None)])]
    for each in inner:
        if getattr(each, "shuffle", False):
            what = f"a {type(iterator).__name__} of an iterator that shuffles cannot return to a batch"
            raise InvalidSettings(what, f"give geomx.state the {type(each).__name__} itself, or do not shuffle")
        check_iterator(each)


class IteratorPlace(Place):
    """The place in an NDArrayIter. It reads nothing to return to the place."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def begin(self) -> Iterator[Any]:
        return iter(self._iterator)

    def advance(self) -> None:
        """See Place. The iterator itself knows the position."""

    def state(self) -> State:
        iterator = self._iterator
        rolls = iterator.last_batch_handle == "roll_over"
        kept = {name: getattr(iterator, name) if rolls else None for name in _CACHED}
        state = pack_state({"cursor": int(iterator.cursor), **kept}, "the iterator")
        if iterator.shuffle:
            state.arrays["order"] = vars(iterator)[_ORDER].astype(np.int32)
            state.arrays["shuffled"] = iterator.idx.astype(np.int32)
        return state

    def load(self, state: State, batches: int) -> None:
        iterator, kept = self._iterator, unpack_state(state)
        iterator.cursor = kept["cursor"]
        for name in _CACHED:
            setattr(iterator, name, kept[name])
        if iterator.shuffle:
            self._reorder(state.arrays["order"].astype(np.int64))
            iterator.idx = state.arrays["shuffled"].astype(np.int64)

    def _reorder(self, order: Any) -> None:
        """Put the samples in this order."""
        iterator = self._iterator
        present = vars(iterator)[_ORDER]
        if len(present) != len(order):
            what = f"the iterator had {len(order)} samples when its place was saved, and now {len(present)}"
            raise InvalidSettings(what, "give it the same data each time that the script runs")
        places = np.empty_like(present)
        places[present] = np.arange(len(present))
        chosen = load_mxnet().io.io._getdata_by_idx
        iterator.data, iterator.label = (chosen(each, places[order]) for each in (iterator.data, iterator.label))
        setattr(iterator, _ORDER, order)
