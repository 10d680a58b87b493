"""Rounding to fewer significant bits."""

import numpy as np

from geomx_cli.ps.arrays import Array


def rounded(array: Array, bits: int) -> Array:
    """Each element rounded to this many significant bits, to nearest even."""
    mantissa, exponent = np.frexp(array.astype(np.float64))
    return np.ldexp(np.rint(mantissa * 2.0**bits) / 2.0**bits, exponent).astype(array.dtype)
