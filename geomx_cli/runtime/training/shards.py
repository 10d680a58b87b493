"""Divides the training data among the workers: evenly mixed, by class, by party, or unevenly at random."""

from typing import Any

import numpy as np
import numpy.typing as npt

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.training.catalog import BY_CLASS, BY_PARTY, DIRICHLET, IID, check_split
from geomx_cli.runtime.training.samples import Samples

__all__ = ["choose", "shard"]

TRIES = 100
Indices = npt.NDArray[np.int64]


def shard(
    samples: Samples, rank: int, count: int, split: str = IID, seed: int = 1, party: range | None = None
) -> Samples:
    """Return a copy of the training data of worker `rank` of `count`. The remainder of the division is dropped.
    `party`: the ranks of its party, None in a flat cluster.

    "iid": a contiguous part of the file, which is in random order. "by-class": a contiguous part of the samples sorted
    by label, in that order in each epoch, so that batches have one or two classes. "by-party": the "by-class" part of
    its party, evenly mixed among the party's workers: parties have different classes. "dirichlet:ALPHA": a fraction of
    each class drawn from a Dirichlet distribution, with `seed`; shards differ in size. Hsu, Qi and Brown, "Measuring
    the effects of non-identical data distribution for federated visual classification", 2019, arXiv:1909.06335.

    Raises InvalidSettings if there are fewer samples than workers, or a worker would get none.
    """
    which = choose(samples.labels, samples.classes, rank, count, split, seed, party)
    return Samples(samples.images[which].copy(), samples.labels[which].copy(), samples.classes, split == BY_CLASS)


def choose(
    labels: npt.NDArray[Any], classes: int, rank: int, count: int, split: str, seed: int, party: range | None
) -> Indices | slice:
    """Return the indices of the samples that `shard` gives to a worker; see there. labels: 1-D, each below `classes`;
    for "iid" only their number counts.
    """
    alpha = check_split(split, flat=party is None)
    size = len(labels) // count
    if size == 0:
        hint = "start fewer workers or give more data"
        raise InvalidSettings(f"{count} workers cannot share {len(labels)} samples", hint)
    if split == IID:
        return slice(rank * size, (rank + 1) * size)
    if split == BY_CLASS:
        return np.argsort(labels, kind="stable")[rank * size : (rank + 1) * size]
    if split == BY_PARTY:
        assert party is not None
        ordered = np.argsort(labels, kind="stable")[party.start * size : party.stop * size]
        return np.sort(ordered[rank - party.start :: len(party)])
    return _dirichlet_split(labels, classes, alpha, count, seed)[rank]


def _dirichlet_split(labels: npt.NDArray[Any], classes: int, alpha: float, count: int, seed: int) -> list[Indices]:
    """Return the sample indices of each worker, in file order; redrawn while a worker would get none."""
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
