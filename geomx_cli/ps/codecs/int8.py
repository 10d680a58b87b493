"""int8: a quarter of the bytes of fp32, with error feedback.

In blocks of 256 elements the largest absolute value m becomes 127: with s = m / 127 an element x is sent as
round(x / s), to nearest even, and decoded as that number times s, all computed in fp32. The loss is added to the next
contribution.
"""

from typing import TYPE_CHECKING

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.net.wire import BadMessage

if TYPE_CHECKING:
    from geomx_cli.ps.net.payload import Array

__all__ = ["codec"]

name = "int8"
_BLOCK = 256


def codec(argument: str) -> "Int8":
    """Takes no argument."""
    if argument:
        raise InvalidSettings(f"int8:{argument}: int8 takes no argument", "write int8")
    return Int8()


class Int8:
    """The payload: m / 127 of each block as little-endian fp32, then the elements as int8."""

    decay = 1.0
    momentum = 0.0
    results = "changes"

    def encode(self, array: "Array") -> memoryview:
        """See Codec."""
        count = -(-len(array) // _BLOCK)
        payload = np.empty(4 * count + len(array), np.uint8)
        blocks = in_blocks(array, _BLOCK)
        steps = np.maximum(blocks.max(axis=1), -blocks.min(axis=1)) / np.float32(127)
        payload[: 4 * count].view("<f4")[:] = steps
        steps[steps == 0] = 1
        scaled = blocks / steps[:, None]
        np.rint(scaled, out=scaled)
        np.clip(scaled, -127, 127, out=scaled)  # division by a subnormal step may be far off
        payload[4 * count :].view(np.int8)[:] = scaled.reshape(-1)[: len(array)]
        return payload.data

    def decode(self, payload: memoryview, length: int) -> "Array":
        """See Codec."""
        count = -(-length // _BLOCK)
        if len(payload) != 4 * count + length:
            raise BadMessage(f"{len(payload)} bytes of int8 for {length} elements")
        steps = np.frombuffer(payload, "<f4", count)
        if not (np.isfinite(steps) & (steps >= 0)).all():
            raise BadMessage("int8 with a scale that is no finite number from 0")
        array = np.frombuffer(payload, np.int8, length, 4 * count).astype(np.float32)
        whole = length - length % _BLOCK
        array[:whole].reshape(-1, _BLOCK)[:] *= steps[: whole // _BLOCK, None]
        array[whole:] *= steps[-1] if count else 1
        return array


def in_blocks(array: "Array", size: int) -> "Array":
    """As fp32 in rows of `size` elements, the last one padded with zeros; a view if possible."""
    array = array.astype(np.float32, copy=False)
    if rest := len(array) % size:
        array = np.concatenate([array, np.zeros(size - rest, np.float32)])
    return array.reshape(-1, size)
