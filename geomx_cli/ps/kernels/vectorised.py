"""Kernels in numpy, for blocks that stay in the processor's cache, without more temporary arrays.

Codecs' kernels write a 1-D array of fp32 elements to `out`, an array of the encoded elements, or decode `out` again.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array

__all__ = [
    "BLOCK", "CACHED", "GROUPS", "LANES", "LARGE_BLOCK", "Kernel", "accumulate", "bf16_encode", "decode_blocks",
    "encode_blocks", "fp16_decode", "fp16_encode", "int8_decode", "int8_encode", "one_bit_decode", "one_bit_means",
    "q4_decode", "q4_encode",
]  # fmt: skip

Kernel = Callable[["Array", "Array", "Array"], None]
BLOCK = 256
"""Elements that share a scale in int8 and q4."""
LARGE_BLOCK = 1024
"""Elements that share two values in 1bit."""
LANES = 64
"""Sums of a block that are added separately at first."""
GROUPS = 2
"""Groups in a row for each element wanted from it, see _sparse.largest_of_rows."""
CACHED = 65_536
"""Elements processed at a time: 256 KiB of fp32."""
_ROWS = CACHED // BLOCK
_SMALLEST = np.finfo(np.float32).tiny
_Q4_VALUES = np.concatenate([[0], 2.0 ** np.arange(-6, 1), [0], -(2.0 ** np.arange(-6, 1))]).astype(np.float32)
_CODES = np.arange(256)
_Q4_PAIRS = np.stack([_Q4_VALUES[_CODES & 15], _Q4_VALUES[_CODES >> 4]], axis=1).view(np.uint64).reshape(-1)
"""The two elements that a byte stands for."""


def accumulate(
    array: "Array", coefficient: float, momentum: "Array", decay: float, residual: "Array", limit: float
) -> bool:
    """Compute residual = decay * residual + array in place. If `momentum` is not empty, instead compute momentum =
    coefficient * momentum + array and residual = decay * residual + momentum. Any float dtype, the same in all arrays.

    Returns whether the magnitude of each element of the residual is below `limit`. If an element of `array` is not
    below `limit`, returns False and changes nothing.
    """
    if len(array) and not (array.min() > -limit and array.max() < limit):
        return False
    below = True
    for start in range(0, len(array), CACHED):
        part, total, speed = (each[start : start + CACHED] for each in (array, residual, momentum))
        if len(speed):
            np.multiply(speed, speed.dtype.type(coefficient), out=speed)
            np.add(speed, part, out=speed)
            part = speed
        if decay != 1:
            np.multiply(total, total.dtype.type(decay), out=total)
        np.add(total, part, out=total)
        below = below and bool(total.min() > -limit and total.max() < limit)
    return below


def fp16_encode(array: "Array", factor: "np.float32", out: "Array") -> bool:
    """Round array * factor * 2^112 to nearest even. All products must be below 65520, and factor must be a normal
    number.

    Return False if an element cannot be rounded in this way. Then `out` is invalid.
    """
    scaled = np.empty(min(CACHED, len(array)), np.float32)
    other = np.empty(len(scaled), np.uint32)
    for start in range(0, len(array), CACHED):
        given = array[start : start + CACHED]
        # With fp16's exponent in the lowest bits of fp32's, the lowest 13 bits of the significand are rounded off.
        values, odd = scaled[: len(given)], other[: len(given)]
        np.multiply(given, factor, out=values)
        bits = values.view(np.uint32)
        # A tie in the subnormal range of fp32 may come from rounding in the multiplication.
        np.bitwise_and(bits, 0x7F801FFF, out=odd)
        if (odd == 0x1000).any():
            return False
        np.right_shift(bits, 13, out=odd)
        np.bitwise_and(odd, 1, out=odd)
        np.add(odd, 0xFFF, out=odd)
        np.add(bits, odd, out=bits)
        np.right_shift(bits, 16, out=odd)
        np.bitwise_and(odd, 0x8000, out=odd)
        np.right_shift(bits, 13, out=bits)
        np.bitwise_or(bits, odd, out=bits)
        np.copyto(out[start : start + CACHED], bits, casting="unsafe")
    return True


def fp16_decode(halves: "Array", factor: "np.float32", out: "Array") -> None:
    """Multiply finite fp16 elements, given as int16, by factor * 2^-112."""
    for start in range(0, len(out), CACHED):
        values = out[start : start + CACHED]
        bits = values.view(np.int32)
        np.copyto(bits, halves[start : start + CACHED])
        np.left_shift(bits, 13, out=bits)
        np.bitwise_and(bits, np.int32(~0x70000000), out=bits)  # copies of the sign
        np.multiply(values, factor, out=values)


def bf16_encode(array: "Array", out: "Array") -> None:
    """Round to nearest even; no element is NaN."""
    bits = array.view(np.uint32)
    other = np.empty(min(CACHED, len(array)), np.uint32)
    for start in range(0, len(array), CACHED):
        given = bits[start : start + CACHED]
        rounded = other[: len(given)]
        np.right_shift(given, 16, out=rounded)
        np.bitwise_and(rounded, 1, out=rounded)
        np.add(rounded, 0x7FFF, out=rounded)
        np.add(rounded, given, out=rounded)
        np.right_shift(rounded, 16, out=rounded)
        np.copyto(out[start : start + CACHED], rounded, casting="unsafe")


def int8_encode(array: "Array", steps: "Array", out: "Array") -> None:
    """See codecs/int8.py. The array consists of whole blocks."""
    rows, encoded = array.reshape(-1, BLOCK), out.reshape(-1, BLOCK)
    scaled = np.empty((min(_ROWS, len(rows)), BLOCK), np.float32)
    for start in range(0, len(rows), _ROWS):
        given, step = rows[start : start + _ROWS], steps[start : start + _ROWS]
        values = scaled[: len(given)]
        np.abs(given, out=values)
        np.max(values, axis=1, out=step)
        step /= np.float32(127)
        divisors = _divisors(step)
        np.divide(given, divisors, out=values)
        np.rint(values, out=values)
        if divisors.min() < _SMALLEST:  # a subnormal step may be far off
            np.clip(values, -127, 127, out=values)
        np.copyto(encoded[start : start + _ROWS], values, casting="unsafe")


def int8_decode(codes: "Array", steps: "Array", out: "Array") -> None:
    """See codecs/int8.py. The array consists of whole blocks."""
    rows = out.reshape(-1, BLOCK)
    np.copyto(rows, codes.reshape(-1, BLOCK))
    np.multiply(rows, steps[:, None], out=rows)


def q4_encode(array: "Array", peaks: "Array", out: "Array") -> None:
    """See codecs/q4.py. The array consists of whole blocks."""
    rows, encoded = array.reshape(-1, BLOCK), out.reshape(-1, BLOCK // 2)
    scaled = np.empty((min(_ROWS, len(rows)), BLOCK), np.float32)
    codes, signs = np.empty((2, *scaled.shape), np.uint8)
    for start in range(0, len(rows), _ROWS):
        given, peak = rows[start : start + _ROWS], peaks[start : start + _ROWS]
        values, code, sign = scaled[: len(given)], codes[: len(given)], signs[: len(given)]
        np.abs(given, out=values)
        np.max(values, axis=1, out=peak)
        np.divide(values, _divisors(peak), out=values)
        # The bounds between levels are at half powers of two, so the exponent of magnitude * sqrt(2) gives the level.
        np.multiply(values, np.float32(2**0.5), out=values)
        bits = values.view(np.int32)
        np.right_shift(bits, 23, out=bits)
        np.subtract(bits, 127 - 7, out=bits)
        np.maximum(bits, 0, out=bits)
        np.copyto(code, bits, casting="unsafe")
        np.less(given, 0, out=sign.view(np.bool_))
        np.left_shift(sign, 3, out=sign)
        np.bitwise_or(code, sign, out=code)
        pairs = code.view("<u2")
        np.bitwise_or(pairs, pairs >> 4, out=pairs)
        np.copyto(encoded[start : start + _ROWS], pairs, casting="unsafe")


def q4_decode(packed: "Array", peaks: "Array", out: "Array") -> None:
    """See codecs/q4.py. The array consists of whole blocks."""
    np.take(_Q4_PAIRS, packed, out=out.view(np.uint64), mode="clip")
    rows = out.reshape(-1, BLOCK)
    np.multiply(rows, peaks[:, None], out=rows)


def one_bit_means(array: "Array", above: "Array", length: int, means: "Array") -> None:
    """See codecs/one_bit.py. Computes, for each block, the mean of the elements not above and of the elements above, 0
    if there are none. The array consists of whole blocks. Its first `length` elements count; the rest are zeros and do
    not count as above.
    """
    rows, chosen = array.reshape(-1, LARGE_BLOCK), above.reshape(-1, LARGE_BLOCK)
    found, step = means.reshape(-1, 2), CACHED // LARGE_BLOCK // 2
    parts = np.empty((min(step, len(rows)), LARGE_BLOCK), np.float32)
    for start in range(0, len(rows), step):
        given, high = rows[start : start + step], chosen[start : start + step]
        part, number = parts[: len(given)], np.count_nonzero(high, axis=1)
        present = np.clip(length - np.arange(start, start + len(given)) * LARGE_BLOCK, 0, LARGE_BLOCK)
        bits, kept = given.view(np.int32), part.view(np.int32)
        np.copyto(kept, high)
        np.negative(kept, out=kept)
        np.bitwise_and(kept, bits, out=kept)  # those above, 0 for the others
        for column, count in ((1, number), (0, present - number)):
            sums = np.add.reduce(part.reshape(len(part), -1, LANES), axis=1, dtype=np.float64)
            half = LANES
            while half > 1:
                half //= 2
                sums[:, :half] += sums[:, half : 2 * half]
            np.divide(sums[:, 0], np.maximum(count, 1), out=found[start : start + step, column], casting="same_kind")
            np.bitwise_xor(kept, bits, out=kept)  # the others


def one_bit_decode(packed: "Array", means: "Array", out: "Array") -> None:
    """See codecs/one_bit.py."""
    values = means.view(np.int32).reshape(-1, 2)
    changes = values[:, :1] ^ values[:, 1:]
    for start in range(0, len(out), CACHED):
        found = out[start : start + CACHED].view(np.int32)
        found[:] = -np.unpackbits(packed[start // 8 : (start + CACHED) // 8], count=len(found)).view(np.int8)
        first, whole = start // LARGE_BLOCK, len(found) // LARGE_BLOCK
        rows, last = found[: whole * LARGE_BLOCK].reshape(-1, LARGE_BLOCK), found[whole * LARGE_BLOCK :]
        rows &= changes[first : first + whole]  # low ^ (low ^ high) is high
        rows ^= values[first : first + whole, :1]
        if len(last):
            last &= changes[-1, 0]
            last ^= values[-1, 0]


def encode_blocks(kernel: Kernel, array: "Array", scales: "Array", out: "Array", each: int) -> None:
    """Call a kernel that encodes whole blocks, `each` elements to a byte; the last block is filled up with zeros."""
    blocks = len(array) // BLOCK
    whole = blocks * BLOCK
    kernel(array[:whole], scales[:blocks], out[: whole // each])
    if rest := len(array) - whole:
        last, encoded = np.zeros(BLOCK, np.float32), np.empty(BLOCK // each, out.dtype)
        last[:rest] = array[whole:]
        kernel(last, scales[blocks:], encoded)
        out[whole // each :] = encoded[: -(-rest // each)]


def decode_blocks(kernel: Kernel, scales: "Array", codes: "Array", length: int, each: int) -> "Array":
    """The first `length` elements of so many blocks as these scales and codes begin, see `encode_blocks`."""
    blocks, whole = -(-length // BLOCK), length // BLOCK
    array = np.empty(blocks * BLOCK, np.float32)
    kernel(codes[: whole * BLOCK // each], scales[:whole], array[: whole * BLOCK])
    if blocks > whole:
        last, rest = np.zeros(BLOCK // each, codes.dtype), -(-(length - whole * BLOCK) // each)
        last[:rest] = codes[whole * BLOCK // each :][:rest]
        kernel(last, scales[whole:blocks], array[whole * BLOCK :])
    return array[:length]


def _divisors(scales: "Array") -> "Array":
    """A column of the scales, with 1 in place of 0."""
    return np.where(scales == 0, np.float32(1), scales)[:, None]
