"""Images with their labels: the whole of a data set's training or test half, or the shard of one worker."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Batch", "Samples"]

Floats = npt.NDArray[np.float32]
Batch = tuple[Floats, Floats]


@dataclass(frozen=True)
class Samples:
    """Images, uint8 or float32 of shape (n, channels, height, width), and labels, of shape (n,), each below `classes`.

    in_order: batches come in the order of the samples, not shuffled.
    """

    images: npt.NDArray[Any]
    labels: npt.NDArray[Any]
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
        """Every sample once, in an order that depends on (seed, epoch, rank) alone.

        Yields new float32 arrays: images of shape (b, channels, height, width), bytes scaled to [0, 1], and labels of
        shape (b,); the last batch may be short.
        """
        if self.in_order:
            order = np.arange(len(self))
        else:
            # Unlike Generator's, RandomState's streams never change: hosts with other versions of numpy agree.
            sequence = np.random.SeedSequence([seed, epoch, rank])
            order = np.random.RandomState(np.random.MT19937(sequence)).permutation(len(self))
        for start in range(0, len(order), size):
            yield self.take(order[start : start + size])

    def take(self, which: npt.NDArray[np.int64] | slice) -> Batch:
        """These samples as a batch; see `batches`."""
        chosen = self.images[which]
        images = chosen.astype(np.float32)
        if chosen.dtype == np.uint8:
            images /= 255
        return images, self.labels[which].astype(np.float32)
