"""A worker's batches, epoch after epoch. The first epochs may be what another job has left of them.

A job that goes on with other numbers of workers deals the rest of an epoch anew. What is left of it follows from what
each worker of the earlier jobs had drawn. So in an epoch each sample is drawn once, however often the numbers change.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from geomx_cli.contract import earlier_job
from geomx_cli.datasets.catalog import BY_CLASS
from geomx_cli.runtime.data.samples import Batch, Samples, TextSamples, shard, share_of_rest, text_shard

__all__ = ["Deal", "Drawn", "Epochs"]

@dataclass(frozen=True)
class Deal:
    """How a job deals the data to its workers.

    parties: the ranks of a worker's party, by its global rank; empty in a flat cluster. A worker knows only its own.
    split, seed, batch_size: the options.
    """

    workers: int
    parties: Mapping[int, range]
    split: str
    seed: int
    batch_size: int

    def share(self, data: Samples, rank: int) -> Samples:
        """Return a worker's share of all the data. Raises as `shard`."""
        if isinstance(data, TextSamples):
            return text_shard(data, rank, self.workers)
        return shard(data, rank, self.workers, self.split, self.seed, self._party(rank))

    def share_of_rest(self, rest: Samples, rank: int) -> Samples:
        """Return a worker's share of what is left of an epoch."""
        share = share_of_rest(rest, rank, self.workers, self.split, self.seed, self._party(rank))
        return replace(share, in_order=self.split == BY_CLASS and not isinstance(rest, TextSamples))

    def _party(self, rank: int) -> range | None:
        return self.parties.get(rank)


@dataclass(frozen=True)
class Drawn:
    """What the workers of a job had drawn of the data when it ended: see earlier_job.Drawn."""

    deal: Deal
    fields: earlier_job.Drawn

    @classmethod
    def of(cls, fields: earlier_job.Drawn) -> "Drawn":
        """Return what a job's record says."""
        parties = {rank: range(first, end) for rank, (first, end) in enumerate(fields.parties)}
        deal = Deal(len(fields.places), parties, fields.split, fields.seed, fields.batch_size)
        return cls(deal, fields)

    def left(self, data: Samples, rest: Samples | None, epoch: int) -> Samples | None:
        """Return what this job left of what it found of an epoch. None stands for all of an epoch."""
        if epoch > self.fields.last:
            return rest
        left = []
        for rank, (reached, batches) in enumerate(self.fields.places):
            share = self.deal.share(data, rank) if rest is None else self.deal.share_of_rest(rest, rank)
            samples, order = share.of_epoch(self.deal.seed, epoch, rank)
            drawn = len(order) if reached > epoch else batches * self.deal.batch_size if reached == epoch else 0
            left.append(samples.chosen(np.sort(order[drawn:])))
        images, labels = (np.concatenate([getattr(one, name) for one in left]) for name in ("images", "labels"))
        return replace(left[0], images=images, labels=labels, in_order=False)  # `share_of_rest` sets that


class Epochs:
    """The batches of one worker.

    first: the number of the first epoch, end: that after the last one.
    steps: batches of all of them.
    """

    def __init__(self, data: Samples, deal: Deal, rank: int, end: int, before: Sequence[Drawn] = ()) -> None:
        """data: all of them. before: what earlier jobs have drawn, the earliest first. Raises as `shard`."""
        self._deal = deal
        self._rank = rank
        self.end = end
        self.first = before[-1].fields.first if before else 0
        last = max((job.fields.last for job in before), default=-1)
        self._rests = dict[int, Samples]()  # of the first epochs, by number
        for epoch in range(self.first, last + 1):
            rest: Samples | None = None
            for job in before:
                rest = job.left(data, rest, epoch)
            assert rest is not None
            self._rests[epoch] = deal.share_of_rest(rest, rank)
        self._usual = deal.share(data, rank)
        self.steps = sum(self._batches_of(epoch) for epoch in range(self.first, end))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return self._usual.shape

    @property
    def classes(self) -> int:
        """Number of different labels that a sample may have."""
        return self._usual.classes

    def place(self, steps: int) -> tuple[int, int]:
        """Return the epoch of the batch after so many, and the number of batches before it in that epoch."""
        epoch = self.first
        while epoch in self._rests:
            if steps < self._batches_of(epoch):
                return epoch, steps
            steps -= self._batches_of(epoch)
            epoch += 1
        whole, used = divmod(steps, self._batches_of(epoch))
        return epoch + whole, used

    def batches(self, steps: int, *, endless: bool) -> Iterator[Batch]:
        """Yield the batches after the first `steps`. endless: epochs go on after the last one."""
        epoch, used = self.place(steps)
        while endless or epoch < self.end:
            yield from self._share(epoch).batches(
                self._deal.batch_size, seed=self._deal.seed, epoch=epoch, rank=self._rank, start=used
            )
            epoch, used = epoch + 1, 0

    def samples(self, first: int, end: int) -> int:
        """Return the number of samples in the batches from number `first` to before `end`."""
        return self._samples_before(end) - self._samples_before(first)

    def _samples_before(self, steps: int) -> int:
        epoch, used = self.place(steps)
        rests = sum(len(self._rests[one]) for one in self._rests if one < epoch)
        usual = max(0, epoch - self.first - len(self._rests)) * len(self._usual)
        return rests + usual + min(used * self._deal.batch_size, len(self._share(epoch)))

    def _share(self, epoch: int) -> Samples:
        return self._rests.get(epoch, self._usual)

    def _batches_of(self, epoch: int) -> int:
        return -(-len(self._share(epoch)) // self._deal.batch_size)
