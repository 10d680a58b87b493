"""Tells when one worker alone skips a batch, as of a loss that is not finite: from then on gradients do not match."""

import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends import ScriptSession

__all__ = ["SkippedBatches", "batches_in_epoch", "follow_loaders"]

_latest: "weakref.ReferenceType[Any] | None" = None
"""The DataLoader's iterator that has given the last batch to train on."""


class SkippedBatches:
    """Compares which batch of a DataLoader each worker trains on, in the backward passes of one group.

    A worker skips a batch if others make a backward pass with each, and go on as far behind it. told: what was found,
    "" before; it is said once, by the worker of rank 0.
    """

    def __init__(self, session: "ScriptSession", rank: int) -> None:
        self._session = session
        self._rank = rank
        self._before: Sequence[int] = ()
        self._suspected = ""
        self.told = ""

    @property
    def number(self) -> int:
        """The batch that this worker trains on, from 1 on; 0 if it came from no DataLoader."""
        iterator = _latest() if _latest is not None else None
        return 0 if iterator is None else min(int(iterator._num_yielded), 2**32 - 1)

    def compare(self, numbers: Sequence[int]) -> None:
        """Note `number` of each worker in their next backward pass, by rank."""
        before, self._before = self._before, numbers
        suspected, self._suspected = self._suspected, ""
        if self.told or not before or 0 in numbers:
            return
        steps = [number - last for number, last in zip(numbers, before, strict=True)]
        if min(steps) < 1:  # an epoch has begun, or a worker has looked at other batches meanwhile
            self._before = () if max(steps) > 0 else numbers
        elif suspected:
            self.told = suspected
            if not self._rank:
                text = "its gradients belong to later batches than those of the others, and it has fewer"
                self._session.warn(f"{suspected}: from now on {text}", affects_result=True)
        elif max(steps) > min(steps):
            rank = steps.index(max(steps))
            first, last = before[rank] + 1, numbers[rank] - min(steps)
            which = f"batch {first}" if first == last else f"batches {first} to {last}"
            self._suspected = f"worker {rank} skipped {which} of its DataLoader, and others did not"


def batches_in_epoch() -> int:
    """How many batches the DataLoader has that has given the last one to train on; 0 if unknown."""
    iterator = _latest() if _latest is not None else None
    try:
        return 0 if iterator is None else len(iterator._index_sampler)
    except (TypeError, NotImplementedError):  # of an IterableDataset, or a sampler without a length
        return 0


@functools.cache
def follow_loaders(iterators: Any) -> None:
    """Note the batches that DataLoaders give; iterators: the base class of their iterators. Those given without
    gradients, as to an evaluation, do not count.
    """
    original = iterators.__next__

    @functools.wraps(original)
    def following(iterator: Any) -> Any:
        global _latest  # noqa: PLW0603  # DataLoaders belong to no group
        batch = original(iterator)
        if torch.is_grad_enabled():
            _latest = weakref.ref(iterator)
        return batch

    iterators.__next__ = following
