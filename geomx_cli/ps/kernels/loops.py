"""The kernels as loops over elements, which numba compiles; slow as Python. They give the same bits as the kernels in
numpy, in vectorised and in codecs/_sparse.

Nothing here imports numba before `compiled` is called.
"""

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from geomx_cli.ps.kernels.vectorised import BLOCK, GROUPS, LANES, LARGE_BLOCK

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array

__all__ = ["compiled"]

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])
# Types of arguments when compiled. `out` and scales to write have no "const". Payloads need not be aligned.
_SIGNATURES = {
    "accumulate": ("const float32", float, "float32", float, "float32", float),
    "bf16_encode": ("const float32", "uint16"),
    "fp16_decode": ("const int16", float, "float32"),
    "fp16_encode": ("const float32", float, "uint16"),
    "int8_decode": ("const int8", "const float32", "float32"),
    "int8_encode": ("const float32", "float32", "int8"),
    "largest_of_rows": ("const float32", int, int),
    "one_bit_means": ("const float32", "const bool_", int, "float32"),
    "q4_decode": ("const uint8", "const float32", "float32"),
    "q4_encode": ("const float32", "float32", "uint8"),
    "reaching": ("const float32", float),
}
_U, _I, _F, _D, _BYTE = np.uint32, np.int32, np.float32, np.float64, np.uint8
_ROOT = np.float32(2**0.5)
_SMALLEST = np.finfo(np.float32).tiny
_CACHED = 2048
_ONE_AT_A_TIME = threading.Lock()


def compiled(kernel: _Kernel) -> _Kernel:
    """The compiled form of a kernel, without the GIL; `kernel` itself if numba is not installed.

    Compiling takes about a second, unless a process on this machine has done it before. numba keeps the result in
    __pycache__, or, if that is not writable, in the user's cache.
    """
    try:
        with _ONE_AT_A_TIME:  # numba sets itself up at its first uses, and several threads may join at once
            found: _Kernel = _compiled(kernel)
    except ImportError:
        return kernel
    return found


@functools.cache
def _compiled(kernel: _Kernel) -> _Kernel:
    import numba

    types: list[Any] = []
    scalars = {float: numba.float32, int: numba.int64}
    for item in _SIGNATURES[kernel.__name__]:
        if item in scalars:
            types.append(scalars[item])
        else:
            const, _, name = str(item).rpartition(" ")
            types.append(numba.types.Array(getattr(numba, name), 1, "C", readonly=bool(const), aligned=not const))
    loop = globals()[kernel.__name__]
    try:
        found: _Kernel = numba.njit(tuple(types), nogil=True, cache=True)(loop)
    except RuntimeError:  # no writable folder for the result
        found = numba.njit(tuple(types), nogil=True)(loop)
    return found


def accumulate(
    array: "Array", coefficient: "np.float32", momentum: "Array", decay: "np.float32", residual: "Array",
    limit: "np.float32",
) -> bool:  # fmt: skip
    """See vectorised. Magnitudes are compared as integers, among which NaN is larger than any limit."""
    bound, largest = np.empty(1, np.float32), _U(0)
    bound[0] = limit
    least, given = bound.view(np.uint32)[0], array.view(np.uint32)
    for place in range(len(array)):
        largest = max(largest, given[place] & _U(0x7FFFFFFF))
    if largest >= least:
        return False
    largest = _U(0)
    for start in range(0, len(array), _CACHED):
        part, total, speed = (
            array[start : start + _CACHED], residual[start : start + _CACHED], momentum[start : start + _CACHED]
        )  # fmt: skip
        if len(speed):
            for place in range(len(part)):
                speed[place] = speed[place] * coefficient + part[place]
            for place in range(len(part)):
                total[place] = total[place] * decay + speed[place]
        else:
            for place in range(len(part)):
                total[place] = total[place] * decay + part[place]
        bits = total.view(np.uint32)
        for place in range(len(part)):
            largest = max(largest, bits[place] & _U(0x7FFFFFFF))
    below: bool = largest < least
    return below


