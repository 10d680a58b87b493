"""sparseloco[:DECAY][,keep=K][,warmup=N]: 200 times fewer bytes than fp32, for the rare exchanges of DiLoCo, ESync and
HFA (arXiv:2508.15706).

The residual e decays (e = DECAY e + difference), by default by 0.95 as in the paper. In chunks of 4096 elements the K
elements of largest magnitude are sent, by default 64. Each is sent as a sign, and one bit for which of two levels the
magnitude has. Magnitudes above the mean of the K have their own mean as level, and the other magnitudes have theirs.
The codec fp16 encodes a slice's levels.

Indices are gaps in Rice code with 5 low bits, one fewer each time K is doubled. The last chunk sends the same fraction
of its elements, rounded up. Slices of fewer than 4096 elements, such as biases, have chunks of 256. Half of each chunk
is sent, with no low bits, also in a warm-up. In the residual of results that are sums nothing decays.

warmup: in round r of the first N a chunk sends 2^(N - r + 1) times as many elements, at most 2048. The reason: the
    parts that are left out of a model's first, large changes are the parts that it lacks most.
"""

import copy
import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.units import plain_number
from geomx_cli.ps.aggregation.codec import Codec, with_numbers
from geomx_cli.ps.codecs._sparse import SelectingCodec, largest_of_rows
from geomx_cli.ps.codecs.fp16 import Fp16
from geomx_cli.ps.kernels.loops import compiled
from geomx_cli.ps.net.wire import BadMessage

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array

__all__ = ["codec"]

name = "sparseloco"
_CHUNK, _KEPT, _LOW_BITS = 4096, 64, 5
_SMALL = 256
_DOUBLED = {_KEPT << times: times for times in range(_LOW_BITS + 1)}
"""The numbers of elements that a chunk may send, as the number of times that the smallest is doubled."""
_LEVEL = np.dtype("<f2")


def codec(argument: str) -> "SparseLoCo":
    """Parse DECAY (above 0, at most 1), a chunk's elements, and the rounds of warm-up, see with_numbers. Raises
    InvalidSettings.
    """
    first, numbers = with_numbers(name, argument, keep=_KEPT, warmup=0)
    try:
        decay = float(plain_number(first) or 0.95)
    except ValueError:
        decay = math.nan
    if not 0 < decay <= 1:
        raise InvalidSettings(f"{name}:{argument}: {first!r} is no decay", f"write {name}:0.95; above 0, at most 1")
    keep, warmup = numbers["keep"], numbers["warmup"]
    if keep not in _DOUBLED:
        hint = f"choose from {', '.join(map(str, _DOUBLED))}"
        raise InvalidSettings(f"{name}:{argument}: a chunk of {_CHUNK} elements cannot keep {keep}", hint)
    return SparseLoCo(decay, _DOUBLED[keep], warmup)


