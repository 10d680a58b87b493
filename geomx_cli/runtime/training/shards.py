"""How the training data are divided among the workers: evenly mixed, by class, or unevenly at random."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from geomx_cli.errors import InvalidSettings
from geomx_cli.runtime.training.samples import Samples

__all__ = ["check", "is_iid", "shard"]

IID, BY_CLASS, DIRICHLET = "iid", "by-class", "dirichlet"
TRIES = 100
LEAST = 0.01  # below it numpy's gamma variates are zero now and then
Indices = npt.NDArray[np.int64]


def is_iid(split: str) -> bool:
    """Whether every worker gets nearly the same mixture."""
    return split == IID


def check(split: str) -> float:
    """The ALPHA of dirichlet:ALPHA, infinite for the others. Raises InvalidSettings for what is no value of --split."""
    kind, _, alpha = split.partition(":")
    if split in (IID, BY_CLASS):
        return math.inf
    try:
        number = float(alpha) if kind == DIRICHLET else 0.0
    except ValueError:
        number = 0.0
    if not LEAST <= number <= 1e6:
        hint = f"write {IID}, {BY_CLASS}, or {DIRICHLET}:0.3 with a number from {LEAST}; the smaller, the more uneven"
        raise InvalidSettings(f"--split {split}: there is no such way to divide the data", hint)
    return number


def shard(samples: Samples, rank: int, count: int, split: str = IID, seed: int = 1) -> Samples:
    """A copy of what worker `rank` of `count` trains on. What does not divide among them is left out.

    "iid": a contiguous part of the file, which is in random order. "by-class": a contiguous part of the samples sorted
    by label, in that order in each epoch, so that batches have one or two classes. "dirichlet:ALPHA": of each class a
    part that a Dirichlet distribution gives, for `seed`; shards differ in size. Hsu, Qi and Brown, "Measuring the
    effects of non-identical data distribution for federated visual classification", 2019, arXiv:1909.06335.

    Raises InvalidSettings when there are fewer samples than workers, or a worker would get none.
    """
    alpha = check(split)
    size = len(samples) // count
    if size == 0:
        raise InvalidSettings(
            f"{count} workers cannot share {len(samples)} samples", "start fewer workers or give more data"
        )
    if split == IID:
        return _take(samples, slice(rank * size, (rank + 1) * size))
    if split == BY_CLASS:
        ordered = np.argsort(samples.labels, kind="stable")
        return _take(samples, ordered[rank * size : (rank + 1) * size], in_order=True)
    return _take(samples, _uneven(samples.labels, samples.classes, alpha, count, seed)[rank])


def _uneven(labels: npt.NDArray[Any], classes: int, alpha: float, count: int, seed: int) -> list[Indices]:
    """The samples of each worker, in the order of the file; drawn again while a worker would get none."""
    random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, count])))
    for _ in range(TRIES):
        owners = np.empty(len(labels), np.int64)
        for label in range(classes):
            of_class = np.flatnonzero(labels == label)
            cuts = np.cumsum(random.dirichlet(np.full(count, alpha)))[:-1] * len(of_class)
            owners[of_class] = np.searchsorted(np.round(cuts), np.arange(len(of_class)), side="right")
        if np.bincount(owners, minlength=count).all():
            return [np.flatnonzero(owners == rank) for rank in range(count)]
    hint = "give a larger ALPHA, another --seed, fewer workers or more data"
    raise InvalidSettings(f"--split {DIRICHLET}:{alpha:g}: of {count} workers one always gets no samples", hint)


def _take(samples: Samples, which: Indices | slice, *, in_order: bool = False) -> Samples:
    return Samples(samples.images[which].copy(), samples.labels[which].copy(), samples.classes, in_order)
