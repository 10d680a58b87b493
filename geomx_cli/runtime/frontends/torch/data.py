"""This worker's part of a PyTorch data set, and the batches that it has trained on."""

import functools
import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import IterableDataset, Sampler, Subset, TensorDataset

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.datasets.catalog import IID
from geomx_cli.ps.arrays import Array
from geomx_cli.runtime.data import reader, samples

__all__ = [
    "ShardSampler", "TensorDataset", "batches_in_epoch", "follow_loaders", "load", "load_text", "number_of_batch",
    "shard", "steps_taken",
]  # fmt: skip


def load(name: str, split: Literal["train", "test"], data_dir: str | Path) -> TensorDataset:
    """See geomx_cli.torch.load_data."""
    images, labels = reader.load(name, split, data_dir).take(slice(None))
    return TensorDataset(torch.from_numpy(images), torch.from_numpy(labels).long())


def load_text(name: str, split: Literal["train", "test"], data_dir: str | Path) -> torch.Tensor:
    """See geomx_cli.torch.load_text."""
    return torch.from_numpy(reader.read_text(name, split, data_dir).copy())


def shard(dataset: Any, rank: int, count: int, split: str, seed: int, party: range | None) -> Any:
    """See geomx_cli.torch.shard. The part of worker `rank` of `count`. party: the ranks of its party, None if flat."""
    size = length(dataset)
    if split == IID:
        order = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, size]))).permutation(size)
        part = samples.choose(order, 1, rank, count, split, seed, party)
        return Subset(dataset, order[part].tolist())
    labels = _labels(dataset, size)
    part = samples.choose(labels, int(labels.max()) + 1, rank, count, split, seed, party)
    return Subset(dataset, np.arange(size)[part].tolist())


def length(dataset: Any) -> int:
    """The number of samples. Raises InvalidSettings for a data set without indices."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        hint = "let each worker read its own part, by geomx.global_rank() and geomx.num_all_workers()"
        raise InvalidSettings(f"{type(dataset).__name__} has no indices to divide among the workers", hint)
    return len(dataset)


def _labels(dataset: Any, size: int) -> Array:
    """The data set's labels, of shape (size,)."""
    found = getattr(dataset, "targets", getattr(dataset, "labels", None))
    if found is None and (tensors := getattr(dataset, "tensors", None)):
        found = tensors[-1]
    labels = np.asarray(found)
    if labels.shape != (size,) or not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
        what = f"{type(dataset).__name__} has no labels to divide it by"
        raise InvalidSettings(what, 'give it an attribute `targets`, one integer for each sample, or split="iid"')
    return labels


class _Steps:
    """Counts the steps of all optimizers in this process."""

    def __init__(self) -> None:
        self.count = 0
        register_optimizer_step_post_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1


_steps = functools.cache(_Steps)


def steps_taken() -> int:
    """Return the number of steps of all optimizers in this process since the first call."""
    return _steps().count


class ShardSampler(Sampler):  # type: ignore[misc, type-arg, unused-ignore]  # torch is not installed where mypy runs
    """A worker's indices, which differ in each epoch. With `shuffle` all workers draw one permutation, and each takes
    its part. All have equally many. If a rest is smaller than the number of workers, it is left out of the epoch.

    The next epoch begins with the first iteration after an iteration since whose begin an optimizer has taken a step.
    Of several iterations, the one from which an index was drawn last counts. So an evaluation, or a look at a batch, by
    one worker alone does not change the epochs.
    """

    def __init__(self, dataset: Any, rank: int, count: int, *, shuffle: bool, seed: int) -> None:
        self._size = length(dataset)
        self._rank, self._count = rank, count
        self._shuffle, self._seed = shuffle, seed
        self._epoch = self._offset = 0  # of the last pass: its epoch, and samples used before it
        self._begun = math.inf  # the number of steps after which the next epoch begins
        _steps()
        if len(self) == 0:
            hint = "start fewer workers or give more data"
            raise InvalidSettings(f"{count} workers cannot share {self._size} samples", hint)

    @property
    def epoch(self) -> int:
        """The epoch of the last pass."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, for a script that resumes, or that counts epochs itself."""
        self._epoch, self._offset, self._begun = epoch, 0, math.inf

    def place(self, drawn: int, *, within: bool) -> dict[str, int]:
        """Return the place after so many samples of this worker in a pass: the epoch, and how many of its samples all
        workers have used.

        within: whether the pass has begun.
        """
        if not within and _steps().count > self._begun:
            return {"epoch": self._epoch + 1, "offset": 0}
        return {"epoch": self._epoch, "offset": self._offset + drawn * self._count}

    def go_on(self, place: dict[str, int]) -> None:
        """Begin the next pass at a `place`. Its number of workers may differ. They have used the first samples of the
        epoch's order.
        """
        self._epoch, self._offset, self._begun = place["epoch"], place["offset"], math.inf

    def __len__(self) -> int:
        return self._size // self._count

    def __iter__(self) -> Iterator[int]:
        begun, epoch, offset = _steps().count, self._epoch, self._offset
        if begun > self._begun:
            epoch, offset = epoch + 1, 0
        generator = torch.Generator("cpu")
        generator.manual_seed(self._seed * 1_000_003 + epoch)
        order = torch.arange(self._size, device="cpu")
        if self._shuffle:
            order = torch.randperm(self._size, generator=generator, device="cpu")
        part = order[offset + self._rank : len(self) * self._count : self._count].tolist()
        for index in part:
            # If the pass continues within an epoch, steps were taken before it.
            self._epoch, self._offset, self._begun = epoch, offset, -1 if offset else begun
            yield index
        if offset and not part:  # nothing was left
            self._epoch, self._offset, self._begun = epoch, offset, -1


_latest: "weakref.ReferenceType[Any] | None" = None
"""The DataLoader's iterator that gave the last batch to train on."""


def number_of_batch() -> int:
    """The number, from 1 on, of the last batch to train on in its DataLoader; 0 if it came from none."""
    iterator = _latest() if _latest is not None else None
    return 0 if iterator is None else int(iterator._num_yielded)


def batches_in_epoch() -> int:
    """The number of batches of the DataLoader that gave the last batch to train on; 0 if unknown."""
    iterator = _latest() if _latest is not None else None
    try:
        return 0 if iterator is None else len(iterator._index_sampler)
    except (TypeError, NotImplementedError):  # of an IterableDataset, or a sampler without a length
        return 0


@functools.cache
def follow_loaders(iterators: Any) -> None:
    """Note the batches that DataLoaders give. Batches given without gradients, as to an evaluation, do not count.

    iterators: the base class of their iterators.
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