class SparseLoCo(SelectingCodec):
    """The payload: two levels of each chunk in fp16, and as int16 the power of two by which they are multiplied. Then
    bits, each kind starting at a byte boundary: the low bits of gaps, signs, levels, and the gaps' high parts in unary
    (ones and a zero).
    """

    results = "changes"
    for_local_optimizers = True
    _largest_of_rows = staticmethod(largest_of_rows)

    def __init__(self, decay: float, doubled: int, warmup: int) -> None:
        self.decay = decay
        self._warmup = warmup
        self._doubled = doubled
        # An element takes about 10 bits: 5 low ones and 3 high ones of its index, its sign and its level.
        self.ratio = 32 * _CHUNK / ((_KEPT << doubled) * (10 - doubled))
        self._fp16 = Fp16()

    def prepare(self) -> None:
        """See Codec."""
        super().prepare()
        self._largest_of_rows = compiled(largest_of_rows)
        self._fp16.prepare()

    def at(self, size: int, round_: int) -> Codec:
        """See Codec."""
        if round_ > self._warmup:
            return self
        warming = copy.copy(self)
        warming._doubled = min(_LOW_BITS, self._doubled + self._warmup - max(round_, 1) + 1)
        return warming

    def _chunks(self, length: int) -> "tuple[_Chunks, int]":
        """The chunks of a slice, and the number of low bits of their gaps."""
        if length < _CHUNK:
            return _chunks_of(length, _SMALL, _SMALL // 2), 0
        return _chunks_of(length, _CHUNK, _KEPT << self._doubled), _LOW_BITS - self._doubled

    def select(self, array: "Array") -> "tuple[memoryview, Array, Array]":
        """See SelectingCodec."""
        if not len(array):
            return memoryview(b""), np.arange(0), np.zeros(0, np.float32)
        chunks, low_bits = self._chunks(len(array))
        whole = chunks.whole
        kernel = self._largest_of_rows if array.dtype == np.float32 else largest_of_rows
        places = kernel(array[:whole], chunks.size, chunks.kept)
        if whole < len(array):
            last = self.largest(array[whole:], int(chunks.counts[-1]))
            places = np.concatenate([places, whole + last])
        indices = places - chunks.starts
        values = array[places].astype(np.float32, copy=False)
        magnitude = np.abs(values)
        high = magnitude > (np.add.reduceat(magnitude, chunks.first) / chunks.counts)[chunks.numbers]
        levels = np.zeros((len(chunks.counts), 2), np.float32)
        for place, group in enumerate((~high, high)):
            total = np.add.reduceat(magnitude * group, chunks.first)
            levels[:, place] = total / np.maximum(np.add.reduceat(group, chunks.first, dtype=np.int64), 1)
        gaps = np.diff(indices, prepend=-1) - 1
        gaps[chunks.first] = indices[chunks.first]
        low = np.unpackbits((gaps << (8 - low_bits)).astype(np.uint8)).reshape(-1, 8)[:, :low_bits]
        ends = np.cumsum((gaps >> low_bits) + 1) - 1
        unary = np.ones(int(ends[-1]) + 1, np.uint8)
        unary[ends] = 0
        negative, head = values < 0, self._fp16.encode(levels.reshape(-1))
        bits = (np.packbits(part) for part in (low.reshape(-1), negative, high, unary))
        payload = memoryview(bytes(head) + b"".join(part.tobytes() for part in bits))
        return payload, places, _values(self._fp16.decode(head, levels.size), chunks, high, negative)

    def decode(self, payload: memoryview, length: int) -> "Array":
        """See Codec."""
        if not length and not len(payload):
            return np.zeros(0, np.float32)
        chunks, low_bits = self._chunks(length)
        count, place = len(chunks.starts), 2 * 2 * len(chunks.counts) + 2
        sizes = [-(-low_bits * count // 8), -(-count // 8), -(-count // 8)]
        if not place + sum(sizes) < len(payload) <= place + sum(sizes) - (-length // 8):
            raise BadMessage(f"{len(payload)} bytes of sparseloco for {length} elements")
        levels = self._fp16.decode(payload[:place], 2 * len(chunks.counts))
        if not (np.isfinite(levels) & (levels >= 0)).all():
            raise BadMessage("sparseloco with a level that is no finite number from 0")
        parts = []
        for size in (*sizes, len(payload) - place - sum(sizes)):
            parts.append(np.unpackbits(np.frombuffer(payload, np.uint8, size, place)))
            place += size
        bits = np.zeros((count, 8), np.uint8)
        bits[:, 8 - low_bits :] = parts[0][: low_bits * count].reshape(count, low_bits)
        low = np.packbits(bits)
        ends = np.flatnonzero(parts[3] == 0)[:count]
        if len(ends) < count or ends[-1] // 8 + 1 < len(parts[3]) // 8:
            raise BadMessage(f"{len(ends)} indices of sparseloco where there should be {count}")
        gaps = ((np.diff(ends, prepend=-1) - 1) << low_bits) + low
        total = np.cumsum(gaps + 1)
        before = np.concatenate([[0], total[chunks.first[1:] - 1]])
        indices = total - np.repeat(before, chunks.counts) - 1
        if (indices >= chunks.limits).any():
            raise BadMessage("sparseloco with an index beyond its chunk")
        array = np.zeros(length, np.float32)
        array[chunks.starts + indices] = _values(levels, chunks, parts[2][:count], parts[1][:count].view(np.bool_))
        return array


class _Chunks:
    """The chunks of a slice.

    size: elements of each chunk but the last.
    whole: elements of all chunks of this size.
    kept: how many elements of each of these are sent.
    counts: how many elements of each chunk are sent.
    first: for each chunk, the number of its first element among all sent elements.
    numbers: for each sent element, the number of its chunk.
    starts, limits: for each sent element, its chunk's offset and length.
    """

    def __init__(self, length: int, size: int, kept: int) -> None:
        self.size, self.kept = size, kept
        whole, rest = divmod(length, size)
        self.whole = whole * size
        lengths = np.array([size] * whole + [rest] * (rest > 0), np.int64)
        self.counts = -(-lengths * kept // size)
        self.first = np.cumsum(self.counts) - self.counts
        self.numbers = np.repeat(np.arange(len(lengths)), self.counts)
        self.starts = self.numbers * size
        self.limits = lengths[self.numbers]


def _values(levels: "Array", chunks: _Chunks, high: "Array", negative: "Array") -> "Array":
    """The elements that were sent."""
    values: Array = levels[2 * chunks.numbers + high]
    np.negative(values, out=values, where=negative)
    return values


@lru_cache(16)
def _chunks_of(length: int, size: int, kept: int) -> _Chunks:
    """Slices of a tensor have at most two lengths."""
    return _Chunks(length, size, kept)