def fp16_encode(array: "Array", factor: "np.float32", out: "Array") -> bool:
    """See vectorised."""
    values = np.empty(_CACHED, np.float32)
    bits = values.view(np.uint32)
    for start in range(0, len(array), _CACHED):
        given, halves = array[start : start + _CACHED], out[start : start + _CACHED]
        for place in range(len(given)):
            values[place] = given[place] * factor
        ties = False
        for place in range(len(given)):
            word = bits[place]
            ties |= (word & _U(0x7F801FFF)) == _U(0x1000)
            word += _U(0xFFF) + ((word >> _U(13)) & _U(1))
            halves[place] = ((word >> _U(16)) & _U(0x8000)) | ((word >> _U(13)) & _U(0x7FFF))
        if ties:
            return False
    return True


def fp16_decode(halves: "Array", factor: "np.float32", out: "Array") -> None:
    """See vectorised."""
    bits = out.view(np.int32)
    for place in range(len(out)):
        bits[place] = (_I(halves[place]) << _I(13)) & _I(~0x70000000)
    for place in range(len(out)):
        out[place] *= factor


def bf16_encode(array: "Array", out: "Array") -> None:
    """See vectorised."""
    bits = array.view(np.uint32)
    for place in range(len(out)):
        word = bits[place]
        out[place] = (word + _U(0x7FFF) + ((word >> _U(16)) & _U(1))) >> _U(16)


def int8_encode(array: "Array", steps: "Array", out: "Array") -> None:
    """See vectorised."""
    bits, peak = array.view(np.uint32), np.empty(1, np.float32)
    peak_bits = peak.view(np.uint32)
    for row in range(len(steps)):
        given, codes = array[row * BLOCK : (row + 1) * BLOCK], out[row * BLOCK : (row + 1) * BLOCK]
        words, largest = bits[row * BLOCK : (row + 1) * BLOCK], _U(0)
        for place in range(BLOCK):
            largest = max(largest, words[place] & _U(0x7FFFFFFF))
        peak_bits[0] = largest
        step = peak[0] / _F(127)
        steps[row] = step
        if step == 0:
            step = _F(1)
        if step < _SMALLEST:
            for place in range(BLOCK):
                codes[place] = np.int8(min(max(np.rint(given[place] / step), _F(-127)), _F(127)))
        else:
            for place in range(BLOCK):
                codes[place] = np.int8(np.rint(given[place] / step))


def int8_decode(codes: "Array", steps: "Array", out: "Array") -> None:
    """See vectorised."""
    for row in range(len(steps)):
        given, values, step = codes[row * BLOCK : (row + 1) * BLOCK], out[row * BLOCK : (row + 1) * BLOCK], steps[row]
        for place in range(BLOCK):
            values[place] = _F(given[place]) * step


