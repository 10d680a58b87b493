"""Images with their labels: a whole split of a data set, or the shard of one worker."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from geomx_cli.ps.arrays import Array, Floats

__all__ = ["Batch", "Samples"]

Batch = tuple[Floats, Floats]


@dataclass(frozen=True)
class Samples:
    """Images, uint8 or float32 of shape (n, channels, height, width), and labels, of shape (n,), each below `classes`.

    in_order: do not shuffle batches.
    """

    images: Array
    labels: Array
    classes: int = 10
    in_order: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def batches(self, size: int, *, seed: int, epoch: int, rank: int) -> Iterator[Batch]:
        """Yield batches of every sample once, in an order that depends only on (seed, epoch, rank).

        The arrays are new, float32: images of shape (b, channels, height, width), bytes scaled to [0, 1], and labels of
        shape (b,); the last batch may be smaller.
        """
        if self.in_order:
            order = np.arange(len(self))
        else:
            # Unlike Generator's, RandomState's streams never change: hosts with different numpy versions agree.
            sequence = np.random.SeedSequence([seed, epoch, rank])
            order = np.random.RandomState(np.random.MT19937(sequence)).permutation(len(self))
        for start in range(0, len(order), size):
            yield self.take(order[start : start + size])

    def take(self, which: Array | slice) -> Batch:
        """Return these samples as a batch; see `batches`."""
        chosen = self.images[which]
        images = chosen.astype(np.float32)
        if chosen.dtype == np.uint8:
            images /= 255
        return images, self.labels[which].astype(np.float32)
