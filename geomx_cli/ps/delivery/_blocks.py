"""Blocks of a slice: how much each contributes, which are important, and the channels of the others (DGT).

Wang et al., "Differential gradient transmission", FGCS 121 (2021): the contribution of a block is a moving average of
its mean absolute gradient. Blocks are sorted by it, and the first `k` of them are important. The last block of a slice
is important too.
"""

import math
from dataclasses import dataclass

import numpy as np

from geomx_cli.ps.arrays import Array

__all__ = ["IMPORTANT", "SILENT", "Ranking", "channels", "dequantise", "quantise"]

IMPORTANT, SILENT = 0, 255
"""Channels: of important blocks, and of blocks without a bit set, which are not sent."""
LEVELS = 16


def channels(count: int, k: float, unreliable: int) -> Array:
    """The channel of each of `count` blocks in descending order of contribution, of which the last stands apart.

    The first round(k * count), rounded half up, and the last are IMPORTANT. The rest are divided evenly over the
    channels 1 to `unreliable`.
    """
    important = min(math.floor(k * count + 0.5), count - 1)
    found = np.zeros(count, np.uint8)
    rest = np.arange(count - 1 - important)
    found[important : count - 1] = 1 + rest * unreliable // max(1, len(rest))
    return found


@dataclass(slots=True)
class Ranking:
    """The contributions of one slice's blocks. `average`: None before the first round."""

    average: Array | None = None

    def update(self, array: Array, size: int, alpha: float) -> bool:
        """Take a round's gradient, in blocks of `size` elements: C <- alpha C + (1 - alpha) mean|g|.

        Returns False, and keeps the contributions, if some are not finite.
        """
        starts = np.arange(0, len(array), size)
        lengths = np.minimum(size, len(array) - starts)
        with np.errstate(over="ignore", invalid="ignore"):
            magnitude = np.abs(array, dtype=np.promote_types(array.dtype, np.float32))
            mean = np.add.reduceat(magnitude, starts, dtype=np.float64) / lengths
        if not np.isfinite(mean).all():
            return False
        before = np.zeros(len(mean)) if self.average is None or len(self.average) != len(mean) else self.average
        self.average = alpha * before + (1 - alpha) * mean
        return True

    def channels(self, k: float, unreliable: int, zero: Array) -> tuple[Array, Array]:
        """The channel of each block, and the blocks that are sent, most important first, the last block last.

        zero: which blocks have no bit set. Those without a contribution are SILENT, except the last.
        """
        assert self.average is not None
        count = len(self.average)
        order = np.argsort(-self.average[:-1], kind="stable")
        order = order[~((self.average[order] == 0) & zero[order])]
        order = np.append(order, count - 1)
        found = np.full(count, SILENT, np.uint8)
        found[order] = channels(len(order), k, unreliable)
        return found, order


def quantise(blocks: Array) -> tuple[Array, Array]:
    """Each row in 4 bits an element: the bounds of its 16 bins, float32 in two columns, and two codes to a byte, the
    first in the low bits. The bins lie between min(0, smallest) and max(0, largest); rows are of even length.
    """
    bounds = np.empty((len(blocks), 2), "<f4")
    bounds[:, 0] = np.minimum(blocks.min(axis=1), 0)
    bounds[:, 1] = np.maximum(blocks.max(axis=1), 0)
    low, step = _bins(bounds)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(step > 0, (blocks - low) / step, 0)
    codes = np.clip(np.floor(codes), 0, LEVELS - 1).astype(np.uint8)
    return bounds, codes[:, ::2] | codes[:, 1::2] << 4


def dequantise(bounds: Array, codes: Array) -> Array:
    """The rows that `quantise` encoded, float32: the centres of their bins."""
    low, step = _bins(bounds)
    unpacked = np.empty((len(codes), 2 * codes.shape[1]), np.float32)
    unpacked[:, ::2] = codes & 15
    unpacked[:, 1::2] = codes >> 4
    found: Array = low + (unpacked + np.float32(0.5)) * step
    return found


def _bins(bounds: Array) -> tuple[Array, Array]:
    """The lower bound and the width of the bins, as columns."""
    low, high = bounds[:, :1], bounds[:, 1:]
    return low, (high - low) / np.float32(LEVELS)