def q4_encode(array: "Array", peaks: "Array", out: "Array") -> None:
    """See vectorised."""
    bits, peak = array.view(np.uint32), np.empty(1, np.float32)
    peak_bits = peak.view(np.uint32)
    values, codes = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.uint8)
    exponents = values.view(np.int32)
    for row in range(len(peaks)):
        given, packed = array[row * BLOCK : (row + 1) * BLOCK], out[row * BLOCK // 2 : (row + 1) * BLOCK // 2]
        words, largest = bits[row * BLOCK : (row + 1) * BLOCK], _U(0)
        for place in range(BLOCK):
            largest = max(largest, words[place] & _U(0x7FFFFFFF))
        peak_bits[0] = largest
        peaks[row] = peak[0]
        divisor = peak[0] if peak[0] else _F(1)
        for place in range(BLOCK):
            values[place] = abs(given[place]) / divisor * _ROOT
        for place in range(BLOCK):
            level = max((exponents[place] >> _I(23)) - _I(127 - 7), _I(0))
            codes[place] = _BYTE(level) | (_BYTE(given[place] < _F(0)) << _BYTE(3))
        for place in range(BLOCK // 2):
            packed[place] = codes[2 * place] | (codes[2 * place + 1] << _BYTE(4))


def q4_decode(packed: "Array", peaks: "Array", out: "Array") -> None:
    """See vectorised."""
    bits = out.view(np.uint32)
    for row in range(len(peaks)):
        codes, words = packed[row * BLOCK // 2 : (row + 1) * BLOCK // 2], bits[row * BLOCK : (row + 1) * BLOCK]
        values = out[row * BLOCK : (row + 1) * BLOCK]
        for place in range(BLOCK // 2):
            # The sign and the exponent of 2^(level - 7); 0 for both signs of level 0.
            code = _U(codes[place]) & _U(15)
            level = code & _U(7)
            words[2 * place] = (((code >> _U(3)) << _U(8)) + level + _U(127 - 7)) * _U(level > 0) << _U(23)
            code = _U(codes[place]) >> _U(4)
            level = code & _U(7)
            words[2 * place + 1] = (((code >> _U(3)) << _U(8)) + level + _U(127 - 7)) * _U(level > 0) << _U(23)
        for place in range(BLOCK):
            values[place] *= peaks[row]


def one_bit_means(array: "Array", above: "Array", length: int, means: "Array") -> None:
    """See vectorised."""
    lows, highs = np.empty(LANES, np.float64), np.empty(LANES, np.float64)
    for row in range(len(array) // LARGE_BLOCK):
        start, count = row * LARGE_BLOCK, 0
        for lane in range(LANES):
            high, value = above[start + lane], _D(array[start + lane])
            lows[lane], highs[lane] = _D(0) if high else value, value if high else _D(0)
            count += int(high)
        for first in range(start + LANES, start + LARGE_BLOCK, LANES):
            for lane in range(LANES):
                high, value = above[first + lane], _D(array[first + lane])
                lows[lane] += _D(0) if high else value
                highs[lane] += value if high else _D(0)
                count += int(high)
        half = LANES
        while half > 1:
            half //= 2
            for lane in range(half):
                lows[lane] += lows[lane + half]
                highs[lane] += highs[lane + half]
        others = min(max(length - start, 0), LARGE_BLOCK) - count
        means[2 * row] = _F(lows[0] / max(others, 1))
        means[2 * row + 1] = _F(highs[0] / max(count, 1))


def reaching(array: "Array", bound: "np.float32") -> "Array":
    """See codecs/_sparse. Magnitudes are compared as integers, which have the same order. Then eight results are
    checked together, because few are true.
    """
    found, count = np.empty(len(array) + 8, np.int32), 0
    bits, limit = array.view(np.uint32), np.empty(1, np.float32)
    limit[0] = bound
    least = limit.view(np.uint32)[0]
    reached = np.empty(_CACHED, np.uint8)
    eights = reached.view(np.uint64)
    for start in range(0, len(array), _CACHED):
        part = bits[start : start + _CACHED]
        if len(part) < _CACHED:
            reached[len(part) :] = 0
        for place in range(len(part)):
            reached[place] = (part[place] & _U(0x7FFFFFFF)) >= least
        for eight in range(len(eights)):
            if eights[eight]:
                for place in range(8 * eight, 8 * eight + 8):
                    found[count] = start + place
                    count += reached[place]
    return found[:count].astype(np.int64)


def largest_of_rows(array: "Array", length: int, count: int) -> "Array":
    """See codecs/_sparse, and `reaching`."""

    def bound_of(values: "Array") -> "np.uint32":
        """The `count`th largest value, found bit by bit, because np.partition would take seconds to compile."""
        bound = _U(0)
        for bit in range(30, -1, -1):
            tried, reached = bound | (_U(1) << _U(bit)), 0
            for place in range(len(values)):
                reached += values[place] >= tried
            if reached >= count:
                bound = tried
        return bound

    groups, bits = GROUPS * count, array.view(np.uint32)
    maxima, found = np.empty(groups, np.uint32), np.empty(len(array) // length * count, np.int64)
    candidates, places = np.empty(length + 1, np.uint32), np.empty(length + 1, np.int32)
    taken = 0
    for start in range(0, len(array), length):
        row = bits[start : start + length]
        # A bound that at least `count` elements reach.
        maxima[:] = 0
        for first in range(0, length // groups * groups, groups):
            for group in range(groups):
                maxima[group] = max(maxima[group], row[first + group] & _U(0x7FFFFFFF))
        bound, number = bound_of(maxima), 0
        # The elements that reach it. The wanted elements are among these.
        for place in range(length):
            places[number] = place
            number += (row[place] & _U(0x7FFFFFFF)) >= bound
        for index in range(number):
            candidates[index] = row[places[index]] & _U(0x7FFFFFFF)
        # The elements above the `count`th largest, and the first elements equal to it.
        bound, tied = bound_of(candidates[:number]), count
        for index in range(number):
            tied -= candidates[index] > bound
        for index in range(number):
            equal = candidates[index] == bound
            if candidates[index] > bound or (equal and tied > 0):
                tied -= equal
                found[taken] = start + places[index]
                taken += 1
    return found
